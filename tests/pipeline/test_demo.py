"""The demo: the commands it runs, its tables and its report."""

import json

import pytest

from dschat_lora.pipeline import demo
from dschat_lora.pipeline.demo_judge import Judgement, Share


def judged(value):
    shares = {name: Share(value, 0.01) for name in ("score", "correct", "polite", "ends")}
    return Judgement(perplexity=1 + value, greedy=shares, sampled=shares)


def write_metrics(directory, evals):
    directory.mkdir(parents=True, exist_ok=True)
    lines = [{"kind": "eval", "step": n, **each} for n, each in enumerate(evals)]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (directory / "metrics.jsonl").write_text(text, encoding="utf-8")


def test_demo_refuses_a_directory_that_holds_one(tmp_path, capsys):
    (tmp_path / "rlhf").mkdir()
    (tmp_path / "rlhf" / "metrics.jsonl").write_text("{}\n")
    with pytest.raises(SystemExit) as end:
        demo.run_demo(str(tmp_path))
    assert end.value.code == 2
    assert "holds an earlier demo" in capsys.readouterr().err


@pytest.fixture
def ran(monkeypatch, tmp_path):
    """(commands, output directory) of a demo whose stages are written down, not run."""
    commands = []

    def run(command):
        commands.append(command)
        directory = tmp_path / "demo" / ("sft", "reward", "rlhf")[len(commands) - 1]
        evals = [
            {"perplexity": 2.0, "accuracy": 0.5, "reward": 1.0, "kl": 0.0},
            {"perplexity": 1.5, "accuracy": 0.9, "reward": 3.5, "kl": 0.625},
        ]
        write_metrics(directory, evals)
        return 0

    monkeypatch.setattr(demo, "run_or_end", run)
    models = {"base": judged(0.1), "SFT": judged(0.5), "PPO": judged(0.9)}
    monkeypatch.setattr(demo, "evaluate_by_rule", lambda sft, policy: models)
    monkeypatch.setattr(demo, "accuracy_by_flaw", lambda directory: {"curt": 0.75})
    demo.run_demo(str(tmp_path / "demo"), seed=7)
    return commands, tmp_path / "demo"


def test_stages_are_run_as_a_user_would_each_on_the_one_before(ran):
    commands, directory = ran
    for command, name in zip(commands, ("sft", "reward", "rlhf"), strict=True):
        assert command[0].endswith("deepspeed")
        assert command[1:4] == ["--num_gpus", "1", "--master_port"]  # a free one
        assert command[5:8] == ["--module", "dschat_lora", name]
        options = dict(zip(command[8::2], command[9::2], strict=True))
        assert options["--output_dir"] == str(directory / name)
        assert options["--seed"] == "7"
    _, reward, rlhf = ([*command] for command in commands)
    assert reward[reward.index("--model_name_or_path") + 1] == str(directory / "sft")
    assert rlhf[rlhf.index("--actor_model_name_or_path") + 1] == str(directory / "sft")
    assert rlhf[rlhf.index("--critic_model_name_or_path") + 1] == str(directory / "reward")


def test_policy_never_meets_the_prompts_it_is_judged_on(ran):
    commands, _ = ran
    assert not any("test.jsonl" in text for text in commands[-1])


def test_tables_show_each_model_the_reward_model_and_the_divergence(ran):
    _, directory = ran
    report = (directory / "report.html").read_text(encoding="utf-8")
    rows = demo.judgement_rows({"SFT": judged(0.5), "PPO": judged(0.9)})
    assert rows[0] == ["perplexity of good answers", "1.500", "1.900"]
    assert rows[1] == [
        "rule score: right, polite, ends (greedy)",
        "0.500 +- 0.010",
        "0.900 +- 0.010",
    ]
    for text in ("0.900 +- 0.010", "0.625", "3.50", "0.750", "rejected is curt"):
        assert text in report


def test_a_stage_that_fails_ends_the_demo(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(demo, "run_or_end", lambda command: 3)
    with pytest.raises(SystemExit):
        demo.run_demo(str(tmp_path / "demo"))
    assert "exit code 3" in capsys.readouterr().err


def test_a_signal_ends_the_stage_and_the_demo(monkeypatch, tmp_path):
    command = ["sh", "-c", "kill -TERM $PPID; sleep 60"]
    monkeypatch.setattr(demo, "launch_command", lambda *_, program: command)
    with pytest.raises(SystemExit, match="143"):
        demo.run_demo(str(tmp_path / "demo"))
