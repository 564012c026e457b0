"""Tokens per second, FLOPs and memory of training a model of a published size."""

import gc
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

import torch

from benchmarks.common.report import PartReport, device_name, print_table
from benchmarks.common.shapes import (
    SHAPES,
    TINY,
    Shape,
    full_rows,
    micro_batches,
    mixed_rows,
    random_base,
)
from benchmarks.common.turns import forget_peak, peak_bytes
from benchmarks.contenders.common import CHAT, OURS
from benchmarks.contenders.throughput import Way, build_ways, held_bytes
from dschat_lora.data.batch import Batch
from dschat_lora.data.samples import SequenceSample
from dschat_lora.engine.build import DTYPES, resolve_dtype
from dschat_lora.engine.distributed import device
from dschat_lora.models.backbone import Backbone
from dschat_lora.perf.memory import estimate_memory
from dschat_lora.perf.shape import describe
from dschat_lora.perf.throughput import (
    Flops,
    Meter,
    Metrics,
    ModelShape,
    device_peak,
    measured_peak,
    synchronize,
)
from dschat_lora.supervised.loop import count

Rows = Sequence[Sequence[SequenceSample]]
RANKS = (16, 128)
TINY_RANKS = (2, 8)
ROUNDS, TINY_ROUNDS = 5, 1
WARM_UPS, MAX_WARM_UPS = 2, 20  # fp16 may skip its first steps
WARM_UP_SECONDS = 3.0  # a step as long needs no second one
CASE_SECONDS = 4.0  # of its timed steps: a slow device does fewer rounds
LOSS_LIMIT = 0.02  # nats, of a 16-bit loss near 11
# Real tokens/s of ours at the rank given, on the mixed lengths.
TARGET_DEVICE = "H200"
TARGETS = {("opt-1.3b", 128): 65_000, ("opt-6.7b", 128): 17_000}
TABLE = {
    "case": "case",
    "lora_dim": "r",
    "workload": "rows",
    "tokens_per_second": "tokens/s",
    "x_ours_median": "x ours",
    "step_seconds": "s/step",
    "update_milliseconds": "update ms",
    "tflops_per_device": "TFLOP/s",
    "hardware_tflops_per_device": "hardware",
    "mfu": "MFU table",
    "mfu_measured": "MFU measured",
    "peak_gib": "peak GiB",
    "estimated_gib": "estimated",
    "micro_batches": "micro-batches",
}


@dataclass
class Case:
    """A way on rows of samples, and what its timed steps measured."""

    name: str
    way: Way
    rows: Rows
    multiple_of: int
    tokens: int  # positions of a micro-batch, at most
    problem: str | None = None  # why it is not measured
    peak_bytes: int = 0
    steps: list[Metrics] = field(default_factory=list)
    updates: list[float] = field(default_factory=list)  # ms

    @property
    def recomputing(self) -> bool:
        """Whether blocks are computed again in the backward pass."""
        return bool(self.way.model.is_gradient_checkpointing)

    @property
    def batches(self) -> list[Batch]:
        """The micro-batches of its step."""
        return micro_batches(self.rows, self.tokens, multiple_of=self.multiple_of)


def run(report: PartReport, *, tiny: bool, name: str) -> None:
    """Measure the shape ``name`` at each rank and on each kind of rows; store, print and check."""
    shape = (TINY if tiny else SHAPES)[name]
    dtype = "bf16" if tiny else resolve_dtype("auto")
    measured, table = peaks(DTYPES[dtype], tiny=tiny)
    report.store({"shape": asdict(shape), "dtype": dtype})
    report.store({"matmul_tflops": {"measured": measured, "table": table}})
    base = random_base(shape, dtype=DTYPES[dtype], device=device())
    entries: list[dict[str, Any]] = []
    ranks = TINY_RANKS if tiny else RANKS
    for rank in ranks:
        ways = build_ways(base, lora_dim=rank, dtype=dtype, variants=rank == ranks[-1])
        facts = describe(ways[OURS].model)
        check_losses(report, ways, shape, rank)
        for workload, cases in _workloads(shape, ways).items():
            seconds = CASE_SECONDS * len(cases)
            measure(cases, facts, table, rounds=TINY_ROUNDS if tiny else ROUNDS, seconds=seconds)
            ours = cases[0]
            for case in cases:
                head = {"case": case.name, "lora_dim": rank, "workload": workload}
                entries.append(head | entry_of(case, ours, measured, DTYPES[dtype]))
            report.store({"cases": entries})
        del ways, cases, ours, case
        _free()
    print_table(list(TABLE.values()), [[entry.get(key) for key in TABLE] for entry in entries])
    for entry in entries:
        if entry["problem"]:
            print(f"{entry['case']}, {entry['workload']}: {entry['problem']}")
    own = [entry for entry in entries if entry["case"] == OURS]
    report.check("ours ran at every rank on all rows", all(entry["rounds"] for entry in own))
    if not tiny:
        _check_target(report, name, own)


