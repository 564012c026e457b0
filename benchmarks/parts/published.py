"""Settings that others have published figures of, on random weights.

Whose figures they are stands in README.md beside this folder.
"""

import os
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, Literal

import torch

from benchmarks.common.ppo_task import FULL, REAL, IterationSize, write_task
from benchmarks.common.report import PartReport, print_table
from benchmarks.common.shapes import (
    SHAPES,
    Shape,
    full_rows,
    opt_shape,
    random_base,
    random_model,
)
from benchmarks.common.turns import (
    Runner,
    compared,
    contenders,
    peak_bytes,
    print_compared,
    take_turns,
)
from benchmarks.contenders.common import OURS
from benchmarks.contenders.rlhf import OurGrpo, TrlGrpo
from benchmarks.contenders.throughput import build_published_ways
from benchmarks.parts import decode, throughput
from dschat_lora.engine.build import DTYPES, resolve_dtype
from dschat_lora.engine.distributed import device
from dschat_lora.perf.shape import describe

GIB = 2**30
ALL_SHAPES = SHAPES | {"opt-3m": opt_shape(256, 4, 8, 4096, 16)}
SMALL = Shape(64, 2, 4, 128, 512, 256, 4, 4, 64, 64, "llama", 2)
SMALL_EXPERTS = replace(SMALL, architecture="qwen3_moe", ffn_size=32, experts=(4, 2), head_size=16)


@dataclass(frozen=True)
class Training:
    """Steps of supervised fine-tuning on full rows."""

    shape: str
    tokens_per_second: int | None  # published, on one H100
    rows: int = 32  # of a step
    length: int = 4096
    micro_batch: int = 2  # rows
    lora_dim: int = 16


@dataclass(frozen=True)
class Decoding:
    """Tokens that rows get after a prompt."""

    shape: str
    tokens_per_second: dict[int, int | None]  # published, by rows at a time
    lora_dim: int
    prompt: int = 256
    new_tokens: int = 512


@dataclass(frozen=True)
class Iteration:
    """An iteration of GRPO, of responses that are all as long as they may be."""

    shape: str
    responses: int
    lengths: tuple[tuple[int, int], ...]  # of prompts, at most, and of responses
    micro_batch: int
    lora_dim: int
    base_bits: Literal[4, 16] = 16
    most_gib: float | None = None  # of memory
    most_seconds: float | None = None
    # Contenders, with the responses that ours decodes at a time.
    ways: tuple[tuple[str, int | str], ...] = ((OURS, "auto"),)
    # Prompts as long as they may be; else also shorter ones, and contenders take turns.
    full: bool = True
    rounds: int = 2
    seconds: float = 40.0


PUBLISHED: dict[str, Training | Decoding | Iteration] = {
    "sft-llama-3.1-8b": Training("llama-3-8b", 12_473),
    "sft-qwen2.5-7b": Training("qwen2.5-7b", 14_110),
    "sft-qwen3-30b-a3b": Training("qwen3-30b-a3b", None, rows=8),
    "decode-qwen3-4b": Decoding("qwen3-4b", {32: 4_300, 256: None}, 32),
    "decode-qwen3-30b-a3b": Decoding("qwen3-30b-a3b", {8: 807, 32: 2_779, 48: 4_076}, 16),
    # Prompts are long, as 20,000 steps of decoding take longer than a part may; what is held
    # at the end is the same.
    "grpo-llama-3.1-8b": Iteration(
        "llama-3-8b", 8, ((16_000, 4_000),), 1, 16, base_bits=4, most_gib=30.0
    ),
    "grpo-qwen2.5-1.5b": Iteration(
        *("qwen2.5-1.5b", 168, ((128, 1_200),), 8, 1),
        most_seconds=5.0,
        ways=((OURS, "auto"), ("TRL", "auto")),
    ),
    "rows": Iteration(
        *("llama-3.2-1b", 64, ((256, 256),), 8, 16),
        ways=((OURS, "auto"), (OURS, 64), (OURS, 16)),
    ),
    "grpo": Iteration(
        *("opt-3m", 64, ((64, 64), (256, 64), (64, 256), (256, 256)), 16, 16),
        ways=((OURS, "auto"), ("TRL", "auto")),
        full=False,
        rounds=5,
        seconds=600.0,
    ),
}


def run(report: PartReport, *, tiny: bool, name: str) -> None:
    """Measure one of the settings; store, print and check."""
    setting = PUBLISHED[name]
    shape = ALL_SHAPES[setting.shape]
    if tiny:
        shape = SMALL_EXPERTS if shape.experts[0] else SMALL
    shape = replace(shape, lora_dim=min(setting.lora_dim, 4) if tiny else setting.lora_dim)
    report.store({"setting": asdict(setting), "shape": asdict(shape)})
    if isinstance(setting, Training):
        _train(report, setting, shape, tiny=tiny)
    elif isinstance(setting, Decoding):
        _decode(report, setting, shape, tiny=tiny)
    else:
        _iterate(report, setting, shape, tiny=tiny)


