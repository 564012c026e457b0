"""An iteration of PPO against DeepSpeed-Chat's way to make it: seconds by phase, and memory.

``BENCH_PPO=1`` measures on a CPU with models large enough to mean something, in minutes.
"""

import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from benchmarks.common.ppo_task import (
    ENDING,
    FULL,
    REAL,
    DecoderShape,
    IterationSize,
    PpoTask,
    write_task,
)
from benchmarks.common.report import PartReport, print_table
from benchmarks.common.turns import Runner, make_context, spread, start, stop
from benchmarks.contenders.ppo import CHAT, CONTENDERS, OURS, Found, IterationWork, serve
from dschat_lora.engine.build import resolve_dtype
from dschat_lora.rl.watch.throughput import PHASES

ALL = (REAL, ENDING, FULL)
TINY = IterationSize(
    DecoderShape(64, 2, 4), DecoderShape(32, 2, 4), 512, 8, 32, 16, 8, 4, ALL, 3, 5.0
)
CPU = IterationSize(
    DecoderShape(256, 4, 8), DecoderShape(128, 4, 4), 4096, 16, 64, 64, 32, 32, ALL, 9, 240.0
)
OPT_1_3B, OPT_350M = DecoderShape(2048, 24, 32), DecoderShape(1024, 24, 16)
GPU = IterationSize(OPT_1_3B, OPT_350M, 50272, 128, 256, 256, 64, 16, (FULL, ENDING), 2, 20.0)
AGREEMENT = 1e-4  # of everything found on the same responses, in fp32
END_SECONDS = 10.0
TARGET_SECONDS = 1.6  # an iteration of the GPU's size with full prompts on one H200
TARGET_RATIO = 2.0  # of a CPU's time, on real prompts whose answers end


def run(report: PartReport, *, tiny: bool) -> None:
    """Measure each setting; store, print and check."""
    # gpu.sh ends a part that takes too long with this signal; its processes then end too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    on_gpu = torch.cuda.is_available()
    real = not tiny or (not on_gpu and os.environ.get("BENCH_PPO") == "1")
    size = (GPU if on_gpu else CPU) if real else TINY
    dtype = resolve_dtype("auto") if size is GPU else "fp32"
    threads = int(os.environ.get("OMP_NUM_THREADS", "1"))
    with tempfile.TemporaryDirectory() as directory:
        task = write_task(
            Path(directory),
            size,
            dtype=dtype,
            threads=threads,
            device=torch.device("cuda" if on_gpu else "cpu"),
        )
        if on_gpu:
            torch.cuda.empty_cache()
        report.store({"size": asdict(size), "dtype": dtype, "threads": threads} | _lengths(task))
        context = make_context(["benchmarks.contenders.ppo"])
        runners = [start(context, name, serve, task) for name in CONTENDERS]
        try:
            _measure(report, task, runners)
            _end(runners)
        finally:
            stop(runners)
    report.check("both ways run", all(runner.problem is None for runner in runners))
    for runner in runners:
        if runner.problem:
            print(f"{runner.name}: {runner.problem}")


def _end(runners: Sequence[Runner]) -> None:
    """Let the processes end by themselves, which leaves nothing of theirs behind."""
    for runner in runners:
        if runner.problem is None and runner.ask(("stop",)):
            runner.process.join(END_SECONDS)


def _lengths(task: PpoTask) -> dict[str, Any]:
    """Mean tokens of prompts and responses of each setting."""
    means = {}
    for name in task.size.settings:
        setting = task.settings[name]
        prompts = [len(task.prompts[number]) for number in setting.numbers]
        answers = setting.lengths or [task.size.max_answer]
        means[name] = {"prompt": float(np.mean(prompts)), "answer": float(np.mean(answers))}
    return {"mean_tokens": means}


def _measure(report: PartReport, task: PpoTask, runners: list[Runner]) -> None:
    for runner in runners:
        runner.ready = runner.receive()
    _compare(report, task, runners)
    rows: list[dict[str, Any]] = []
    for name in task.size.settings:
        works = _take_turns(task.size, name, runners)
        if works is None:
            return
        rows += _rows(name, works, runners)
        report.store({"cases": rows})
    _print(rows)
    found = {(row["setting"], row["contender"]): row for row in rows}
    for name in task.size.settings:
        pair = [found[name, contender]["generated"] for contender in (OURS, CHAT)]
        report.check(f"{name}: both generate as many tokens", pair[0] == pair[1])
    if task.size is GPU:
        seconds = found[FULL, OURS]["seconds"]
        report.check(f"an iteration takes {TARGET_SECONDS} s at most", seconds <= TARGET_SECONDS)
    elif task.size is CPU:
        ratio = found[ENDING, CHAT]["cpu_times_ours"]["median"]
        report.check(f"{ENDING}: {TARGET_RATIO:g} times as fast", ratio >= TARGET_RATIO)


