"""Steps whose rows have ever other lengths: whether the memory that is reserved keeps growing."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import repeat
from typing import Any

import numpy as np
import torch

from benchmarks.common.bundled import make_engine
from benchmarks.common.report import PartReport, print_table
from benchmarks.common.shapes import SHAPES, TINY, Shape, full_rows, micro_batches, random_model
from dschat_lora.data.batch import Batch
from dschat_lora.engine.build import DTYPES, resolve_dtype
from dschat_lora.engine.distributed import device
from dschat_lora.supervised.loop import train_steps
from dschat_lora.supervised.objectives import SUPERVISED

NAME = "opt-1.3b"
STEPS, TINY_STEPS = 50, 4
SMALL_CARD = 24e9  # bytes; a larger GPU is told to use no more
ROWS = 16
GROWTH = 1.05  # of what is reserved, from the first half of the steps to the second


def run(report: PartReport, *, tiny: bool) -> None:
    """Train on rows of random lengths; store, print and check."""
    on_gpu = device().type == "cuda"
    if on_gpu:
        total = torch.cuda.get_device_properties(device()).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, SMALL_CARD / total))
    shape = replace((TINY if tiny else SHAPES)[NAME], rows=ROWS)
    reserved, allocated, losses = [], [], []
    for loss in _losses(shape, TINY_STEPS if tiny else STEPS):
        losses.append(loss)
        reserved.append(torch.cuda.memory_reserved() if on_gpu else 0)
        allocated.append(torch.cuda.max_memory_allocated() if on_gpu else 0)
    half = len(reserved) // 2
    result: dict[str, Any] = {
        "steps": len(losses),
        "reserved_gib_first_half": max(reserved[:half]) / 2**30,
        "reserved_gib": max(reserved) / 2**30,
        "peak_allocated_gib": max(allocated) / 2**30,
        "last_loss": losses[-1],
    }
    report.store({"shape": NAME, "rows": ROWS, "reserved": reserved, **result})
    print_table(list(result), [list(result.values())])
    report.check("all losses are finite", bool(np.isfinite(losses).all()))
    report.check("what is reserved stays", max(reserved) <= GROWTH * max(reserved[:half]))


def _losses(shape: Shape, steps: int) -> Iterator[float]:
    dtype = resolve_dtype("auto")
    model = random_model(shape, dtype=DTYPES[dtype], device=device()).train()
    engine = make_engine(model, dtype=dtype, zero_stage=0, rows=ROWS, accumulation_steps=1)
    lengths = np.random.default_rng(0).integers(shape.max_sample // 8, shape.max_sample, size=steps)
    windows = (_window(shape, int(length)) for length in lengths)
    for step in train_steps(engine, windows, SUPERVISED, repeat(1.0)):
        yield step.loss


def _window(shape: Shape, length: int) -> list[Batch]:
    """One micro-batch of rows of this length."""
    rows = full_rows(replace(shape, row_length=length, max_sample=length))
    return micro_batches(rows, ROWS * length)
