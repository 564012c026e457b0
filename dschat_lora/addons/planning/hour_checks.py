"""What the first hour on a card runs: checks by value against the CPU, and measurements.

Each is a list of commands, ``python -m ...``, and a function that reads what they wrote.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.util import find_spec
from itertools import islice, takewhile
from pathlib import Path
from statistics import median
from typing import Any, Literal, NamedTuple

from dschat_lora.addons.report.rollouts import read_rollouts
from dschat_lora.addons.report.run_data import read_metrics
from dschat_lora.config.bundled import BUNDLED_DATA
from dschat_lora.config.options import command_line

PROBES = "dschat_lora.addons.planning.hour_probes"
STAGES = ("sft", "reward", "rlhf")
DTYPES = ("fp32", "bf16", "fp16")
Device = Literal["cpu", "cuda"]
DEVICES: tuple[Device, Device] = ("cpu", "cuda")
# Of a rounding to nearest: half the distance from 1 to the next number.
ROUNDING = {"fp32": 2.0**-24, "bf16": 2.0**-8, "fp16": 2.0**-11}
# Relative: sums in another order differ by some roundings for each of their thousands of terms.
FP32_LIMIT = 1e-4
FOUR_DIGITS = 1e-3  # as rollouts.jsonl.gz has values of tokens
# Relative, of the type's: bf16 and fp16 on a CPU are up to 2.1 off from fp32 there, in every stage.
ROUNDINGS = 8
OTHER_RESPONSES = {"fp32": 0.0, "bf16": 0.4, "fp16": 0.1}  # share; on a CPU 0, 0.03 and 0.02
RESPONSES = 64  # of an iteration of GRPO that is measured


@dataclass(frozen=True)
class Command:
    """Arguments of ``python -m``, on the CPU or on the card.

    ``refusals`` and ``objection`` say why what needs it is not run: by its exit code, and by its
    output where it ends well.
    """

    name: str
    words: tuple[str, ...]
    device: Device
    seconds: float = 180.0
    refusals: Mapping[int, str] = field(default_factory=dict)
    objection: Callable[[str], str] = lambda output: ""


class Difference(NamedTuple):
    """How far a quantity on the card is from the reference, and how far it may be."""

    quantity: str
    found: float
    allowed: float

    @property
    def holds(self) -> bool:
        """Whether it is as near as it should be; no number is not."""
        return self.found <= self.allowed


@dataclass(frozen=True)
class Item:
    """A check or a measurement: commands, one after another, and what their files say.

    ``lacks`` says why nothing of it is run, if so.
    """

    name: str
    commands: tuple[Command, ...]
    read: Callable[[], dict[str, Any]]  # {"differences": ...} of a check, else a row of a table
    lacks: str = ""


@dataclass(frozen=True)
class Size:
    """A published shape with random weights, and the rows of a step."""

    model: str
    rows: int
    length: int
    new_tokens: int = 256


SIZES = (Size("facebook/opt-1.3b", 8, 2048), Size("facebook/opt-6.7b", 4, 2048))


def write_data(work: Path) -> None:
    """The first rows of the bundled data: the checks train on them, and all evaluate on them."""
    for name, count in (("train", 400), ("eval", 16)):
        with open(BUNDLED_DATA[name], encoding="utf-8") as file:
            (work / f"{name}.jsonl").write_text("".join(islice(file, count)), encoding="utf-8")


def checks(work: Path, dtype: str) -> list[Item]:
    """The twelve checks; ``dtype`` is the 16-bit type that the card has."""
    runs = {stage: _run(work, stage, "cpu", "fp32") for stage in STAGES}
    before = {stage: tuple(runs[each] for each in STAGES[:n]) for n, stage in enumerate(STAGES)}

    def against(reference: Command, run: Command, name: str, stage: str, kind: str) -> Item:
        read = partial(compare, stage, work / reference.name, work / run.name, kind)
        return Item(name, (*before[stage], reference, run), read)

    items = []
    for stage in STAGES:
        for kind in DTYPES:
            run = _run(work, stage, "cuda", kind)
            name = f"{stage} in {kind} against fp32 on the CPU"
            items.append(against(runs[stage], run, name, stage, kind))
    four = [_run(work, "sft", each, "fp32", "--base_bits", "4") for each in DEVICES]
    on_four_bits = against(four[0], four[1], "sft on a 4-bit base against the CPU", "sft", "fp32")
    items.append(replace(on_four_bits, lacks=_lacks_four_bits()))
    # eager attention has a dense mask, by default the samples of a row are computed by themselves
    dense = _run(work, "sft", "cuda", dtype, "--attn_implementation", "eager")
    packed = _run(work, "sft", "cuda", dtype)
    items.append(against(dense, packed, "packed rows against a dense mask", "sft", dtype))
    file = work / "graphs.json"
    probe = Command("graphs", (PROBES, "graphs", dtype, str(file)), "cuda")
    items.append(
        Item(
            "CUDA graphs on and off: equal tokens",
            (probe,),
            lambda: {"differences": [Difference(*x) for x in json.loads(file.read_text("utf-8"))]},
        )
    )
    return items


def _lacks_four_bits() -> str:
    return "" if find_spec("bitsandbytes") else "needs dschat_lora[qlora]"


def _run(work: Path, stage: str, device: Device, dtype: str, *more: str) -> Command:
    """A stage on the bundled model, with the CPU's results of the stages before."""
    name = "-".join((stage, device, dtype, *(word.strip("-") for word in more)))
    lora = {"lora_dim": 8, "max_steps": 4, "per_device_train_batch_size": 8}
    by_stage: dict[str, dict[str, object]] = {
        "sft": {**lora, "sample_generations": 0, "max_seq_len": 128},
        "reward": {**lora, "model_name_or_path": f"{work}/sft-cpu-fp32"},
        "rlhf": {
            "actor_lora_dim": 8,
            "critic_lora_dim": 8,
            "max_steps": 2,
            "actor_model_name_or_path": f"{work}/sft-cpu-fp32",
            "max_answer_seq_len": 16,
            "critic_model_name_or_path": f"{work}/reward-cpu-fp32",
            "generation_batches": 4,
            "per_device_training_batch_size": 64,
            "reward_scaling": "none",
            "print_answers_interval": 0,
        },
    }
    options = by_stage[stage] | {
        "lr_scheduler_type": "constant",
        **_files(work, name, work / "train.jsonl"),
    }
    words = ("dschat_lora", stage, *command_line(options), "--dtype", dtype, *more)
    return Command(name, words, device, 300.0 if device == "cpu" else 180.0)


