"""What a checkpoint costs: training waits while tensors are taken, and shares the machine after."""

import tempfile
import time
from itertools import repeat
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.common.bundled import make_engine
from benchmarks.common.report import PartReport, print_table
from benchmarks.common.shapes import SHAPES, TINY, Shape, micro_batches, mixed_rows, random_model
from dschat_lora.checkpoint.history import checkpoints_of
from dschat_lora.checkpoint.manifest import verify
from dschat_lora.config.groups import RunConfig
from dschat_lora.data.batch import Batch
from dschat_lora.engine.build import DTYPES, TrainEngine, resolve_dtype
from dschat_lora.engine.distributed import device
from dschat_lora.engine.state import EngineState
from dschat_lora.perf.throughput import synchronize
from dschat_lora.runtime.checkpointer import Saver
from dschat_lora.supervised.loop import train_steps
from dschat_lora.supervised.objectives import SUPERVISED

STAGES = (0, 2)
ROUNDS = 5
STEPS = 6  # of a timed block
LIMIT = 0.02  # of the run time


def run(report: PartReport, *, tiny: bool) -> None:
    """Time blocks of steps with and without a checkpoint at their start, in turns."""
    name = "opt-1.3b"
    shape = (TINY if tiny else SHAPES)[name]
    dtype = "bf16" if tiny else resolve_dtype("auto")
    rows = [_measure(shape, dtype, stage) for stage in STAGES]
    report.store({"shape": name, "dtype": dtype, "blocks_of_steps": STEPS, "stages": rows})
    header = list(rows[0])
    print_table(header, [[row[key] for key in header] for row in rows])
    for row in rows:
        report.check(
            f"ZeRO {row['zero_stage']}: a checkpoint at the default interval costs at most 2 %",
            row["share_at_default"] <= LIMIT,
        )


def _measure(shape: Shape, dtype: str, zero_stage: int) -> dict[str, Any]:
    model = random_model(shape, dtype=DTYPES[dtype], device=device())
    (batch,) = micro_batches(mixed_rows(shape), shape.rows * shape.row_length)
    engine = make_engine(
        model, dtype=dtype, zero_stage=zero_stage, rows=shape.rows, accumulation_steps=1
    )
    state = EngineState(engine, model)
    _steps(engine, batch)
    with tempfile.TemporaryDirectory() as temporary:
        saver = Saver(Path(temporary), keep=1, before_commit=lambda: None)
        plain, saving, blocked, written = [], [], [], []
        for number in range(1, ROUNDS + 1):
            plain.append(_steps(engine, batch))
            start = time.perf_counter()
            saver.save(number, {"model": state.tensors()}, {"engines": state.facts()})
            blocked.append(time.perf_counter() - start)
            saving.append(blocked[-1] + _steps(engine, batch))
            saver.wait()
            written.append(time.perf_counter() - start)
        (newest,) = checkpoints_of(Path(temporary))
        files = verify(newest, kind="checkpoint")["files"]
    step = median(plain) / STEPS
    cost = max(median(saving) - median(plain), median(blocked))
    defaults = RunConfig()
    between = min(defaults.save_interval * step, defaults.save_minutes * 60)
    return {
        "zero_stage": zero_stage,
        "mib": sum(entry["bytes"] for entry in files.values()) / 2**20,
        "step_seconds": step,
        "blocked_seconds": median(blocked),
        "cost_seconds": cost,
        "written_after_seconds": median(written),
        "seconds_between_saves": between,
        "share_at_default": cost / between,
    }


def _steps(engine: TrainEngine, batch: Batch) -> float:
    """Seconds of a block of optimizer steps."""
    synchronize(device())
    start = time.perf_counter()
    for _ in train_steps(engine, [[batch]] * STEPS, SUPERVISED, repeat(1.0)):
        pass
    synchronize(device())
    return time.perf_counter() - start
