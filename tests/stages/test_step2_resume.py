"""Reward models and DPO that are interrupted and go on: the same runs, bit for bit."""

import json
import random
import shutil
import signal
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from dschat_lora.assets import BUNDLED_DATA, BUNDLED_MODEL
from dschat_lora.config.addons import installed
from helpers.launcher import ROOT, undisturbed_runs
from helpers.spread import ALL
from stages.test_resume_command import (
    assert_same_run,
    files_of,
    last_step,
    names,
    record,
    wait_for_steps,
)

pytestmark = pytest.mark.stage

STEPS = 7
# Dropout draws numbers at every step; epochs, evaluations and checkpoints come between.
COMMON = f"""
    --data_path rows.jsonl --eval_ratio 0.2 --max_seq_len 64 --max_steps {STEPS} --eval_interval 4
    --save_interval 3 --save_total_limit 0 --sample_generations 1 --output_dir out
    --resume_from_checkpoint auto
""".split()
LORA = "--lora_dim 4 --lora_dropout 0.1 --lora_learning_rate 5e-3"
FULL = "--learning_rate 1e-3"
FLY = f"{LORA} --no-precompute_ref_log_probs"
# name: (stage, ranks, options)
RUNS = {
    "reward": ("reward", 1, LORA),
    "reward, ZeRO 2": ("reward", 1, f"{LORA} --zero_stage 2 --gradient_accumulation_steps 2"),
    "reward, ZeRO 3": ("reward", 1, f"{LORA} --zero_stage 3 --reward_loss per_token"),
    "reward, every weight": ("reward", 1, f"{FULL} --packing"),
    "reward, 2 ranks": ("reward", 2, f"{LORA} --packing"),
    "reward, 2 ranks, ZeRO 2": ("reward", 2, f"{LORA} --zero_stage 2 --no-share_prompt"),
    "reward, 2 ranks, ZeRO 3": ("reward", 2, f"{LORA} --zero_stage 3"),
    "dpo": ("dpo", 1, f"{LORA} --rpo_alpha 0.1"),
    "dpo, every weight": ("dpo", 1, FULL),
    "orpo": ("dpo", 1, f"{LORA} --loss_type orpo --gradient_accumulation_steps 2"),
    "simpo, 2 ranks, ZeRO 2": ("dpo", 2, f"{LORA} --loss_type simpo --zero_stage 2"),
    "dpo, 2 ranks, ZeRO 2": ("dpo", 2, f"{LORA} --zero_stage 2"),
    "dpo, 2 ranks, ZeRO 3": ("dpo", 2, f"{LORA} --zero_stage 3 --packing"),
    "dpo on the fly": ("dpo", 1, FLY),
    "dpo on the fly, ZeRO 2": ("dpo", 1, f"{FLY} --zero_stage 2"),
    "dpo on the fly, ZeRO 3": ("dpo", 1, f"{FLY} --zero_stage 3"),
    "dpo on the fly, 2 ranks, ZeRO 2": ("dpo", 2, f"{FLY} --zero_stage 2"),
    "dpo on the fly, 2 ranks, ZeRO 3": ("dpo", 2, f"{FLY} --zero_stage 3"),
}
if "kto" in installed():
    RUNS |= {
        "kto": ("dpo", 1, f"{LORA} --loss_type kto"),
        "kto on the fly, 2 ranks, ZeRO 3": ("dpo", 2, f"{FLY} --loss_type kto --zero_stage 3"),
    }