def _files(work: Path, name: str, data: Path) -> dict[str, object]:
    return {
        "data_path": str(data),
        "eval_data_path": f"{work}/eval.jsonl",
        "data_output_path": f"{work}/cache",
        "output_dir": f"{work}/{name}",
    }


def compare(stage: str, reference: Path, run: Path, dtype: str) -> dict[str, Any]:
    """Differences of a run's losses and gradients, and of RLHF's values, relative to another's.

    Of RLHF in 16 bits rounding lets tokens be drawn otherwise: values are compared up to the
    first of them, and losses are not.
    """

    def largest(key: str) -> float:
        """Of the steps' differences, relative to the reference; NaN where one is none."""
        apart = []
        for step in zip(theirs, ours, strict=True):
            a, b = (float(each[key]) for each in step)  # "nan" where it was none
            apart.append(abs(b - a) / abs(a) if a else abs(b))
        return max(apart, key=lambda each: (each != each, each))

    def limit(quantity: str) -> float:
        if quantity == "other responses":
            return OTHER_RESPONSES[dtype]
        if dtype == "fp32":
            return FOUR_DIGITS if quantity == "values" else FP32_LIMIT
        return ROUNDINGS * ROUNDING[dtype]

    theirs, ours = (read_metrics(each, "train") for each in (reference, run))
    if len(theirs) != len(ours):
        raise ValueError(f"{len(ours)} steps on the card, {len(theirs)} in the reference")
    differences: dict[str, float] = {}
    if stage != "rlhf" or dtype == "fp32":
        keys = {"loss": "loss", "gradient norm": "grad_norm"}
        if stage == "rlhf":
            keys = {"value loss": "value_loss", "gradient norm": "grad_norm"}
            keys["critic's gradient norm"] = "critic_grad_norm"
        differences = {name: largest(key) for name, key in keys.items()}
    if stage == "rlhf":
        differences |= _rollouts(reference, run)
        differences["log-probabilities of decoding"] = max(
            float(each["sampler_error"]) for each in ours
        )
    return {"differences": [Difference(n, value, limit(n)) for n, value in differences.items()]}


def _rollouts(reference: Path, run: Path) -> dict[str, float]:
    """Of the first iteration: responses that differ, and what the models say of the others.

    Scores are of responses that are equal, and values, which a few responses have, of their tokens
    up to another one; means of the differences, relative to the mean size.
    """
    theirs, ours = (
        {row["prompt"]: row for row in read_rollouts(each) if row["iteration"] == 1}
        for each in (reference, run)
    )
    pairs = [(row, ours[prompt]) for prompt, row in theirs.items()]
    equal = [(a, b) for a, b in pairs if a["response"] == b["response"]]
    values = [
        (row["token_value"][n], other["token_value"][n])
        for row, other in pairs
        if "tokens" in row
        for n, _ in takewhile(
            lambda tokens: tokens[1][0] == tokens[1][1],
            enumerate(zip(row["tokens"], other["tokens"], strict=False)),
        )
    ]
    return {
        "other responses": 1 - len(equal) / len(pairs),
        "scores": _mean([(a["reward"], b["reward"]) for a, b in equal]),
        "values": _mean(values),
    }


