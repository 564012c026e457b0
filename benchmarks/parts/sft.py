"""Fine-tuning against other ways to do so: real tokens per second and peak memory.

``BENCH_SFT=1`` takes, on a CPU, a model large enough to mean something, for up to ten minutes.
Data are those of ``BENCH_DATA``, by default the shared public pairs where they lie beside the
checkout, else the bundled ones.
"""

import importlib.util
import os
import platform
import signal
import sys
import time
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.common.pair_data import read_samples
from benchmarks.common.report import PartReport, print_table
from benchmarks.common.turns import Runner, all_run, start_all, stop, take_turns, times_ours
from benchmarks.contenders.common import CHAT, OURS, ModelSize, Task
from benchmarks.contenders.sft import CONTENDERS, serve
from dschat_lora.assets import BUNDLED_DATA
from dschat_lora.engine.build import resolve_dtype

SHARED_DATA = Path(__file__).parents[3] / "shared" / "data" / "preferences.jsonl.gz"
LOSS_LIMIT = 1e-5  # nats, in fp32
IDLE_LIMIT = 0.05  # of all processor time that waiting may take
# Of real tokens/s, at full size on a file's samples.
TARGETS = {CHAT: 3.0, "TRL, dynamic padding": 2.5, "TRL, packing wrapped": 1.25}
# What TRL's trainer imports when it is first asked for, so that its memory counts as a library's.
OPTIONAL = ("trl.trainer.sft_trainer", "peft", "datasets")


# Their seconds are those of the whole part.
TINY = ModelSize(64, 2, 4, 512, 8, 128, 3, 55.0)
CPU = ModelSize(256, 4, 4, 8192, 16, 512, 15, 560.0)
GPU = ModelSize(1024, 24, 16, 8192, 64, 512, 9, 50.0)


def run(report: PartReport, *, tiny: bool) -> None:
    """Measure all ways; store, print and check."""
    # gpu.sh ends a part that takes too long with this signal; its processes then end too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    full = bool(os.environ.get("BENCH_SFT"))
    on_gpu = torch.cuda.is_available()
    size = TINY if tiny and not full else GPU if on_gpu else CPU
    deadline = time.monotonic() + size.seconds
    file = data_file() if full else BUNDLED_DATA["eval"]
    samples, tokenizer = read_samples(
        file, vocab_size=size.vocab_size, max_seq_len=size.max_seq_len
    )
    task = Task(
        kind="sft",
        size=size,
        samples=samples,
        tokenizer=tokenizer,
        dtype=resolve_dtype("auto"),
        threads=int(os.environ.get("BENCH_THREADS", num_threads() if full else 1)),
    )
    report.store(_described(task, size, file.name))
    runners = _measure(task, size, deadline=deadline)
    rows = [_row(runner, runners[0]) for runner in runners]
    report.store({"contenders": rows})
    _print(rows)
    _check(report, task, runners, rows, full=full)


def data_file() -> Path:
    """What is learnt at full size."""
    default = SHARED_DATA if SHARED_DATA.is_file() else BUNDLED_DATA["train"]
    return Path(os.environ.get("BENCH_DATA", default))


def num_threads() -> int:
    """Of a contender at full size: as many as cores, two at most."""
    return min(2, len(os.sched_getaffinity(0)))


def _described(task: Task, size: ModelSize, file: str) -> dict[str, Any]:
    installed = [name for name in ("trl", "peft", "accelerate") if importlib.util.find_spec(name)]
    tokens = [len(sample.input_ids) for sample in task.samples]
    return {
        "machine": {"cpu": cpu_model(), "cores": os.cpu_count()},
        "peers": {name: version(name) for name in installed},
        "size": asdict(size),
        "lora_dim": size.lora_dim,
        "dtype": task.dtype,
        "threads": task.threads,
        "data": file,
        "samples": len(tokens),
        "mean_tokens": sum(tokens) / len(tokens),
        "mean_supervised": sum(sample.num_supervised for sample in task.samples) / len(tokens),
        "micro_batch": task.micro_batch,
        "accumulation": task.accumulation,
    }


