"""The tutorials of step 3: what they write to files, and, where all is asked for, every command."""

import re
import shlex
import subprocess
import sys

import pytest

from dschat_lora.rl.score.user_functions import find_function
from helpers.addons import of_addon
from helpers.launcher import ROOT
from helpers.roles import Words

TUTORIALS = {"grpo_with_a_python_reward.md": ("my_rules:begins_with_the", ["The", "A"], [1.0, 0.0])}
if of_addon("environments.addon"):
    TUTORIALS["addons/environments.md"] = (
        "my_tools:calculate",
        ["<sum>2+40</sum>", "42"],
        [{"role": "tool", "content": "42"}, None],
    )
SHORT = {
    "sft": "--max_steps 2 --eval_ratio 0.02",
    "rlhf": "--max_steps 2 --eval_prompts 2",
}


def blocks(name):
    text = (ROOT / "docs" / name).read_text(encoding="utf-8")
    return re.findall(r"^```\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def write_files(name, home):
    """Run the commands of a tutorial that write files."""
    for block in blocks(name):
        for command in re.findall(r"^(?:cat|python) .*?^EOT$", block, re.MULTILINE | re.DOTALL):
            command = re.sub("^python", shlex.quote(sys.executable), command)
            subprocess.run(["bash", "-c", command], cwd=home, check=True)


@pytest.mark.parametrize("name", TUTORIALS)
def test_functions_of_a_tutorial_do_what_it_says(name, tmp_path, monkeypatch):
    function_name, texts, expected = TUTORIALS[name]
    write_files(name, tmp_path)
    monkeypatch.chdir(tmp_path)
    function = find_function("reward_function", function_name, Words())
    assert function(texts) == expected


@pytest.mark.stage
@pytest.mark.thorough
@pytest.mark.parametrize("name", TUTORIALS)
def test_commands_of_a_tutorial_run_one_after_another(name, tmp_path):
    write_files(name, tmp_path)
    script = re.compile(r"^deepspeed training/step\d_(\w+)/main.py")
    lines = [script.sub(r"dschat-lora \1", line) for b in blocks(name) for line in b.splitlines()]
    ours = (line for line in lines if line.startswith("dschat-lora ") and "Qwen/" not in line)
    commands = [shlex.split(line)[1:] for line in ours]
    assert "rlhf" in [verb for verb, *_ in commands]
    for words in commands:
        argv = [sys.executable, "-m", "dschat_lora", *words, *SHORT.get(words[0], "").split()]
        subprocess.run(argv, cwd=tmp_path, check=True)
