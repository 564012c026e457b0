"""What a run says last: commands that parse, with its own output and data."""

import shlex
from pathlib import Path
from types import SimpleNamespace

import pytest

from dschat_lora.commands.stages import STAGES
from dschat_lora.config.addons import provided
from dschat_lora.config.options import parse_config
from dschat_lora.runtime.caller import NOBODY
from dschat_lora.runtime.export import next_commands, say_next_steps

HOME = Path("out/my run")
CHAT, REWARD = "chat 'out/my run'", "reward --model_name_or_path 'out/my run'"
PPO = "--critic_model_name_or_path 'out/my run'"
READ = "--data_path 'b c.jsonl' --columns chosen=good rejected=bad --data_split 2,4,4"


@pytest.mark.parametrize(
    ("stage", "argv", "has_pairs", "written", "expected"),
    [
        ("sft", "", True, "adapter", [CHAT, REWARD]),
        ("sft", "--max_seq_len 2048", True, "adapter", [CHAT, f"{REWARD} --max_seq_len 2048"]),
        ("sft", f"{READ} --max_steps 5", True, "adapter", [CHAT, f"{REWARD} {READ}"]),
        ("sft", "--data_path a.jsonl", False, "adapter", [CHAT, "merge 'out/my run'"]),
        ("sft", "--data_path a.jsonl", False, "adapter model", [CHAT]),
        ("sft", "--data_path a.jsonl", False, "model", [CHAT]),
        # Nothing there tells what a response of step 3 is worth.
        ("dpo", "--data_path a.jsonl", True, "adapter", [CHAT, "merge 'out/my run'"]),
        (
            "reward",
            f"--model_name_or_path out/sft {READ}",
            True,
            "adapter",
            [
                "chat out/sft --reward 'out/my run'",
                f"rlhf --actor_model_name_or_path out/sft {PPO} {READ}",
            ],
        ),
        (
            "reward",
            "--model_name_or_path facebook/opt-350m",
            True,
            "adapter",
            [
                "chat facebook/opt-350m --reward 'out/my run'",
                f"rlhf --actor_model_name_or_path OUTPUT_OF_SFT {PPO}",
            ],
        ),
        # The bundled base, whatever lies in output/sft.
        ("reward", "", True, "model", ["chat base --reward 'out/my run'", f"rlhf {PPO}"]),
        ("rlhf", "", False, "actor/adapter", [CHAT, "merge 'out/my run'"]),
        ("rlhf", "", False, "actor/model", [CHAT]),
        *(
            (stage, "", False, "actor/adapter", [CHAT, "merge 'out/my run'"])
            for stage in provided("stage")
        ),
        ("nlg", "", False, "adapter", []),
    ],
)
def test_commands_fit_what_the_run_read_and_wrote(
    stage, argv, has_pairs, written, expected, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    for name in written.split():
        (HOME / name).mkdir(parents=True)
    Path("out/sft").mkdir()
    for run in (".", "out/sft"):  # a name of the hub is no directory of the run it is typed in
        Path(run, "run.json").touch()
    config = parse_config(STAGES.get(stage, STAGES["sft"]).config, shlex.split(argv))
    commands = next_commands(stage, config, HOME, has_pairs=has_pairs)
    assert commands == [f"dschat-lora {each}" for each in expected]
    for command in commands:
        _, verb, *words = shlex.split(command)
        if verb in STAGES:
            parse_config(STAGES[verb].config, words)


def test_other_stages_name_what_observers_leave_alone():
    page = SimpleNamespace(words="report: out/report.html (open it in a browser)")
    said, config = [], parse_config(STAGES["sft"].config, [])
    log, run = SimpleNamespace(say=said.append), {"config": config, "directory": HOME}
    say_next_steps(SimpleNamespace(stage="nlg", log=log, observers=[page], caller=NOBODY, **run))
    assert said == [page.words]