def _train(report: PartReport, setting: Training, shape: Shape, *, tiny: bool) -> None:
    dtype = "bf16" if tiny else resolve_dtype("auto")
    length, rows = (64, 4) if tiny else (setting.length, setting.rows)
    shape = replace(shape, rows=rows, row_length=length, max_sample=length)
    measured, peak = throughput.peaks(DTYPES[dtype], tiny=tiny)
    base = random_base(shape, dtype=DTYPES[dtype], device=device())
    with tempfile.TemporaryDirectory() as directory:
        ways = build_published_ways(base, lora_dim=shape.lora_dim, dtype=dtype, directory=directory)
        throughput.check_losses(report, ways, shape, shape.lora_dim)
        tokens = setting.micro_batch * length
        cases = [
            throughput.Case(name, way, full_rows(shape), 1, tokens) for name, way in ways.items()
        ]
        # One after another, as the later ones may be stopped.
        for case in cases:
            throughput.measure(
                [case], describe(ways[OURS].model), peak, rounds=2, seconds=0 if tiny else 15.0
            )
            done = cases[: cases.index(case) + 1]
            entries = [
                {"case": c.name} | throughput.entry_of(c, cases[0], measured, DTYPES[dtype])
                for c in done
            ]
            report.store({"dtype": dtype, "cases": entries})
    columns = ("case", "tokens_per_second", "x_ours_median", "tflops_per_device", "mfu", "peak_gib")
    print_table(columns, [[each.get(column) for column in columns] for each in entries])
    report.check("ours ran", entries[0]["rounds"] > 0)
    if not tiny and setting.tokens_per_second and "H100" in torch.cuda.get_device_name():
        reached = entries[0]["tokens_per_second"]
        bar = setting.tokens_per_second
        report.check(f"at least the published {bar:,} tokens/s", reached >= bar)


def _decode(report: PartReport, setting: Decoding, shape: Shape, *, tiny: bool) -> None:
    dtype = DTYPES["fp32" if tiny else resolve_dtype("auto")]
    model = random_model(shape, dtype=dtype, device=device()).eval()
    options: dict[str, Any] = {"pad_id": 1, "device": device()}
    cases: list[dict[str, Any]] = []
    for rows, published in setting.tokens_per_second.items():
        count = min(rows, 4) if tiny else rows
        lengths = (8, 8) if tiny else (setting.prompt, setting.prompt)
        load = decode.Load(setting.shape, count, lengths, 4 if tiny else setting.new_tokens, 2, 20)
        prompts = decode.prompts_of(load, shape.vocab_size)
        calls = [
            decode.ours(model, prompts, load.new_tokens, (), do_sample=True, seed=n, **options)
            for n in range(1 + load.rounds)
        ]
        rate = median(call.tokens / call.seconds for call in calls[1:])
        cases.append(
            {
                "rows": rows,
                "tokens_per_second": rate,
                "published": published,
                "step_milliseconds": 1e3 * count / rate,
                "peak_gib": peak_bytes() / GIB,
            }
        )
        report.store({"cases": cases})
    print_table(list(cases[0]), [list(each.values()) for each in cases])
    report.check("all rows were decoded", all(each["tokens_per_second"] > 0 for each in cases))


def _iterate(report: PartReport, setting: Iteration, shape: Shape, *, tiny: bool) -> None:
    shape = replace(shape, base_bits=16 if tiny else setting.base_bits)
    builders = {OURS: OurGrpo, "TRL": TrlGrpo}
    # One after another, as later ones may be stopped, or in turns.
    groups = [[way] for way in setting.ways] if setting.full else [[*setting.ways]]
    cases: list[dict[str, Any]] = []
    for prompt, answer in setting.lengths:
        ours = None
        for group in groups:
            amount = (prompt, answer, setting.responses, setting.micro_batch)
            size = IterationSize(
                shape,
                None,
                *((16, 8, 8, 8) if tiny else amount),
                (FULL,) if setting.full else (REAL, FULL),
                setting.rounds,
                setting.seconds,
                max_num_seqs=group[0][1],
            )
            runners = _runners_after(size, {name: builders[name] for name, _ in group})
            ours = ours or runners[0]
            head = {"max_prompt": prompt, "max_answer": answer, "max_num_seqs": group[0][1]}
            cases += [head | compared(runner, ours) for runner in runners]
            report.store({"cases": cases})
    print_compared("an iteration", cases)
    first = cases[0]
    ran = [
        case["rounds"] > 0 and not case["problem"] for case in cases if case["contender"] == OURS
    ]
    report.check("ours ran", all(ran))
    if not tiny and setting.most_gib is not None:
        most = setting.most_gib
        report.check(f"at most {most:g} GiB", (first["peak_mib"] or 1e9) / 1024 <= most)
    if not tiny and setting.most_seconds is not None:
        claim = f"an iteration takes {setting.most_seconds:g} s at most"
        report.check(claim, first.get("seconds", 1e9) <= setting.most_seconds)


def _runners_after(size: IterationSize, builders: dict[str, Any]) -> list[Runner]:
    """The contenders after their iterations, without the first, which warms up."""
    dtype = resolve_dtype("auto") if torch.cuda.is_available() else "fp32"
    threads = int(os.environ.get("OMP_NUM_THREADS", "1"))
    with tempfile.TemporaryDirectory() as directory:
        task = write_task(Path(directory), size, dtype=dtype, threads=threads, device=device())
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        with contenders(builders, task, optional=("trl", "peft", "datasets")) as runners:
            take_turns(runners, rounds=size.rounds + 1, seconds=size.seconds)
    for runner in runners:
        runner.works = runner.works[1:] or runner.works
    return runners