def peaks(dtype: torch.dtype, *, tiny: bool) -> tuple[float, float | None]:
    """TFLOP/s of products of matrices: measured, and the vendor's, None where it is unknown."""
    size, rounds = (256, 3) if tiny else (8192, 20)
    measured = measured_peak(device(), dtype, size=size, rounds=rounds)
    return measured, device_peak(device(), dtype)


def _workloads(shape: Shape, ways: Mapping[str, Way]) -> dict[str, list[Case]]:
    """The cases of each kind of rows: variants of ours on mixed ones, of theirs on full ones."""
    mixed, full = mixed_rows(shape), full_rows(shape)
    alone = [[sample] for row in mixed for sample in row]
    tokens = shape.rows * shape.row_length

    def case(name: str, rows: Rows) -> Case:
        padded = ways[name].all_logits
        return Case(name, ways[name], rows, shape.max_sample if padded else 1, tokens)

    return {
        "full": [case(name, full) for name in ways if not name.startswith(f"{OURS},")],
        "mix": [
            case(name, alone if way.all_logits else mixed)
            for name, way in ways.items()
            if not name.startswith(f"{CHAT},")
        ],
    }


def _estimate(case: Case, dtype: torch.dtype) -> int:
    rows, length = max((batch.input_ids.shape for batch in case.batches), key=lambda s: s.numel())
    return estimate_memory(
        case.way.model,
        rows=rows,
        length=length,
        compute_dtype=dtype,
        gradient_checkpointing=case.recomputing,
        zero_stage=0,
        world_size=1,
        mask_bytes=Backbone(case.way.model).mask_bytes(
            device(), length=length, recomputes=case.recomputing
        ),
    ).total


def _halve(case: Case) -> bool:
    """Take smaller micro-batches; False where they are single rows already."""
    if max(len(batch.input_ids) for batch in case.batches) == 1:
        return False
    case.tokens //= 2
    return True


def _held_by_others(case: Case, cases: Sequence[Case]) -> int:
    held = {id(each.way.adam): held_bytes(each.way.adam) for each in cases}
    return sum(held.values()) - held[id(case.way.adam)]


def check_losses(report: PartReport, ways: Mapping[str, Way], shape: Shape, rank: int) -> None:
    """All find the same loss; without that, timing them would mean nothing."""
    samples = [sample for row in mixed_rows(shape) for sample in row][:4]
    (packed,) = micro_batches([samples], shape.row_length)
    (padded,) = micro_batches(
        [[sample] for sample in samples],
        len(samples) * shape.max_sample,
        multiple_of=shape.max_sample,
    )
    losses = {
        name: way.loss(padded if way.all_logits else packed)
        for name, way in ways.items()
        if not way.model.is_gradient_checkpointing
    }
    report.store({f"loss_at_{rank}": losses})
    apart = max(losses.values()) - min(losses.values())
    report.check(f"r = {rank}: all find the same loss within {LOSS_LIMIT}", apart <= LOSS_LIMIT)