def cpu_model() -> str:
    """The processor as the kernel names it."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text("utf-8").splitlines() if path.is_file() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def _measure(task: Task, size: ModelSize, *, deadline: float) -> list[Runner]:
    """Every contender's steps, in turns; no process is left behind."""
    runners = start_all(CONTENDERS, serve, task, optional=OPTIONAL)
    try:
        take_turns(runners, rounds=size.rounds, deadline=deadline)
    finally:
        stop(runners)
    return runners


def _row(runner: Runner, ours: Runner) -> dict[str, Any]:
    """A contender's numbers, and in how many of its times ours does a token, round by round."""
    works = runner.works
    row: dict[str, Any] = {
        "contender": runner.name,
        "problem": runner.problem,
        "loss": runner.ready and runner.ready.loss,
        "peak_mib": runner.peak_bytes and runner.peak_bytes / 2**20,
        "rounds": len(works),
    }
    measured = (
        "tokens_per_second",
        "tokens_per_cpu_second",
        "tokens_per_step",
        "real_share",
        "times_ours",
        "cpu_times_ours",
    )
    if not works:
        return row | dict.fromkeys(measured)
    tokens = sum(work.amount for work in works)
    values = (
        median(work.amount / work.seconds for work in works),
        median(work.amount / work.cpu_seconds for work in works),
        tokens / len(works),
        tokens / sum(work.positions for work in works),
        times_ours(runner, ours, "seconds"),
        times_ours(runner, ours, "cpu_seconds"),
    )
    return row | dict(zip(measured, values, strict=True)) | {"works": [asdict(w) for w in works]}


def _print(rows: list[dict[str, Any]]) -> None:
    header = [
        "real tokens",
        "per s",
        "per CPU s",
        "a step",
        "of positions",
        "x ours",
        "quartiles",
        "x CPU time",
        "quartiles",
        "peak MiB",
    ]
    table = []
    for row in rows:
        times, cpu = row["times_ours"], row["cpu_times_ours"]
        table.append(
            [
                row["contender"],
                row["tokens_per_second"],
                row["tokens_per_cpu_second"],
                row["tokens_per_step"],
                row["real_share"],
                times and times["median"],
                _quartiles(times),
                cpu and cpu["median"],
                _quartiles(cpu),
                row["peak_mib"],
            ]
        )
    print_table(header, table)
    print(f"rounds: {rows[0]['rounds']}")
    for row in rows:
        if row["problem"]:
            print(f"{row['contender']}: {row['problem']}")


def _quartiles(values: dict[str, float] | None) -> str | None:
    return values and f"{values['quartile_1']:.2f} - {values['quartile_3']:.2f}"


def _check(
    report: PartReport,
    task: Task,
    runners: list[Runner],
    rows: list[dict[str, Any]],
    *,
    full: bool,
) -> None:
    """That all compute the same loss and wait their turn; at full size also how fast they are."""
    runs = all_run(runners)
    report.check("every way to train runs", runs)
    losses = {row["contender"]: row["loss"] for row in rows if row["loss"] is not None}
    if OURS not in losses:
        return
    if task.dtype == "fp32":
        apart = max(abs(loss - losses[OURS]) for loss in losses.values())
        report.check(f"losses agree within {LOSS_LIMIT}", apart <= LOSS_LIMIT)
    if not full:
        return
    works = [work for runner in runners for work in runner.works]
    idle = sum(w.idle_cpu_seconds for w in works) / sum(w.cpu_seconds for w in works)
    report.store({"idle_share": idle})
    report.check(f"waiting takes {IDLE_LIMIT:.0%} of processor time at most", idle <= IDLE_LIMIT)
    for row in rows:
        if row["times_ours"] is None:
            continue
        name, target = row["contender"], TARGETS.get(row["contender"])
        if target is not None:
            reached = row["times_ours"]["median"] >= target
            report.check(f"{target:g} times the real tokens/s of {name}", reached)
        if not name.startswith(OURS):
            less = row["peak_mib"] > rows[0]["peak_mib"]
            report.check(f"less memory than {name}", less)
