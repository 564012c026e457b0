"""A model divided among processes: the same losses, less memory, and what the exchanges cost.

Runs on GPUs where there are two or more, else on the CPU. ``BENCH_TENSOR=1`` takes, on a CPU,
more steps, and models large enough to mean something, for up to ten minutes.
"""

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.common.report import PartReport, print_table
from benchmarks.common.shapes import SHAPES, Shape, random_base
from benchmarks.common.turns import Context, Work, make_context, spread
from benchmarks.parts.tensor_ranks import Layout, Team
from dschat_lora.engine.build import DTYPES

# Nats a step's loss may be off that of one process, by type.
LIMITS = {"fp32": 1e-5, "bf16": 1e-2}
MEMORY_LIMIT = 0.55  # of weights and optimizer state of one process, at two
WHOLE = Layout("TP 1", 1)
TWO = Layout("TP 2", 2, 2)
LAYOUTS = (
    WHOLE,
    Layout("DP 2", 2),
    TWO,
    Layout("TP 2, sequences", 2, 2, sequence_parallel=True),
    Layout("TP 4", 4, 4),
    Layout("DP 2 x TP 2", 4, 2),
)
MOST_TIMED = 2  # processes


@dataclass(frozen=True)
class TeamSize:
    """How much is measured."""

    types: tuple[str, ...]
    steps: int
    rounds: int
    timed: Shape
    held: Shape  # for its vocabulary
    dtype: str
    tiny_data: bool


TINY = TeamSize(
    types=("fp32",),
    steps=4,
    rounds=2,
    timed=Shape(64, 2, 4, 256, 512, 128, 8, 4, 128, 32),
    held=Shape(64, 2, 4, 256, 8192, 128, 8, 2, 128, 32, "llama"),
    dtype="fp32",
    tiny_data=True,
)
CPU = TeamSize(
    types=("fp32", "bf16"),
    steps=50,
    rounds=9,
    timed=Shape(256, 4, 8, 1024, 8192, 512, 16, 8, 256, 128),
    held=Shape(256, 2, 4, 1024, 2**17, 128, 8, 2, 128, 64, "llama"),
    dtype="fp32",
    tiny_data=True,
)
GPU = TeamSize(
    types=("fp32", "bf16"),
    steps=50,
    rounds=9,
    timed=SHAPES["opt-1.3b"],
    held=SHAPES["opt-1.3b"],
    dtype="bf16",
    tiny_data=False,
)


