"""The demo: the stages it runs, its tables and its report."""

import json

import pytest

from dschat_lora.addons.demo import demo
from dschat_lora.addons.demo import judge as demo_judge
from dschat_lora.addons.demo.judge import Judgement, Share


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
    """(options by stage, output directory) of a demo whose stages are written down, not run."""
    asked = {}

    def run(name, named, options, *, of_command):
        assert of_command
        asked[name] = {**named, **options}
        evals = [
            {"perplexity": 2.0, "accuracy": 0.5, "reward": 1.0, "kl": 0.0},
            {"perplexity": 1.5, "accuracy": 0.9, "reward": 3.5, "kl": 0.625},
        ]
        write_metrics(options["output_dir"], evals)

    monkeypatch.setattr(demo, "train", run)
    models = {"base": judged(0.1), "SFT": judged(0.5), "PPO": judged(0.9)}
    monkeypatch.setattr(demo_judge, "evaluate_by_rule", lambda sft, policy: models)
    monkeypatch.setattr(demo_judge, "accuracy_by_flaw", lambda directory: {"curt": 0.75})
    demo.run_demo(str(tmp_path / "demo"), seed=7)
    return asked, tmp_path / "demo"


def test_stages_are_run_each_on_the_one_before_and_shown_as_commands(ran, capsys):
    asked, directory = ran
    assert [*asked] == ["sft", "reward", "rlhf"]
    for name, options in asked.items():
        assert (options["output_dir"], options["seed"]) == (directory / name, 7)
    assert asked["reward"]["model_name_or_path"] == directory / "sft"
    assert asked["rlhf"]["actor_model_name_or_path"] == directory / "sft"
    assert asked["rlhf"]["critic_model_name_or_path"] == directory / "reward"


def test_policy_never_meets_the_prompts_it_is_judged_on(ran):
    asked, _ = ran
    assert not any("test.jsonl" in str(value) for value in asked["rlhf"].values())


@pytest.mark.smoke
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