def _compare(report: PartReport, task: PpoTask, runners: Sequence[Runner]) -> None:
    """That both make the same of the same responses, before either has learnt."""
    ours, chat = runners
    if ours.problem is None and chat.problem is None:
        first = ours.ask(("look", ENDING))
        second = first and chat.ask(("look", first.responses))
        if second is not None:
            apart = _apart(first, second)
            report.store({"apart": apart})
            print_table(["largest difference", ""], [[name, each] for name, each in apart.items()])
            if task.dtype == "fp32":
                worst = max(apart.values())
                report.check(f"both find the same within {AGREEMENT}", worst <= AGREEMENT)


def _apart(first: Found, second: Found) -> dict[str, float]:
    arrays = {
        name: float(np.abs(values - second.arrays[name]).max())
        for name, values in first.arrays.items()
    }
    return arrays | {name: abs(loss - second.losses[name]) for name, loss in first.losses.items()}


def _take_turns(
    size: IterationSize, name: str, runners: Sequence[Runner]
) -> list[list[IterationWork]] | None:
    """Works of each contender, the first ones left out; None where one failed."""
    works: list[list[IterationWork]] = [[] for _ in runners]
    deadline = time.monotonic() + size.seconds
    for number in range(size.rounds + 1):
        if number > 1 and time.monotonic() > deadline:
            break
        for runner, own in zip(runners, works, strict=True):
            if number == 1:
                runner.ask(("forget",))
            work = None if runner.problem else runner.ask(("iterate", name))
            if work is None:
                return None
            own += [work] if number else []
    for runner in runners:
        runner.peak_bytes = runner.ask(("peak",))
    return works


def _rows(
    name: str, works: list[list[IterationWork]], runners: Sequence[Runner]
) -> list[dict[str, Any]]:
    """Each contender's medians, and in how many of ours' times it makes a phase, round by round."""
    rows = []
    for runner, own in zip(runners, works, strict=True):
        row: dict[str, Any] = {
            "setting": name,
            "contender": runner.name,
            "rounds": len(own),
            "generated": own[0].generated,
            "seconds": median(_total(work.seconds) for work in own),
            "cpu_seconds": median(_total(work.cpu_seconds) for work in own),
            "weights_mib": runner.ready.weight_bytes / 2**20,
            "peak_mib": runner.peak_bytes and runner.peak_bytes / 2**20,
            "times_ours": _ratios(own, works[0], "seconds"),
            "cpu_times_ours": _ratios(own, works[0], "cpu_seconds"),
            **_figures(own, works[0]),
        }
        for phase in PHASES:
            row[f"{phase}_seconds"] = median(work.seconds[phase] for work in own)
            row[f"{phase}_cpu_seconds"] = median(work.cpu_seconds[phase] for work in own)
            row[f"{phase}_times_ours"] = _ratios(own, works[0], "seconds", phase)
            row[f"{phase}_cpu_times_ours"] = _ratios(own, works[0], "cpu_seconds", phase)
        row["works"] = [asdict(work) for work in own]
        rows.append(row)
    return rows


def _total(seconds: dict[str, float]) -> float:
    return sum(seconds.values())


def _ratios(
    own: list[IterationWork], ours: list[IterationWork], name: str, phase: str | None = None
) -> dict[str, float]:
    def taken(work: IterationWork) -> float:
        seconds: dict[str, float] = getattr(work, name)
        return _total(seconds) if phase is None else seconds[phase]

    return spread([taken(a) / taken(b) for a, b in zip(own, ours, strict=True)])


def _figures(own: list[IterationWork], ours: list[IterationWork]) -> dict[str, float | None]:
    """TFLOP/s and MFU that ours logs; of the other, for the same useful work in its time."""
    found: dict[str, float | None] = {}
    for name in ("tflops_per_device", "mfu"):
        pairs = [
            value * _total(b.seconds) / _total(a.seconds)
            for a, b in zip(own, ours, strict=True)
            if (value := b.figures[name]) is not None
        ]
        found[name] = median(pairs) if pairs else None
    return found


def _print(rows: Sequence[dict[str, Any]]) -> None:
    names = ["seconds", "cpu_seconds", *(f"{phase}_cpu_seconds" for phase in PHASES)]
    short = ["s", "CPU s", *PHASES]
    if torch.cuda.is_available():
        names = ["seconds", *(f"{phase}_seconds" for phase in PHASES), "tflops_per_device", "mfu"]
        short = ["s", *PHASES, "TFLOP/s", "MFU"]
    table = []
    for row in rows:
        times, cpu = row["times_ours"], row["cpu_times_ours"]
        table.append(
            [
                f"{row['setting']}: {row['contender']}",
                *(row[name] for name in names),
                times["median"],
                f"{times['quartile_1']:.2f} - {times['quartile_3']:.2f}",
                cpu["median"],
                row["weights_mib"],
                row["peak_mib"],
            ]
        )
    more = ["x ours", "quartiles", "x CPU time", "weights MiB", "peak MiB"]
    print_table(["an iteration", *short, *more], table)
