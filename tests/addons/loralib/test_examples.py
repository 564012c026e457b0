"""The example of a training loop of one's own learns, alike at every ZeRO stage."""

import re

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from dschat_lora.assets import BUNDLED_MODEL
from helpers.launcher import ROOT
from helpers.spread import ALL

pytestmark = pytest.mark.stage
SCRIPT = ROOT / "examples" / "own_training_loop.py"
PROBE = torch.arange(3, 40)[None]
# The example, and what its model says before it is converted back.
NOTING = f"""
import os, runpy, torch
from dschat_lora.addons.loralib import deepspeed_chat
convert = deepspeed_chat.convert_lora_to_linear_layer
def noting(model):
    with torch.no_grad():
        logits = model.eval()(torch.arange(3, 40)[None]).logits
    torch.save(logits, "logits-" + os.environ["RANK"] + ".pt")
    return convert(model)
deepspeed_chat.convert_lora_to_linear_layer = noting
runpy.run_path({str(SCRIPT)!r}, run_name="__main__")
"""
RUNS = {"alone": (1, 2, 20), "zero0": (2, 0, 3), "zero2": (2, 2, 3), "zero3": (2, 3, 3)}


@pytest.fixture(scope="module")
def run(launcher, tmp_path_factory):
    """``run(name)``: losses of the steps and the directory of the model."""
    done = {}

    def of(name):
        if name not in done:
            ranks, stage, steps = RUNS[name]
            home = tmp_path_factory.mktemp(name)
            argv = ["--zero_stage", stage, "--max_steps", steps, "--output_dir", "out"]
            (home / "noting.py").write_text(NOTING)
            running = launcher.start(argv, home, ranks=ranks, script=home / "noting.py")
            assert not any(running.wait()), running.output()
            losses = re.findall(r"step (\d+): loss ([\d.]+)", running.out())
            assert [int(step) for step, _ in losses] == list(range(1, steps + 1))
            done[name] = [float(loss) for _, loss in losses], home / "out"
        return done[name]

    return of


def test_the_loss_falls(run):
    losses, _ = run("alone")
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["zero2", "zero3"])
def test_two_processes_train_alike_at_every_zero_stage(run, name):
    (expected, reference), (losses, saved) = run("zero0"), run(name)
    assert losses == pytest.approx(expected, abs=2e-6)
    weights = [load_file(each / "model.safetensors") for each in (saved, reference)]
    torch.testing.assert_close(*weights, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["alone", *["zero3"] * ALL])
def test_the_saved_model_is_a_stock_one_whose_blocks_alone_have_changed(run, name):
    _, saved = run(name)
    before = AutoModelForCausalLM.from_pretrained(BUNDLED_MODEL)
    after = AutoModelForCausalLM.from_pretrained(saved)
    assert type(after) is type(before)
    changed = {
        key
        for key, value in after.state_dict().items()
        if not torch.equal(value, before.state_dict()[key])
    }
    names = [f"self_attn.{each}_proj" for each in ("q", "k", "v", "out")] + ["fc1", "fc2"]
    assert changed == {
        f"model.decoder.layers.{n}.{each}.weight" for each in names for n in range(4)
    }
    expected = torch.load(saved.parent / "logits-0.pt")
    torch.testing.assert_close(after(PROBE).logits, expected, rtol=1e-4, atol=1e-4)
