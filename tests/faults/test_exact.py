"""Step 1 that is interrupted at a random moment and goes on: the same run, bit for bit."""

import random
import signal
import time
from itertools import product
from pathlib import Path

import pytest
from harness import (
    LONG,
    TINY,
    broken_checkpoints,
    check_same_end,
    trained_steps,
    valid_checkpoints,
    wait_until,
)

from dschat_lora.assets import BUNDLED_DATA
from helpers.launcher import undisturbed_runs

pytestmark = pytest.mark.stage

STEPS = 12
LORA = "--lora_dropout 0.1 --lora_learning_rate 5e-3"
FULL = "--lora_dim 0 --learning_rate 1e-3"
TWO = "--per_device_train_batch_size 2"
# name: (ranks, options)
RUNS = {
    "lora": (1, LORA),
    "epochs": (1, f"{LORA} --data_path rows.jsonl --eval_ratio 0.2"),
    "unpacked": (1, f"{LORA} --no-packing --gradient_accumulation_steps 2"),
    "zero 1": (1, f"{LORA} --zero_stage 1 --lr_scheduler_type linear --num_warmup_steps 4"),
    "zero 3": (1, f"{LORA} --zero_stage 3 --data_path rows.jsonl --eval_ratio 0.2 --no-packing"),
    "full": (1, FULL),
    "full, zero 2": (1, f"{FULL} --zero_stage 2 --no-packing"),
    "2 ranks": (2, f"{LORA} {TWO}"),
    "2 ranks, zero 1": (2, f"{LORA} {TWO} --zero_stage 1 --no-packing"),
    "2 ranks, zero 2, epochs": (2, f"{LORA} {TWO} --zero_stage 2 --data_path rows.jsonl"),
    "2 ranks, zero 3": (2, f"{LORA} {TWO} --zero_stage 3 --gradient_accumulation_steps 2"),
    "2 ranks, full, zero 3": (2, f"{FULL} {TWO} --zero_stage 3"),
}
COMMON = f"""
    --max_steps {STEPS} --eval_interval 5 --sample_generations 1 --save_interval 3
    --save_total_limit 2 --resume_from_checkpoint auto
""".split()
TERM, KILL = signal.SIGTERM, signal.SIGKILL
# two ranks are in every run of test_kill.py, at a third of the time
SHORT = [("epochs", KILL)]


@pytest.fixture(scope="module")
def start(launcher, tmp_path_factory):
    """``start(name)``: (its directory, the run of this name on its way there)."""

    def call(name, home=None):
        ranks, options = RUNS[name]
        if home is None:
            home = tmp_path_factory.mktemp("run")
            lines = Path(BUNDLED_DATA["train"]).read_text(encoding="utf-8").splitlines()[:30]
            (home / "rows.jsonl").write_text("\n".join(lines), encoding="utf-8")
        argv = [*TINY, *COMMON, *options.split()]
        return home, launcher.start(argv, home, ranks=ranks)

    return call


@pytest.fixture(scope="module")
def undisturbed(start):
    """``undisturbed(name)``: where the run of this name wrote, without a pause."""
    return undisturbed_runs(start)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "number"),
    product(RUNS, (TERM, KILL)) if LONG else SHORT,
    ids=lambda value: value if isinstance(value, str) else value.name,
)
def test_interrupted_and_resumed_equals_uninterrupted(name, number, start, undisturbed):
    rng = random.Random(f"{name} {number}")
    step, pause = rng.randint(1, STEPS - 4), rng.uniform(0, 0.05)
    home, running = start(name)
    wait_until(lambda: trained_steps(home / "out") >= step, running)
    time.sleep(pause)
    running.signal(number)
    codes = running.wait()
    assert set(codes) == {143 if number == TERM else -KILL}, running.output()
    interrupted = trained_steps(home / "out")
    assert step <= interrupted < STEPS
    assert not broken_checkpoints(home / "out")
    newest = max(valid_checkpoints(home / "out"), default=0)
    assert newest == interrupted if number == TERM else newest <= interrupted

    _, running = start(name, home)
    assert not any(running.wait()), running.output()
    begun = (
        f"resuming from out/checkpoints/step-{newest:08d}" if newest else "starting from scratch"
    )
    assert begun in running.out()
    check_same_end(home / "out", undisturbed(name))


@pytest.mark.thorough
def test_epochs_are_crossed(undisturbed):
    lines = (undisturbed("epochs") / "metrics.jsonl").read_text(encoding="utf-8")
    assert '"epoch": 3.' in lines
