"""Training on pairs against other ways to do so: pairs per second, tokens and peak memory.

``BENCH_PAIRS=FILE`` measures on the pairs of a file and, on a CPU, with a model large enough to
mean something, in minutes; without it the pairs are random tokens of the same lengths.
"""

import os
import signal
import sys
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.common.pair_data import Pairs, random_pairs, read_pairs
from benchmarks.common.report import PartReport, print_table
from benchmarks.common.turns import (
    Runner,
    all_run,
    has_trl,
    start_all,
    stop,
    take_turns,
    times_ours,
)
from benchmarks.contenders.common import CHAT, OURS, Kind, ModelSize, Task
from benchmarks.contenders.pairs import CONTENDERS, serve
from dschat_lora.engine.build import resolve_dtype

KINDS: tuple[Kind, ...] = ("reward", "dpo")
LOSS_LIMIT = 1e-5  # nats, in fp32
# Of pairs/s, on a file's pairs.
TARGETS = {("reward", CHAT): 4.0, ("reward", "TRL"): 2.0, ("dpo", "TRL, precomputed"): 2.0}


# No round begins later than its seconds after a kind's first one.
TINY = ModelSize(64, 2, 4, 512, 8, 128, 3, 8.0)
CPU = ModelSize(256, 4, 8, 8192, 16, 512, 11, 900.0)
GPU = ModelSize(2048, 24, 32, 50272, 128, 512, 8, 8.0)
NUM_PAIRS = {TINY: 64, CPU: 192, GPU: 128}
OPTIONAL = ("trl", "peft", "datasets")


def run(report: PartReport, *, tiny: bool) -> None:
    """Measure both kinds; store, print and check."""
    # gpu.sh ends a part that takes too long with this signal; its processes then end too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    file = os.environ.get("BENCH_PAIRS")
    on_gpu = torch.cuda.is_available()
    size = (GPU if on_gpu and not tiny else CPU) if file or not tiny else TINY
    pairs = _pairs(file, size)
    threads = int(os.environ.get("OMP_NUM_THREADS", "1"))
    dtype = resolve_dtype("auto") if on_gpu and size is GPU else "fp32"
    report.store(
        {
            "size": asdict(size) | {"num_pairs": NUM_PAIRS[size]},
            "dtype": dtype,
            "threads": threads,
            "pairs": pairs.source,
            "micro_batch": Task.micro_batch,
            "accumulation": Task.accumulation,
            "trl": has_trl(),
        }
    )
    for kind in KINDS:
        task = Task(
            kind=kind,
            size=size,
            samples=pairs.samples,
            tokenizer=pairs.tokenizer,
            dtype=dtype,
            threads=threads,
        )
        runners = _measure(task, size)
        rows = [_row(runner, runners[0], len(task.samples)) for runner in runners]
        report.store({kind: rows})
        _print(kind, rows)
        _check(report, kind, runners, rows, exact=dtype == "fp32", real=bool(file))


def _pairs(file: str | None, size: ModelSize) -> Pairs:
    options = {
        "vocab_size": size.vocab_size,
        "max_seq_len": size.max_seq_len,
        "limit": NUM_PAIRS[size],
    }
    return read_pairs(Path(file), **options) if file else random_pairs(**options)


def _measure(task: Task, size: ModelSize) -> list[Runner]:
    """Every contender's steps, in turns; no process is left behind."""
    runners = start_all(CONTENDERS[task.kind], serve, task, optional=OPTIONAL)
    try:
        take_turns(runners, rounds=size.rounds, seconds=size.seconds)
    finally:
        stop(runners)
    return runners


def _row(runner: Runner, ours: Runner, num_pairs: int) -> dict[str, Any]:
    """A contender's numbers, and in how many of its times ours does a pair, round by round."""
    row: dict[str, Any] = {
        "contender": runner.name,
        "problem": runner.problem,
        "pairs_per_second": None,
        "positions_per_pair": None,
        "times_ours": None,
        "cpu_times_ours": None,
        "peak_mib": runner.peak_bytes and runner.peak_bytes / 2**20,
        "reference_seconds_per_pair": None,
        "rounds": len(runner.works),
    }
    if not runner.works:
        return row
    pairs = sum(work.amount for work in runner.works)
    row |= {
        "pairs_per_second": median(work.amount / work.seconds for work in runner.works),
        "positions_per_pair": sum(work.positions for work in runner.works) / pairs,
        "times_ours": times_ours(runner, ours, "seconds"),
        "cpu_times_ours": times_ours(runner, ours, "cpu_seconds"),
        "works": [asdict(work) for work in runner.works],
    }
    if runner.ready is not None and runner.ready.reference_seconds is not None:
        row["reference_seconds_per_pair"] = runner.ready.reference_seconds / num_pairs
    return row


def _print(kind: Kind, rows: list[dict[str, Any]]) -> None:
    header = [kind, "pairs/s", "positions/pair", "x ours", "quartiles", "x CPU time", "peak MiB"]
    table = []
    for row in rows:
        times, cpu = row["times_ours"], row["cpu_times_ours"]
        table.append(
            [
                row["contender"],
                row["pairs_per_second"],
                row["positions_per_pair"],
                times and times["median"],
                times and f"{times['quartile_1']:.2f} - {times['quartile_3']:.2f}",
                cpu and cpu["median"],
                row["peak_mib"],
            ]
        )
    print_table(header, table)
    for row in rows:
        if row["problem"]:
            print(f"{row['contender']}: {row['problem']}")


def _check(
    report: PartReport,
    kind: Kind,
    runners: list[Runner],
    rows: list[dict[str, Any]],
    *,
    exact: bool,
    real: bool,
) -> None:
    """That all compute the same loss where it is the same; on real pairs also how fast."""
    ready = {runner.name: runner.ready for runner in runners if runner.ready is not None}
    report.check(f"{kind}: every way to train runs", all_run(runners))
    if OURS not in ready:
        return
    losses = {name: each.loss for name, each in ready.items()}
    if kind == "reward":
        losses.pop(CHAT, None)  # another loss
    report.store({f"{kind}_loss": losses})
    if exact:
        apart = max(abs(loss - losses[OURS]) for loss in losses.values())
        report.check(f"{kind}: losses agree within {LOSS_LIMIT}", apart <= LOSS_LIMIT)
    for row in rows:
        target = TARGETS.get((kind, row["contender"]))
        if not real or target is None or row["times_ours"] is None:
            continue
        reached = row["times_ours"]["median"] >= target
        report.check(f"{kind}: {target:g} times the pairs/s of {row['contender']}", reached)
        less = row["peak_mib"] > rows[0]["peak_mib"]
        report.check(f"{kind}: less memory than {row['contender']}", less)