TERM, KILL = signal.SIGTERM, signal.SIGKILL
SHORT = [("reward", TERM), ("dpo", KILL)]
POINTS = [(name, number) for name in RUNS for number in (TERM, KILL)] if ALL else SHORT


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """The bundled model, of its layers the first alone."""
    directory = tmp_path_factory.mktemp("model")
    AutoModelForCausalLM.from_pretrained(BUNDLED_MODEL, num_hidden_layers=1).save_pretrained(
        directory
    )
    AutoTokenizer.from_pretrained(BUNDLED_MODEL).save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def start(launcher, model, tmp_path_factory):
    """``start(name, home, *argv)``: (its directory, the run of this name on its way there)."""

    def call(name, home=None, *argv):
        stage, ranks, options = RUNS[name]
        if home is None:
            home = tmp_path_factory.mktemp("run")
            lines = Path(BUNDLED_DATA["train"]).read_text(encoding="utf-8").splitlines()[:30]
            (home / "rows.jsonl").write_text("\n".join(lines), encoding="utf-8")
        script = ROOT / "training" / f"step2_{stage}" / "main.py"
        size = ["--per_device_train_batch_size", 4 // ranks]
        line = ["--model_name_or_path", model, *COMMON, *size, *options.split(), *argv]
        return home, launcher.start(line, home, ranks=ranks, script=script)

    return call


@pytest.fixture(scope="module")
def undisturbed(start):
    """``undisturbed(name)``: where the run of this name wrote, without a pause."""
    return undisturbed_runs(start)


@pytest.mark.parametrize(
    ("name", "number"), POINTS, ids=lambda value: value if isinstance(value, str) else value.name
)
def test_interrupted_and_resumed_equals_uninterrupted(name, number, start, undisturbed):
    home, running = start(name)
    # A killed run has a checkpoint to go on from once it has four steps.
    some = 4 if number == KILL else random.Random(f"{name} {number}").randint(1, STEPS - 4)
    wait_for_steps(running, home / "out", some)
    running.signal(number)
    codes = running.wait()
    assert set(codes) == {143 if number == TERM else -KILL}, running.output()
    # A kill in the middle of a save leaves what has no name yet.
    left = names(home / "out") if (home / "out" / "checkpoints").is_dir() else []
    kept = [name for name in left if name.startswith("step-")]

    _, running = start(name, home)
    assert not any(running.wait()), running.output()
    begun = f"resuming from out/checkpoints/{kept[-1]}" if kept else "starting from scratch"
    assert begun in running.out()
    whole = undisturbed(name)
    if (whole / "adapter").exists():
        assert_same_run(home / "out", whole, steps=STEPS)
    else:
        assert_same_model(home / "out", whole)


def assert_same_model(found, expected):
    ours, theirs = (files_of(path / "model") for path in (found, expected))
    assert ours == theirs
    assert record(found)["results"] == record(expected)["results"]
    assert last_step(found) == last_step(expected) == STEPS


def test_every_run_is_interrupted_in_a_long_test():
    assert {name for name, _ in SHORT} <= RUNS.keys()
    assert {(stage, ranks) for stage, ranks, _ in RUNS.values()} == {
        (stage, ranks) for stage in ("reward", "dpo") for ranks in (1, 2)
    }


# ---------------------------------------------------------------------------- another run


@pytest.fixture
def copy_of(tmp_path, undisturbed):
    """``copy_of(name)``: a finished run of this name, in a directory of its own."""

    def copy(name):
        whole = undisturbed(name)
        shutil.copytree(whole, tmp_path / "out", symlinks=True)
        shutil.copy(whole.parent / "rows.jsonl", tmp_path / "rows.jsonl")
        return tmp_path / "out"

    return copy


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("reward", "--reward_loss per_token", "--reward_loss was bradley_terry, now per_token"),
        ("reward", "--no-share_prompt", "--share_prompt was True, now False"),
        ("dpo", "--beta 0.2", "--beta was 0.1, now 0.2"),
        ("dpo", "--loss_type hinge", "--loss_type was sigmoid, now hinge"),
    ],
)
def test_another_objective_is_refused_in_one_line(start, copy_of, name, change, message):
    out = copy_of(name)
    before = files_of(out)
    _, running = start(name, out.parent, *change.split())
    assert running.wait() == [2], running.output()
    assert running.err().startswith("error: --resume_from_checkpoint ")
    assert f"the run differs: {message}" in running.err()
    assert running.err().count("\n") == 1
    assert files_of(out) == before


@pytest.mark.thorough
def test_another_starting_adapter_is_refused_in_one_line(start, launcher, tmp_path, undisturbed):
    whole = undisturbed("reward")
    (tmp_path / "rows.jsonl").write_bytes((whole.parent / "rows.jsonl").read_bytes())
    other = tmp_path / "other"
    name = "reward"
    # one more step makes another adapter
    options = ["--lora_dropout", 0.1, "--model_name_or_path", whole / "adapter"]
    _, running = start(name, tmp_path, *options, "--max_steps", 1, "--output_dir", other)
    assert not any(running.wait()), running.output()
    _, running = start(name, tmp_path, *options, "--max_steps", 2)
    assert not any(running.wait()), running.output()
    options[-1] = other / "adapter"
    _, running = start(name, tmp_path, *options, "--max_steps", 4)
    assert running.wait() == [2], running.output()
    assert running.err().count("\n") == 1
    assert "the run differs: the initial adapter (was " in running.err()


@pytest.mark.thorough
def test_finished_run_resumed_with_more_steps_keeps_its_reference(start, copy_of, undisturbed):
    name = "dpo on the fly"
    out = copy_of(name)
    _, running = start(name, out.parent, "--max_steps", STEPS + 1)
    assert not any(running.wait()), running.output()
    # Far from the start by now: a reference taken anew would show no margin.
    first, *_, last = (line for line in _evals(out) if line["step"] in (STEPS, STEPS + 1))
    assert abs(last["margin"]) > 0.5 * abs(first["margin"]) > 1e-3


def _evals(out):
    lines = (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [line for line in map(json.loads, lines) if line["kind"] == "eval"]