def run(report: PartReport, *, tiny: bool) -> None:
    """Losses, memory and time of each layout; store, print and check."""
    devices = torch.cuda.device_count()
    on_gpu = devices > 1
    if not on_gpu:  # for the processes to come
        os.environ.update({"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""})
    size = GPU if on_gpu and not tiny else CPU if os.environ.get("BENCH_TENSOR") else TINY
    layouts = [each for each in LAYOUTS if not on_gpu or each.processes <= devices]
    absent = [each for each in LAYOUTS if each not in layouts]
    left_out = [f"{each.name}: needs {each.processes} GPUs" for each in absent]
    report.store({"runs_on": "gpu" if on_gpu else "cpu", "left_out": left_out, "steps": size.steps})
    for line in left_out:
        print(f"left out  {line}")
    context = make_context(["benchmarks.parts.tensor_ranks"])
    teams: dict[Layout, Team] = {}
    try:
        _losses(report, context, layouts, teams, size)
        with tempfile.TemporaryDirectory() as directory:
            _memory(report, teams, size, Path(directory) / "held")
            _time(report, teams, size, Path(directory) / "timed")
    finally:
        for team in teams.values():
            team.end()


def _losses(
    report: PartReport,
    context: Context,
    layouts: list[Layout],
    teams: dict[Layout, Team],
    size: TeamSize,
) -> None:
    """Of every layout; the teams of few processes are left in ``teams``."""
    rows: list[dict[str, Any]] = []
    whole: dict[str, list[float]] = {}
    runs = []
    for layout in layouts:
        team = Team(context, layout)
        for dtype in size.types:
            ranks = team.ask("losses", dtype, size.steps, size.tiny_data)
            whole.setdefault(dtype, ranks[0]["losses"])
            runs.append({"layout": layout.name, "type": dtype, **ranks[0]})
            rows.append(_loss_row(layout, dtype, ranks, whole[dtype]))
            report.store({"losses": rows, "loss_runs": runs})
        if layout.processes <= MOST_TIMED:
            teams[layout] = team
        else:
            team.end()
    print_table(list(rows[0]), [list(row.values()) for row in rows])
    for row in rows:
        name, limit = f"{row['layout']} in {row['type']}", LIMITS[row["type"]]
        report.check(f"{name} is within {limit} of one process", row["max |d TP 1|"] <= limit)
        report.check(f"{name} has the same replicas on all ranks", row["replicas alike"])


def _loss_row(
    layout: Layout, dtype: str, ranks: list[dict[str, Any]], whole: list[float]
) -> dict[str, Any]:
    distances = [
        abs(loss - expected)
        for each in ranks
        for loss, expected in zip(each["losses"], whole, strict=True)
    ]
    return {
        "layout": layout.name,
        "type": dtype,
        "first loss": whole[0],
        "last loss": whole[-1],
        "max |d TP 1|": max(distances),
        "replicas alike": all(each["replicas_alike"] for each in ranks),
        "collectives a step": ranks[0]["collectives"],
    }


def _memory(report: PartReport, teams: dict[Layout, Team], size: TeamSize, path: Path) -> None:
    """Of weights and optimizer state on a rank of one and of two processes."""
    _save(size.held, size.dtype, path)
    rows = []
    for layout in (WHOLE, TWO):
        if layout in teams:
            each = teams[layout].ask("memory", str(path), size.held, size.dtype)
            most = {f"{name} MiB": max(rank[name] for rank in each) / 2**20 for name in each[0]}
            rows.append({"layout": layout.name, **most})
    stored = sum(file.stat().st_size for file in path.glob("*.safetensors"))
    report.store({"memory": rows, "stored_mib": stored / 2**20})
    print_table(list(rows[0]), [list(row.values()) for row in rows])
    if len(rows) > 1:
        one, two = (row["weights MiB"] + row["optimizer MiB"] for row in rows)
        report.store({"memory_ratio": two / one})
        claim = f"two ranks hold {MEMORY_LIMIT} of weights and optimizer state each at most"
        report.check(claim, two <= MEMORY_LIMIT * one)
        whole = 0.75 * stored / 2**20
        report.check("no rank reads the whole model", rows[1]["reading MiB"] < whole)


def _time(report: PartReport, teams: dict[Layout, Team], size: TeamSize, path: Path) -> None:
    """Of a step on the same tokens, in turns."""
    _save(size.timed, size.dtype, path)
    for team in teams.values():
        team.ask("prepare", str(path), size.timed, size.dtype)
    works: dict[Layout, list[list[Work]]] = {layout: [] for layout in teams}
    for _ in range(size.rounds):
        for layout, team in teams.items():
            works[layout].append(team.ask("step"))
    rows = [_time_row(layout, each, works[WHOLE]) for layout, each in works.items()]
    report.store({"time": rows})
    header = [name for name in rows[0] if name != "seconds_all"]
    print_table(header, [[row[name] for name in header] for row in rows])
    same = {work[0].amount for each in works.values() for work in each}
    report.check("every layout trains the same tokens", len(same) == 1)


def _time_row(layout: Layout, works: list[list[Work]], whole: list[list[Work]]) -> dict[str, Any]:
    """A step takes as long as its slowest rank, and the processor time of all."""
    seconds = [max(rank.seconds for rank in work) for work in works]
    ratios = [one[0].seconds / each for one, each in zip(whole, seconds, strict=True)]
    times = spread(ratios)
    return {
        "layout": layout.name,
        "processes": layout.processes,
        "step s": median(seconds),
        "CPU s of all": median(sum(rank.cpu_seconds for rank in work) for work in works),
        "tokens/s": median(works[0][0].amount / each for each in seconds),
        "x TP 1": times["median"],
        "quartile 1": times["quartile_1"],
        "quartile 3": times["quartile_3"],
        "seconds_all": seconds,
    }


def _save(shape: Shape, dtype: str, path: Path) -> None:
    """A model with random weights, as files."""
    model = random_base(shape, dtype=DTYPES[dtype], device=torch.device("cpu"))
    model.save_pretrained(path)
