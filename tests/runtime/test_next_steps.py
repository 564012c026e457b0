"""What a run says last: commands that parse, with its own output and data."""

import shlex
from pathlib import Path
from types import SimpleNamespace

import pytest

from dschat_lora.config.options import parse_config
from dschat_lora.pipeline.stages import STAGES
from dschat_lora.runtime.caller import NOBODY
from dschat_lora.runtime.export import next_commands, say_next_steps

HOME = Path("out/my run")


@pytest.mark.parametrize(
    ("stage", "argv", "expected"),
    [
        ("sft", [], ["chat 'out/my run'", "reward --model_name_or_path 'out/my run'"]),
        (
            "sft",
            ["--data_path", "a.jsonl", "b c.jsonl"],
            [
                "chat 'out/my run'",
                "reward --model_name_or_path 'out/my run' --data_path a.jsonl 'b c.jsonl'",
            ],
        ),
        ("dpo", [], ["chat 'out/my run'", "rlhf --actor_model_name_or_path 'out/my run'"]),
        (
            "reward",
            ["--model_name_or_path", "out/sft", "--data_path", "pairs.jsonl"],
            [
                "eval 'out/my run' pairs.jsonl",
                "rlhf --actor_model_name_or_path out/sft --critic_model_name_or_path 'out/my run' "
                "--data_path pairs.jsonl",
            ],
        ),
        ("rlhf", [], ["chat 'out/my run'", "merge 'out/my run/actor'"]),
    ],
)
def test_commands_name_the_output_and_the_data_of_the_run(stage, argv, expected):
    config = parse_config(STAGES[stage].config, argv)
    commands = next_commands(stage, config, HOME)
    assert commands == [f"dschat-lora {each}" for each in expected]
    for command in commands:
        _, verb, *words = shlex.split(command)
        if verb in STAGES:
            parse_config(STAGES[verb].config, words)


def test_other_stages_name_their_report_alone():
    said, config = [], parse_config(STAGES["sft"].config, [])
    log, run = SimpleNamespace(say=said.append), {"config": config, "directory": HOME}
    say_next_steps(SimpleNamespace(stage="nlg", log=log, report=object(), caller=NOBODY, **run))
    assert said == ["report: out/my run/report.html (open it in a browser)"]
