"""Decoding against transformers' ``generate``, in turns: tokens per second, time of a step.

``BENCH_DECODE=opt-125m`` measures that shape with random weights on a CPU too, in about a minute.
"""

import os
import time
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import torch
from transformers import PreTrainedModel

from benchmarks.common.report import PartReport, print_table
from benchmarks.common.shapes import PAD_ID, SHAPES, Shape, random_model
from benchmarks.common.turns import DeviceTimer
from dschat_lora.config.groups import LoraConfig, ModelConfig
from dschat_lora.generation.generate import decode
from dschat_lora.generation.sampling import Sampling
from dschat_lora.models.build import build_causal_lm
from dschat_lora.models.loading import load_tokenizer
from dschat_lora.models.source import find_model

SEED = 0
TARGET_MILLISECONDS = 1.3  # a step of OPT-1.3B at batch 8 on one H200
SMALL = Shape(768, 12, 12, 3072, 50272, 2048, 16, 8, 2048, 512)


@dataclass(frozen=True)
class Load:
    """What a call decodes, and how often it is called."""

    name: str
    rows: int
    prompt: tuple[int, int]  # tokens, from and to
    new_tokens: int
    rounds: int
    seconds: float  # no round begins later than so much after the first


BUNDLED = Load("bundled", 64, (25, 30), 40, 12, 9.0)
OPT_125M = Load("opt-125m", 16, (64, 64), 32, 7, 90.0)
GPU = (
    Load("opt-1.3b", 8, (192, 256), 128, 3, 25.0),
    Load("opt-1.3b", 64, (192, 256), 128, 3, 25.0),
)
TINY_GPU = (Load("tiny", 8, (8, 12), 20, 2, 5.0),)


@dataclass
class Call:
    """One call of a contender."""

    seconds: float
    tokens: int
    texts: list[list[int]]


def run(report: PartReport, *, tiny: bool) -> None:
    """Measure what this machine is for; store, print and check."""
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda" if on_gpu else "cpu")
    cases: list[dict[str, Any]] = []
    loads = (TINY_GPU if tiny else GPU) if on_gpu else (BUNDLED,)
    model, pad_id = _model(loads[0], device)
    for load in loads:
        cases += _measure(report, load, model, pad_id=pad_id, device=device)
        report.store({"cases": cases})
    if not on_gpu and os.environ.get("BENCH_DECODE") == OPT_125M.name:
        model, pad_id = _model(OPT_125M, device)
        cases += _measure(report, OPT_125M, model, pad_id=pad_id, device=device)
        report.store({"cases": cases})
    _print(cases)


def _model(load: Load, device: torch.device) -> tuple[PreTrainedModel, int]:
    """A model whose adapters have a say, and its padding token."""
    if load.name == "opt-1.3b":
        model, pad_id = random_model(SHAPES[load.name], dtype=torch.bfloat16, device=device), PAD_ID
    elif load.name == "opt-125m":
        model, pad_id = random_model(SMALL, dtype=torch.float32, device=device), PAD_ID
    else:
        source, options = find_model(None), ModelConfig()
        tokenizer = load_tokenizer(source.base, options)
        lora, dtype = LoraConfig(lora_dim=16), torch.float32
        adapted = build_causal_lm(
            source, tokenizer, options, lora, dtype=dtype, seed=SEED, meta=False
        )
        model, pad_id = adapted.model.to(device), int(tokenizer.pad_token_id)
    generator = torch.Generator(device).manual_seed(SEED)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("lora_B"):
                parameter.normal_(std=0.02, generator=generator)
    return model.eval(), pad_id


def _measure(
    report: PartReport, load: Load, model: PreTrainedModel, *, pad_id: int, device: torch.device
) -> list[dict[str, Any]]:
    """Rows of one load: every response as long as it may be, and ended by some tokens."""
    prompts = prompts_of(load, model.config.vocab_size)
    options: dict[str, Any] = {"pad_id": pad_id, "device": device}
    # On random weights both follow the same rounding in fp32 alone.
    if model.dtype == torch.float32:
        pair = [
            way(model, prompts, load.new_tokens, (), do_sample=False, seed=0, **options).texts
            for way in (ours, generate)
        ]
        report.check(f"{load.name}: the same greedy texts", pair[0] == pair[1])
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        trial = ours(model, prompts, load.new_tokens, (), do_sample=True, seed=0, **options)
    slow = [str(warning.message) for warning in told if "CUDA graphs" in str(warning.message)]
    report.check(f"{load.name}, batch {load.rows}: nothing falls back", not slow)
    rows = []
    for name, ends in (("all as long", ()), ("some end", _some_ends(trial.texts))):
        row = {"load": asdict(load), "case": f"{load.name} x {load.rows}, {name}"}
        rows.append(row | _compare(load, model, prompts, ends, options))
    if device.type == "cuda":
        rows[0] |= _step(load, model, prompts, options)
        if load.name == "opt-1.3b" and load.rows == 8:
            fast = rows[0]["step_milliseconds"] <= TARGET_MILLISECONDS
            report.check(f"{TARGET_MILLISECONDS} ms a step at batch 8", fast)
    return rows


