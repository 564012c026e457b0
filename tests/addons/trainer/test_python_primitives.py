"""The code of docs/addons/trainer.md does what the page says."""

import json
import re
import shlex
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from trainer_runs import random_sequences

import dschat_lora
from dschat_lora.addons.trainer.trainer import Trainer
from dschat_lora.config.options import parse_config
from dschat_lora.rl.loop.train import run_rlhf
from dschat_lora.rl.loop.validation import check_rlhf
from dschat_lora.rl.options.config import RlhfConfig
from helpers.launcher import ROOT

PAGE = (ROOT / "docs" / "addons" / "trainer.md").read_text(encoding="utf-8")
COMMAND = re.search(r"^dschat-lora rlhf (.*)$", PAGE, re.MULTILINE)[1]
PYTHON = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
LOOP, WITH_REFERENCE, OWN_LOSS, SHARED = PYTHON
LOSS_LINE = '    loss = trainer.forward_backward(sequences, loss="ppo", cliprange=0.2)\n'


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A directory with the files that the page writes."""
    block = re.search(r"^```\n(cat > my_rules.*?)^```", PAGE, re.MULTILINE | re.DOTALL)[1]
    block = re.sub("^python ", f"{shlex.quote(sys.executable)} ", block, flags=re.MULTILINE)
    subprocess.run(["bash", "-ec", block], cwd=tmp_path, check=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(dschat_lora, "Trainer", Trainer, raising=False)
    yield tmp_path
    sys.modules.pop("my_rules", None)


def command(*more):
    """Rewards and losses of each iteration, and the adapter, of the page's command."""
    run_rlhf(check_rlhf(parse_config(RlhfConfig, [*shlex.split(COMMAND), *more])))
    lines = Path("output/grpo/metrics.jsonl").read_text(encoding="utf-8").splitlines()
    steps = [each for each in map(json.loads, lines) if each["kind"] == "train"]
    return steps, load_file("output/grpo/actor/adapter/adapter_model.safetensors")


def check_same(loop, capsys, steps, adapter, *, names=("iteration", "reward", "loss")):
    capsys.readouterr()
    exec(compile(loop, "grpo.py", "exec"), {})
    printed = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(printed) == len(steps) == 6
    for own, step in zip(printed, steps, strict=True):
        for name in names:
            assert own[name] == pytest.approx(step[name], abs=1e-5)
    assert len({own["loss"] for own in printed}) == 6
    found = load_file("my_adapter/adapter_model.safetensors")
    torch.testing.assert_close(found, adapter, atol=1e-5, rtol=0)


@pytest.mark.thorough
def test_the_loop_gives_the_numbers_of_the_command(home, capsys):
    assert len(LOOP.splitlines()) <= 36
    check_same(LOOP, capsys, *command())


@pytest.mark.thorough
def test_the_loop_with_a_reference_gives_those_with_a_penalty(home, capsys):
    steps, adapter = command("--kl_coef", "0.1")
    assert LOOP.count(LOSS_LINE) == 1
    loop = LOOP.replace(LOSS_LINE, textwrap.indent(WITH_REFERENCE, "    "))
    start = "reference = dl.Trainer(lora_dim=8, seed=1234)"
    assert start in PAGE
    loop = loop.replace("\nfor iteration", f"\n{start}\nfor iteration")
    # The command reports the loss without the penalty.
    check_same(loop, capsys, steps, adapter, names=("iteration", "reward"))


def test_the_shared_loop_answers_as_the_other_does(home):
    with Trainer(lora_dim=8, seed=1234) as trainer:
        chosen = ["\n\nHuman: Name a fruit.\n\nAssistant:", "One two"]
        names = {"trainer": trainer, "chosen": chosen, "iteration": 3}
        exec(SHARED, names)
        whole = trainer.sample(chosen, num_samples=4, max_tokens=16, seed=(1234, 3))
        assert names["answers"] == whole


def test_a_loss_of_ones_own_is_called_as_it_stands(home):
    with Trainer(lora_dim=2) as trainer:
        sequences = [{**each, "gamma": 0.0} for each in random_sequences(3)]
        names = {"trainer": trainer, "sequences": sequences}
        exec(OWN_LOSS, names)
        assert names["loss"] == pytest.approx(trainer.forward_backward(sequences), rel=1e-6)
