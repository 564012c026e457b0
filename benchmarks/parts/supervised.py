"""Fine-tuning, reward models and DPO against other ways to do so: time and peak memory.

``BENCH_SFT=1`` and ``BENCH_PAIRS=FILE`` take, on a CPU, a model large enough to mean something, for
minutes. Data of the former are those of ``BENCH_DATA``, by default the shared public pairs where
they lie beside the checkout, else the bundled ones; without a file pairs are random tokens.
"""

import os
from dataclasses import asdict, replace
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from benchmarks.common.pair_data import random_pairs, read_pairs, read_samples
from benchmarks.common.report import PartReport
from benchmarks.common.turns import (
    Runner,
    all_run,
    compared,
    contenders,
    print_compared,
    take_turns,
)
from benchmarks.contenders.common import CHAT, OURS, InTurns, Kind, ModelSize, Task
from benchmarks.contenders.supervised import CONTENDERS
from dschat_lora.assets import BUNDLED_DATA
from dschat_lora.engine.build import resolve_dtype

SHARED_DATA = Path(__file__).parents[3] / "shared" / "data" / "preferences.jsonl.gz"
LOSS_LIMIT = 1e-5  # nats, in fp32
IDLE_LIMIT = 0.05  # of all processor time that waiting may take
# In how many times ours the others do as much, on a file's samples and pairs.
TARGETS: dict[tuple[Kind, str], float] = {
    ("sft", CHAT): 3.0,
    ("sft", "TRL, dynamic padding"): 2.5,
    ("sft", "TRL, packing wrapped"): 1.25,
    ("reward", CHAT): 4.0,
    ("reward", "TRL"): 2.0,
    ("dpo", "TRL, precomputed"): 2.0,
}
KINDS: dict[str, tuple[Kind, ...]] = {"sft": ("sft",), "pairs": ("reward", "dpo")}
TINY = ModelSize(64, 2, 4, 512, 8, 128, 3, 10.0)
CPU = {
    "sft": ModelSize(256, 4, 4, 8192, 16, 512, 15, 480.0),
    "pairs": ModelSize(256, 4, 8, 8192, 16, 512, 11, 900.0),
}
GPU = {
    "sft": ModelSize(1024, 24, 16, 8192, 64, 512, 9, 40.0),
    "pairs": ModelSize(2048, 24, 32, 50272, 128, 512, 8, 8.0),
}
NUM_PAIRS = {TINY: 64, CPU["pairs"]: 192, GPU["pairs"]: 128}
# What TRL's trainers import when they are first asked for, so that it counts as a library's.
OPTIONAL = ("trl.trainer.sft_trainer", "trl", "peft", "datasets")


def run(report: PartReport, *, tiny: bool, name: str) -> None:
    """Measure ``sft`` or ``pairs``; store, print and check."""
    on_gpu = torch.cuda.is_available()
    size = TINY if tiny else (GPU if on_gpu else CPU)[name]
    real = bool(os.environ.get("BENCH_SFT" if name == "sft" else "BENCH_PAIRS"))
    samples, tokenizer, source = _data(name, size, real=real)
    threads = os.environ.get("BENCH_THREADS", num_threads() if real else 1)
    task = Task(
        kind=KINDS[name][0],
        size=size,
        samples=samples,
        tokenizer=tokenizer,
        dtype=resolve_dtype("auto") if on_gpu and not tiny else "fp32",
        threads=int(threads),
    )
    facts = ("size", "dtype", "threads", "micro_batch", "accumulation")
    peers = {peer: version(peer) for peer in ("trl", "peft", "accelerate") if find_spec(peer)}
    described = asdict(replace(task, samples=[]))
    report.store(
        {fact: described[fact] for fact in facts}
        | {"data": source, "samples": len(samples), "peers": peers, "cores": os.cpu_count()}
    )
    if name == "sft":
        tokens, targets = task.amount(range(len(samples))), sum(s.num_supervised for s in samples)
        means = {"mean_tokens": tokens, "mean_supervised": targets}
        report.store({what: total / len(samples) for what, total in means.items()})
    for kind in KINDS[name]:
        own = replace(task, kind=kind)
        builders = {each: partial(InTurns, build) for each, build in CONTENDERS[kind].items()}
        with contenders(builders, own, optional=OPTIONAL) as runners:
            take_turns(runners, rounds=size.rounds, seconds=size.seconds)
        rows = [compared(runner, runners[0]) | {"loss": runner.ready} for runner in runners]
        report.store({kind: rows})
        print_compared("real tokens" if kind == "sft" else kind, rows)
        _check(report, own, runners, rows, real=real)


def _data(name: str, size: ModelSize, *, real: bool) -> tuple[list[Any], str, str]:
    """Samples or pairs, their tokenizer, and where they come from."""
    shape = {"vocab_size": size.vocab_size, "max_seq_len": size.max_seq_len}
    if name == "sft":
        file = data_file() if real else BUNDLED_DATA["eval"]
        return (*read_samples(file, **shape), file.name)
    limit = NUM_PAIRS[size]
    if real:
        pairs = read_pairs(Path(os.environ["BENCH_PAIRS"]), limit=limit, **shape)
    else:
        pairs = random_pairs(limit=limit, **shape)
    return pairs.samples, pairs.tokenizer, pairs.source


def data_file() -> Path:
    """What is learnt at full size."""
    default = SHARED_DATA if SHARED_DATA.is_file() else BUNDLED_DATA["train"]
    return Path(os.environ.get("BENCH_DATA", default))


def num_threads() -> int:
    """Of a contender on real data: as many as cores, two at most."""
    return min(2, len(os.sched_getaffinity(0)))


def _check(
    report: PartReport, task: Task, runners: list[Runner], rows: list[dict[str, Any]], *, real: bool
) -> None:
    """That all compute the same loss; on real data also how fast they are, and wait their turn."""
    kind = task.kind
    report.check(f"{kind}: every way to train runs", all_run(runners))
    losses = {row["contender"]: row["loss"] for row in rows if row["loss"] is not None}
    if OURS not in losses:
        return
    if kind == "reward":
        losses.pop(CHAT, None)  # another loss
    if task.dtype == "fp32":
        apart = max(abs(loss - losses[OURS]) for loss in losses.values())
        report.check(f"{kind}: losses agree within {LOSS_LIMIT}", apart <= LOSS_LIMIT)
    if not real:
        return
    works = [work for runner in runners for work in runner.works]
    idle = sum(w.idle_cpu_seconds for w in works) / sum(w.cpu_seconds for w in works)
    report.store({f"{kind}_idle_share": idle})
    report.check(f"{kind}: waiting takes {IDLE_LIMIT:.0%} of time at most", idle <= IDLE_LIMIT)
    for row in (row for row in rows if row["rounds"]):
        name, target = row["contender"], TARGETS.get((kind, row["contender"]))
        if target is not None:
            reached = row["times_ours"]["median"] >= target
            report.check(f"{kind}: {target:g} times as fast as {name}", reached)
        if not name.startswith(OURS):
            less = row["peak_mib"] > rows[0]["peak_mib"]
            report.check(f"{kind}: less memory than {name}", less)