def measure(
    cases: Sequence[Case], facts: ModelShape, peak: float | None, *, rounds: int, seconds: float
) -> None:
    """Warm up, then time a step of each in turns; at least a round, fewer on a slow device."""
    for case in cases:
        _warm_up(case)
    deadline = time.monotonic() + seconds
    for number in range(rounds):
        if number and time.monotonic() > deadline:
            break
        for case in cases:
            meter = Meter(
                facts,
                gradient_checkpointing=case.recomputing,
                world_size=1,
                device=device(),
                peak_tflops=peak,
                skips_padding=case.way.skips_padding,
            )
            _timed_step(case, meter, facts, held=_held_by_others(case, cases))


def _warm_up(case: Case) -> None:
    """Steps that are not counted; a step of seconds needs but one."""
    begun, done = time.monotonic(), 0
    for _ in range(MAX_WARM_UPS):
        done += _step(case)
        late = time.monotonic() > begun + WARM_UP_SECONDS
        if case.problem or done == WARM_UPS or (done and late):
            return


def _timed_step(case: Case, meter: Meter, facts: ModelShape, *, held: int) -> None:
    batches = case.batches
    counts, extra = count(batches), Flops()
    if case.way.all_logits and facts.head is not None:
        per_logit = facts.head.forward + facts.head.backward
        extra = Flops(hardware=per_logit * (counts.num_positions - counts.num_targets))
    forget_peak()
    meter.start()
    if _step(case, batches):
        synchronize(device())
        case.steps.append(meter.step(counts, extra=extra))
        case.updates.append(case.way.update.milliseconds)
        case.peak_bytes = max(case.peak_bytes, peak_bytes() - (held if _on_gpu() else 0))


def _step(case: Case, batches: Sequence[Batch] | None = None) -> bool:
    """One optimizer step; False where it was skipped, or memory does not suffice.

    Micro-batches are halved then, where there is something to halve.
    """
    if case.problem:
        return False
    try:
        return not case.way.step(batches or case.batches)
    except torch.OutOfMemoryError:
        pass  # what the exception holds has to go first
    case.way.model.zero_grad(set_to_none=True)
    _free()
    if not _halve(case):
        case.problem = "not run: out of memory"
    return False


def _free() -> None:
    gc.collect()
    if _on_gpu():
        torch.cuda.empty_cache()


def _on_gpu() -> bool:
    return device().type == "cuda"


def entry_of(case: Case, ours: Case, measured: float, dtype: torch.dtype) -> dict[str, Any]:
    """The step of median duration, and the spread around it."""
    batches, gib = case.batches, 2**30
    counts = count(batches)
    entry: dict[str, Any] = {
        "micro_batches": len(batches),
        "samples": counts.num_samples,
        "tokens": counts.num_tokens,
        "positions": counts.num_positions,
        "gradient_checkpointing": case.recomputing,
        "rounds": len(case.steps),
        "estimated_gib": _estimate(case, dtype) / gib if case.name.startswith(OURS) else None,
        "problem": case.problem,
    }
    if not case.steps:
        return entry
    ordered = sorted(case.steps, key=lambda step: step["step_seconds"] or 0.0)
    middle = ordered[len(ordered) // 2]
    rounds = zip(case.steps, ours.steps, strict=False)
    ratios = [_rate(own) / _rate(its) for its, own in rounds] or [float("nan")]
    return {
        **entry,
        **middle,
        "step_seconds_all": [step["step_seconds"] for step in case.steps],
        "update_milliseconds": median(case.updates),
        "x_ours_median": median(ratios),
        "x_ours_min": min(ratios),
        "x_ours_max": max(ratios),
        "mfu_measured": (middle["tflops_per_device"] or 0.0) / measured,
        "peak_memory_bytes": case.peak_bytes,
        "peak_gib": case.peak_bytes / gib,
    }


def _rate(metrics: Metrics) -> float:
    return float(metrics["tokens_per_second"] or 0.0)


def _check_target(report: PartReport, name: str, own: Sequence[Mapping[str, Any]]) -> None:
    """Hold ours against what is aimed at on one device."""
    for entry in (entry for entry in own if entry["workload"] == "mix"):
        target = TARGETS.get((name, entry["lora_dim"]))
        reached = _rate(entry) if entry["rounds"] else 0.0
        if target is not None and TARGET_DEVICE in device_name():
            claim = f"r = {entry['lora_dim']}: at least {target:,} real tokens/s"
            report.check(claim, reached >= target)