def _mean(pairs: Sequence[tuple[float, float]]) -> float:
    """Mean difference over mean size; NaN of nothing."""
    size = sum(abs(a) for a, _ in pairs)
    return sum(abs(b - a) for a, b in pairs) / size if size else float("nan")


def measurements(
    work: Path, dtype: str, memory_bytes: int, sizes: Sequence[Size] = SIZES
) -> list[Item]:
    """SFT of each size, of the last one on a 4-bit base too, and GRPO of the first one."""
    items = []
    for size in sizes:
        items.append(_measure(work, "sft", size, dtype, memory_bytes))
        if size is sizes[0]:
            items.append(_measure(work, "rlhf", size, dtype, memory_bytes))
    items.append(_measure(work, "sft", sizes[-1], dtype, memory_bytes, "--base_bits", "4"))
    return items


def _measure(work: Path, stage: str, size: Size, dtype: str, memory_bytes: int, *more: str) -> Item:
    model = work / size.model.split("/")[-1]
    name = "-".join((stage, model.name, *(word.strip("-") for word in more)))
    option = "actor_model_name_or_path" if stage == "rlhf" else "model_name_or_path"
    by_stage: dict[str, dict[str, object]] = {
        "sft": {
            "lora_dim": 16,
            "max_steps": 8,
            "sample_generations": 0,
            "per_device_train_batch_size": size.rows,
            "max_seq_len": size.length,
        },
        "rlhf": {
            "actor_lora_dim": 16,
            "max_steps": 3,
            "print_answers_interval": 0,
            "algorithm": "grpo",
            "num_generations": 8,
            "reward_function": "builtin:length=100",
            "per_device_generation_batch_size": RESPONSES,
            # an optimizer step an iteration
            "per_device_training_batch_size": size.rows,
            "gradient_accumulation_steps": RESPONSES // size.rows,
            "max_answer_seq_len": size.new_tokens,
        },
    }
    options = by_stage[stage] | {**_files(work, name, BUNDLED_DATA["train"]), "dtype": dtype}
    words = (*command_line(options), *more)
    card = ("--for", f"{memory_bytes / 1e9:.3f}GB", "--json")
    planned = ("dschat_lora", "plan", stage, f"--{option}", size.model, *words, *card)
    weights = (PROBES, "weights", size.model, str(model))
    no_room = {3: "the host has no room for a random model of this size, in memory or on disk"}
    return Item(
        f"{'GRPO' if stage == 'rlhf' else 'SFT'}, {model.name}{', 4-bit base' if more else ''}",
        (
            Command(
                f"plan-{name}",
                planned,
                "cpu",
                90,
                refusals={1: "does not fit this card, says dschat-lora plan"},
                objection=_misfit,
            ),
            Command(f"weights-{model.name}", weights, "cpu", 300, no_room),
            Command(name, ("dschat_lora", stage, f"--{option}", str(model), *words), "cuda", 420),
        ),
        partial(_row, work, name),
        _lacks_four_bits() if more else "",
    )


def _misfit(plan: str) -> str:
    facts = json.loads(plan)
    if facts["fits"]:
        return ""
    peak = facts["peak"] / 2**30
    return f"takes {peak:.3g} GiB by dschat-lora plan, more than this card has room for"


def _row(work: Path, name: str) -> dict[str, Any]:
    """Of the step of median duration after the first two, the peak memory and plan's estimate."""
    steps = read_metrics(work / name, "train")
    counted = steps[2:] or steps[-1:]
    rate = median(each["tokens_per_second"] for each in counted)
    middle = min(counted, key=lambda each: abs(each["tokens_per_second"] - rate))
    keys = ("tokens_per_second", "generation_tokens_per_second", "tflops_per_device", "mfu")
    row = {key: middle.get(key) for key in (*keys, "step_seconds")}
    plan = json.loads((work / f"plan-{name}.out").read_text("utf-8"))
    # A run on a GPU keeps the cache during updates where there is room, which plan does not count.
    planned = max(plan["peak"], plan["phases"]["training"] + plan["cache"])
    peak = max(each["peak_memory_bytes"] for each in steps)
    return {**row, "peak_bytes": peak, "planned_bytes": planned}