def prompts_of(load: Load, vocab_size: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(SEED)
    least, most = load.prompt
    lengths = torch.randint(least, most + 1, (load.rows,), generator=generator).tolist()
    draw = [torch.randint(4, vocab_size, (length,), generator=generator) for length in lengths]
    return [ids.tolist() for ids in draw]


def _some_ends(texts: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Tokens of which together every twentieth is one."""
    counts = Counter(token for text in texts for token in text)
    wanted, ends = sum(counts.values()) / 20, []
    for token, count in sorted(counts.items(), key=lambda item: (-item[1], item[0])):
        if count <= wanted:
            ends.append(token)
            wanted -= count
    return tuple(ends)


def ours(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    new_tokens: int,
    ends: Sequence[int],
    *,
    do_sample: bool,
    seed: int,
    pad_id: int,
    device: torch.device,
) -> Call:
    """The package's loop."""
    start = now(device)
    found = decode(
        model,
        prompts,
        Sampling(new_tokens, do_sample=do_sample),
        seeds=[[seed * len(prompts) + index] for index in range(len(prompts))],
        eos_ids=ends,
        pad_id=pad_id,
        device=device,
    )
    seconds = now(device) - start
    texts = [text for each in found for text in each]
    return Call(seconds, sum(map(len, texts)), texts)


def generate(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    new_tokens: int,
    ends: Sequence[int],
    *,
    do_sample: bool,
    seed: int,
    pad_id: int,
    device: torch.device,
) -> Call:
    """transformers' loop, given the same padded prompts."""
    torch.manual_seed(seed)
    model.generation_config.eos_token_id = None
    start = now(device)
    width = max(map(len, prompts))
    ids = [[pad_id] * (width - len(prompt)) + list(prompt) for prompt in prompts]
    mask = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    chosen = {"top_k": 0, "top_p": 1.0, "temperature": 1.0} if do_sample else {}
    output = model.generate(
        input_ids=torch.tensor(ids, device=device),
        attention_mask=torch.tensor(mask, device=device),
        max_new_tokens=new_tokens,
        do_sample=do_sample,
        pad_token_id=pad_id,
        eos_token_id=list(ends) or None,
        **chosen,
    )
    rows = output[:, width:].tolist()
    seconds = now(device) - start
    texts = [_until(row, set(ends)) for row in rows]
    return Call(seconds, sum(map(len, texts)), texts)


def _until(row: list[int], ends: set[int]) -> list[int]:
    stops = (index + 1 for index, token in enumerate(row) if token in ends)
    return row[: next(stops, len(row))]


def now(device: torch.device) -> float:
    """Seconds: of the processor on a CPU, which other work on the machine moves less."""
    if device.type == "cuda":
        torch.cuda.synchronize()
        return time.perf_counter()
    return time.process_time()


def _compare(
    load: Load,
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    ends: Sequence[int],
    options: dict[str, Any],
) -> dict[str, Any]:
    """Both ways in turns; in how many times the seconds of ours the other makes a token."""
    ways: tuple[Callable[..., Call], ...] = (ours, generate)
    calls: list[list[Call]] = []
    deadline = time.monotonic() + load.seconds
    for number in range(load.rounds + 1):
        if number > 1 and time.monotonic() > deadline:
            break
        calls.append(
            [
                way(model, prompts, load.new_tokens, ends, do_sample=True, seed=number, **options)
                for way in ways
            ]
        )
    rates = [[call.tokens / call.seconds for call in pair] for pair in calls[1:]]
    ratios = [ours_ / theirs for ours_, theirs in rates]
    return {
        "rounds": len(rates),
        "tokens_per_response": median(pair[0].tokens for pair in calls) / len(prompts),
        "ours": median(rate[0] for rate in rates),
        "generate": median(rate[1] for rate in rates),
        "ratio": {"median": median(ratios), "min": min(ratios), "max": max(ratios)},
    }


def _step(
    load: Load, model: PreTrainedModel, prompts: Sequence[Sequence[int]], options: dict[str, Any]
) -> dict[str, float]:
    """One token of every row, the prompts' reading left out, and the bytes it must read."""
    half, whole = (
        min(
            ours(model, prompts, count, (), do_sample=True, seed=0, **options).seconds
            for _ in range(3)
        )
        for count in (load.new_tokens // 2, load.new_tokens)
    )
    seconds = (whole - half) / (load.new_tokens - load.new_tokens // 2)
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    config = model.config
    columns = max(map(len, prompts)) + 0.75 * load.new_tokens
    width = 2 * config.num_hidden_layers * config.hidden_size * model.dtype.itemsize
    read = weights + load.rows * columns * width
    return {
        "step_milliseconds": 1e3 * seconds,
        "gigabytes_per_step": read / 1e9,
        "terabytes_per_second": read / seconds / 1e12,
        "copy_terabytes_per_second": _copy_rate(2**30),
    }


def _copy_rate(elements: int) -> float:
    """What a copy of so many fp32 numbers on the GPU reads and writes, TB/s: the fastest."""
    source = torch.empty(elements, dtype=torch.float32, device="cuda")
    target = torch.empty_like(source)
    times = []
    for _ in range(6):
        with DeviceTimer() as timer:
            target.copy_(source)
        times.append(timer.milliseconds)
    return 2 * source.nbytes / min(times[1:]) / 1e9


def _print(cases: Sequence[dict[str, Any]]) -> None:
    header = ["case", "tokens each", "ours, tokens/s", "generate", "ratio", "least", "most"]
    table = [
        [
            *(case[name] for name in ("case", "tokens_per_response", "ours", "generate")),
            *case["ratio"].values(),
        ]
        for case in cases
    ]
    print_table(header, table)
    steps = [case for case in cases if "step_milliseconds" in case]
    names = ["step_milliseconds", "gigabytes_per_step", "terabytes_per_second"]
    names.append("copy_terabytes_per_second")
    if steps:
        print_table(["case", *names], [[s["case"], *(s[name] for name in names)] for s in steps])
