"""Tokens per second, FLOPs and memory of training a model of a published size."""

import gc
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

import torch

from benchmarks.parts.bundled import make_engine
from benchmarks.parts.report import PartReport, print_table
from benchmarks.parts.shapes import (
    SHAPES,
    TINY,
    Shape,
    equal_lengths,
    packed,
    padded,
    random_model,
)
from dschat_lora.data.batch import Batch
from dschat_lora.engine.build import DTYPES, TrainEngine, resolve_dtype
from dschat_lora.engine.distributed import device
from dschat_lora.objective import SUPERVISED
from dschat_lora.perf.memory import estimate_memory
from dschat_lora.perf.peak import device_peak, measured_peak
from dschat_lora.perf.shape import describe
from dschat_lora.perf.throughput import Meter, Metrics
from dschat_lora.trainer import TrainStep, evaluate, train_steps

ROUNDS = 5
MAX_WARM_UP = 20  # fp16 may skip its first steps
SOFT_SECONDS = 45.0  # a slow device does fewer rounds
USABLE = 0.92  # share of a GPU's memory that a case may be estimated to need
LOSS_LIMIT = 0.01  # nats, of a 16-bit loss near 11
STAGES = (0, 2)  # in this order: DeepSpeed keeps a ZeRO 2 engine's memory after its last use
TABLE = {
    "case": "case",
    "zero_stage": "ZeRO",
    "tokens_per_second": "tokens/s",
    "step_seconds": "s/step",
    "tflops_per_device": "TFLOP/s",
    "hardware_tflops_per_device": "hardware",
    "tflops_deepspeed_chat": "DS-Chat",
    "mfu": "MFU table",
    "mfu_measured": "MFU measured",
    "peak_gib": "peak GiB",
    "estimated_gib": "estimated",
}


@dataclass
class Case:
    """One way to run one optimizer step, and what its timed steps measured."""

    name: str
    batches: list[Batch]
    gradient_checkpointing: bool = False
    problem: str | None = None  # why it is not measured
    peak_bytes: int = 0
    estimated_bytes: int = 0
    steps: list[Metrics] = field(default_factory=list)


def run(report: PartReport, *, tiny: bool, name: str) -> None:
    """Measure the shape ``name`` at each ZeRO stage; store, print and check."""
    shape = (TINY if tiny else SHAPES)[name]
    dtype = "bf16" if tiny else resolve_dtype("auto")
    size, rounds = (256, 3) if tiny else (8192, 20)
    peak = measured_peak(device(), DTYPES[dtype], size=size, rounds=rounds)
    table = device_peak(device(), DTYPES[dtype])
    report.store(
        {
            "shape": asdict(shape),
            "dtype": dtype,
            "matmul_tflops": {"measured": peak, "table": table},
        }
    )
    rows: list[dict[str, Any]] = []
    for stage in STAGES:
        for case in _measure(report, shape, dtype, stage):
            rows.append(_row(case, stage, peak))
            report.store({"cases": rows})
        gc.collect()
        if device().type == "cuda":
            torch.cuda.empty_cache()
    print_table(list(TABLE.values()), [[row.get(key) for key in TABLE] for row in rows])
    for row in rows:
        if row["problem"]:
            print(f"{row['case']}: {row['problem']}")
    _stage_ratio(report, rows)
    report.check("at least one case was measured", any(row["rounds"] for row in rows))


def _cases(shape: Shape, zero_stage: int) -> list[Case]:
    samples, batch = packed(shape)
    if zero_stage:
        return [Case("packed", [batch])]
    return [
        Case("packed", [batch]),
        Case("packed, recomputing", [batch], gradient_checkpointing=True),
        Case("equal lengths", [equal_lengths(shape)]),
        Case("padded", padded(samples, shape)),
    ]


def _measure(report: PartReport, shape: Shape, dtype: str, zero_stage: int) -> list[Case]:
    """The cases of one stage over one engine, warmed up, then timed in turns."""
    model = random_model(shape, dtype=DTYPES[dtype], device=device())
    cases = _cases(shape, zero_stage)
    for case in cases:
        _estimate(case, model, zero_stage)
    if all(case.problem for case in cases):
        return cases
    engine = make_engine(
        model,
        dtype=dtype,
        zero_stage=zero_stage,
        rows=shape.rows,
        accumulation_steps=max(len(case.batches) for case in cases),
    )
    if zero_stage == 0:
        _check_equal_loss(report, engine, cases)
    meters = {case.name: _meter(case, model, dtype) for case in cases}
    for case in cases:
        _warm_up(engine, case)
    deadline = time.monotonic() + SOFT_SECONDS
    for number in range(ROUNDS):
        if number and time.monotonic() > deadline:
            break
        for case in cases:
            _timed_step(engine, case, meters[case.name])
    if zero_stage == 0:
        _print_ratios(report, cases)
    return cases


