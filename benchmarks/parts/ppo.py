"""An iteration of PPO against DeepSpeed-Chat's way to make it: seconds by phase, and memory.

``BENCH_PPO=1`` measures on a CPU with models large enough to mean something, in minutes.
"""

import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from benchmarks.common.ppo_task import ENDING, FULL, REAL, IterationSize, PpoTask, write_task
from benchmarks.common.report import PartReport, print_table
from benchmarks.common.shapes import opt_shape
from benchmarks.common.turns import Runner, contenders, spread
from benchmarks.contenders.chat_rlhf import DeepSpeedChat
from benchmarks.contenders.common import CHAT, OURS
from benchmarks.contenders.rlhf import IterationWork, Ours, Timed
from dschat_lora.engine.build import resolve_dtype
from dschat_lora.engine.distributed import device
from dschat_lora.rl.watch.throughput import PHASES

ALL = (REAL, ENDING, FULL)
TINY = IterationSize(
    opt_shape(64, 2, 4, 512, 8), opt_shape(32, 2, 4, 512, 8), 32, 16, 8, 4, ALL, 3, 5.0
)
CPU = IterationSize(
    opt_shape(256, 4, 8, 4096, 16), opt_shape(128, 4, 4, 4096, 16), 64, 64, 32, 32, ALL, 9, 240.0
)
GPU = IterationSize(
    opt_shape(2048, 24, 32, 50272, 128),
    opt_shape(1024, 24, 16, 50272, 128),
    *(256, 256, 64, 16, (FULL, ENDING), 2, 20.0),
)
AGREEMENT = 1e-4  # of everything found on the same responses, in fp32
TARGET_SECONDS = 1.6  # an iteration of the GPU's size with full prompts on one H200
TARGET_RATIO = 2.0  # of a CPU's time, on real prompts whose answers end


def run(report: PartReport, *, tiny: bool) -> None:
    """Measure each setting; store, print and check."""
    on_gpu = torch.cuda.is_available()
    size = TINY if tiny else GPU if on_gpu else CPU
    dtype = resolve_dtype("auto") if size is GPU else "fp32"
    threads = int(os.environ.get("OMP_NUM_THREADS", "1"))
    with tempfile.TemporaryDirectory() as directory:
        task = write_task(Path(directory), size, dtype=dtype, threads=threads, device=device())
        if on_gpu:
            torch.cuda.empty_cache()
        report.store({"size": asdict(size), "dtype": dtype, "threads": threads} | _lengths(task))
        builders = {OURS: partial(Timed, Ours), CHAT: partial(Timed, DeepSpeedChat)}
        with contenders(builders, task) as runners:
            for runner in runners:
                runner.ready = runner.receive()
            _compare(report, task, runners)
            _measure(report, task, runners)
    report.check("both ways run", all(runner.problem is None for runner in runners))
    for runner in runners:
        if runner.problem:
            print(f"{runner.name}: {runner.problem}")


def _lengths(task: PpoTask) -> dict[str, dict[str, dict[str, float]]]:
    """Mean tokens of prompts and responses of each setting."""
    means = {}
    for name in task.size.settings:
        setting = task.settings[name]
        prompts = [len(task.prompts[number]) for number in setting.numbers]
        answers = setting.lengths or [task.size.max_answer]
        means[name] = {"prompt": float(np.mean(prompts)), "answer": float(np.mean(answers))}
    return {"mean_tokens": means}


def _compare(report: PartReport, task: PpoTask, runners: Sequence[Runner]) -> None:
    """That both make the same of the same responses, before either has learnt."""
    ours, chat = runners
    if ours.problem or chat.problem or not (first := ours.ask("look", ENDING)):
        return
    if (second := chat.ask("look", first.responses)) is None:
        return
    apart = {
        name: float(np.abs(values - second.arrays[name]).max())
        for name, values in first.arrays.items()
    } | {name: abs(loss - second.losses[name]) for name, loss in first.losses.items()}
    report.store({"apart": apart})
    print_table(["largest difference", ""], [[name, each] for name, each in apart.items()])
    if task.dtype == "fp32":
        worst = max(apart.values())
        report.check(f"both find the same within {AGREEMENT}", worst <= AGREEMENT)


def _measure(report: PartReport, task: PpoTask, runners: list[Runner]) -> None:
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for name in task.size.settings:
        works = _take_turns(task.size, name, runners)
        if works is None:
            return
        for runner, own in zip(runners, works, strict=True):
            rows[name, runner.name] = _row(name, runner, own, works[0])
        report.store({"cases": [*rows.values()]})
    _print([*rows.values()])
    for name in task.size.settings:
        same = rows[name, OURS]["generated"] == rows[name, CHAT]["generated"]
        report.check(f"{name}: both generate as many tokens", same)
    if task.size is GPU:
        seconds = rows[FULL, OURS]["seconds"]
        report.check(f"an iteration takes {TARGET_SECONDS} s at most", seconds <= TARGET_SECONDS)
    elif task.size is CPU:
        ratio = rows[ENDING, CHAT]["cpu_times_ours"]["median"]
        report.check(f"{ENDING}: {TARGET_RATIO:g} times as fast", ratio >= TARGET_RATIO)


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
                runner.ask("forget_peak")
            work = None if runner.problem else runner.ask("iterate", name)
            if work is None:
                return None
            own += [work] if number else []
    for runner in runners:
        runner.peak_bytes = runner.ask("peak_bytes")
    return works


def _row(
    setting: str, runner: Runner, own: list[IterationWork], ours: list[IterationWork]
) -> dict[str, Any]:
    """A contender's medians, and in how many of ours' times it makes a phase, round by round."""
    row: dict[str, Any] = {
        "setting": setting,
        "contender": runner.name,
        "rounds": len(own),
        "generated": own[0].generated,
        "weights_mib": runner.ready / 2**20,
        "peak_mib": runner.peak_bytes and runner.peak_bytes / 2**20,
        "works": [asdict(work) for work in own],
    }
    for phase in ("", *PHASES):
        for measure in ("", "cpu_"):
            taken, of_ours = (
                [_taken(getattr(work, f"{measure}seconds"), phase) for work in works]
                for works in (own, ours)
            )
            name = f"{phase}_{measure}" if phase else measure
            row[f"{name}seconds"] = median(taken)
            row[f"{name}times_ours"] = spread([a / b for a, b in zip(taken, of_ours, strict=True)])
    # What ours logs; of the other, for the same useful work in its time.
    for name in ("tflops_per_device", "mfu"):
        logged = [
            b.figures[name] * _taken(b.seconds) / _taken(a.seconds)
            for a, b in zip(own, ours, strict=True)
            if b.figures[name] is not None
        ]
        row[name] = median(logged) if logged else None
    return row


def _taken(seconds: dict[str, float], phase: str = "") -> float:
    return seconds[phase] if phase else sum(seconds.values())


def _print(rows: Sequence[dict[str, Any]]) -> None:
    names = ["seconds", "cpu_seconds", *(f"{phase}_cpu_seconds" for phase in PHASES)]
    if torch.cuda.is_available():
        names = ["seconds", *(f"{phase}_seconds" for phase in PHASES), "tflops_per_device", "mfu"]
    names += ["times_ours", "cpu_times_ours", "weights_mib", "peak_mib"]
    table = [[f"{row['setting']}: {row['contender']}", *map(row.get, names)] for row in rows]
    print_table(["an iteration", *names], table)
