"""Losses of the first steps in each compute type and ZeRO stage, against fp32."""

from dataclasses import asdict, dataclass
from itertools import repeat
from typing import Any

from benchmarks.common.bundled import Bundled, bundled_engine
from benchmarks.common.report import PartReport, print_table
from dschat_lora.supervised.loop import train_steps
from dschat_lora.supervised.objectives import SUPERVISED

STEPS = 30
DTYPES = ("fp32", "bf16", "fp16")
STAGES = (0, 2)
# Nats a 16-bit loss may be off: a few roundings of 2^-9 (bf16) or 2^-12 (fp16) of a loss near 1,
# grown over the steps. A wrong scale or a lost update is off by tenths.
LIMITS = {"fp32": 1e-3, "bf16": 0.05, "fp16": 0.01}


@dataclass(frozen=True)
class Trajectory:
    """One run; skipped steps, which fp16 may begin with, have no place in the losses."""

    dtype: str
    zero_stage: int
    losses: list[float]
    skipped: int


def run(report: PartReport, *, tiny: bool) -> None:
    """Train the bundled model anew in every type and stage, compare, store and print."""
    bundled = Bundled(tiny=tiny)
    runs: list[Trajectory] = []
    rows = []
    for stage in STAGES:
        for dtype in DTYPES:
            runs.append(_train(bundled, dtype, stage))
            rows.append(_row(runs[-1], runs[0], _of(runs, dtype, STAGES[0])))
            report.store({"runs": [asdict(each) for each in runs], "comparison": rows})
    print_table(list(rows[0]), [list(row.values()) for row in rows])
    report.check("fp32 learns", runs[0].losses[-1] < runs[0].losses[0])
    for row in rows:
        name, limit = f"{row['type']} at ZeRO {row['ZeRO']}", LIMITS[str(row["type"])]
        to_fp32, to_stage_0 = row["max |d fp32|"], row["max |d ZeRO 0|"]
        report.check(f"{name} is within {limit} of fp32", to_fp32 <= limit)
        report.check(f"{name} is within {limit} of ZeRO 0", to_stage_0 <= limit)


def _train(bundled: Bundled, dtype: str, zero_stage: int) -> Trajectory:
    _, engine = bundled_engine(bundled, dtype=dtype, zero_stage=zero_stage)
    steps = list(train_steps(engine, bundled.windows(STEPS), SUPERVISED, repeat(1.0)))
    skipped = sum(step.outcome.skipped for step in steps)
    return Trajectory(dtype, zero_stage, [step.loss for step in steps], skipped)


def _of(runs: list[Trajectory], dtype: str, zero_stage: int) -> Trajectory:
    return next(each for each in runs if (each.dtype, each.zero_stage) == (dtype, zero_stage))


def _row(one: Trajectory, reference: Trajectory, same_type: Trajectory) -> dict[str, Any]:
    return {
        "type": one.dtype,
        "ZeRO": one.zero_stage,
        "first loss": one.losses[0],
        "last loss": one.losses[-1],
        "max |d fp32|": _distance(one, reference),
        "max |d ZeRO 0|": _distance(one, same_type),
        "skipped": one.skipped,
    }


def _distance(one: Trajectory, other: Trajectory) -> float:
    return max(abs(a - b) for a, b in zip(one.losses, other.losses, strict=True))