def _estimate(case: Case, model: Any, zero_stage: int) -> None:
    """Note the memory a case is estimated to need, and leave it out where that is too much."""
    largest = max(case.batches, key=lambda batch: batch.input_ids.numel())
    rows, length = largest.input_ids.shape
    case.estimated_bytes = estimate_memory(
        model,
        rows=rows,
        length=length,
        compute_dtype=model.dtype,
        gradient_checkpointing=case.gradient_checkpointing,
        zero_stage=zero_stage,
        world_size=1,
    ).total
    if device().type != "cuda":
        return
    free = USABLE * torch.cuda.get_device_properties(device()).total_memory
    if case.estimated_bytes > free:
        need, have = case.estimated_bytes / 2**30, free / 2**30
        case.problem = f"not run: {need:.0f} GiB estimated, {have:.0f} GiB usable"


def _meter(case: Case, model: Any, dtype: str) -> Meter:
    return Meter(
        describe(model),
        gradient_checkpointing=case.gradient_checkpointing,
        world_size=1,
        device=device(),
        peak_tflops=device_peak(device(), DTYPES[dtype]),
    )


def _check_equal_loss(report: PartReport, engine: TrainEngine, cases: Sequence[Case]) -> None:
    """Packing changes no sample's loss; without that, timing it would mean nothing."""
    by_name = {case.name: case for case in cases if not case.problem}
    if not {"packed", "padded"} <= by_name.keys():
        return
    losses = {
        name: evaluate(engine, by_name[name].batches, SUPERVISED).loss
        for name in ("packed", "padded")
    }
    report.store({"loss": losses})
    distance = abs(losses["packed"] - losses["padded"])
    report.check(f"packed and padded rows agree in loss to {LOSS_LIMIT}", distance <= LOSS_LIMIT)


def _warm_up(engine: TrainEngine, case: Case) -> None:
    for number in range(MAX_WARM_UP):
        step = _step(engine, case)
        if step is None or (number and not step.outcome.skipped):
            return


def _timed_step(engine: TrainEngine, case: Case, meter: Meter) -> None:
    meter.start()
    step = _step(engine, case)
    if step is not None:
        metrics = meter.step(step.counts)
        case.steps.append(metrics)
        case.peak_bytes = max(case.peak_bytes, int(metrics["peak_memory_bytes"] or 0))


def _step(engine: TrainEngine, case: Case) -> TrainStep | None:
    """One optimizer step as the training loop takes it; None where memory does not suffice."""
    if case.problem:
        return None
    model: Any = engine.module
    if case.gradient_checkpointing:
        options = {"use_reentrant": False}
        model.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
    else:
        model.model.gradient_checkpointing_disable()
    if device().type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    try:
        return next(train_steps(engine, [case.batches], SUPERVISED, [1.0]))
    except torch.OutOfMemoryError:
        case.problem = "not run: out of memory"
        model.zero_grad(set_to_none=True)
        torch.cuda.empty_cache()
        return None


def _row(case: Case, zero_stage: int, measured: float) -> dict[str, Any]:
    """The step of median duration, and the spread around it."""
    gib, wide = 2**30, max(case.batches, key=lambda batch: batch.input_ids.shape[1])
    row: dict[str, Any] = {
        "case": case.name,
        "zero_stage": zero_stage,
        "gradient_checkpointing": case.gradient_checkpointing,
        "micro_batches": len(case.batches),
        "rows": len(case.batches[0].input_ids),
        "longest_row": wide.input_ids.shape[1],
        "samples": sum(batch.num_samples for batch in case.batches),
        "tokens": sum(batch.num_tokens for batch in case.batches),
        "positions": sum(batch.input_ids.numel() for batch in case.batches),
        "rounds": len(case.steps),
        "estimated_gib": case.estimated_bytes / gib,
        "problem": case.problem,
    }
    if not case.steps:
        return row
    ordered = sorted(case.steps, key=lambda step: step["step_seconds"] or 0.0)
    middle = ordered[len(ordered) // 2]
    return (
        row
        | middle
        | {
            "step_seconds_all": [step["step_seconds"] for step in case.steps],
            "mfu_measured": (middle["tflops_per_device"] or 0.0) / measured,
            "peak_memory_bytes": case.peak_bytes,
            "peak_gib": case.peak_bytes / gib,
        }
    )


def _print_ratios(report: PartReport, cases: Sequence[Case]) -> None:
    """Speed in real tokens against the first case, round by round: median, least, most."""
    first, *others = cases
    ratios = {}
    for case in others:
        pairs = zip(case.steps, first.steps, strict=False)
        values = [_rate(one) / _rate(base) for one, base in pairs]
        if values:
            ratios[case.name] = {"median": median(values), "min": min(values), "max": max(values)}
    report.store({f"tokens_per_second_over_{first.name}": ratios})
    rows = [[f"{name} / {first.name}", *ratio.values()] for name, ratio in ratios.items()]
    print_table(["ratio of tokens/s", "median", "min", "max"], rows)


def _stage_ratio(report: PartReport, rows: Sequence[dict[str, Any]]) -> None:
    speed = {row["zero_stage"]: _rate(row) for row in rows if row["case"] == "packed"}
    if all(speed.values()):
        ratio = speed[2] / speed[0]
        report.store({"tokens_per_second_zero_2_over_zero_0": ratio})
        print(f"ZeRO 2 / ZeRO 0: {ratio:.3f} of the tokens/s")


def _rate(metrics: Any) -> float:
    return float(metrics.get("tokens_per_second") or 0.0)
