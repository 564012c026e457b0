"""Validation of data-to-text training, decoding and evaluation, and the learning-rate schedule."""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from dschat_lora.algos.schedules import constant, cosine, cycle, linear
from dschat_lora.checkpoint.adapter_config import verify_adapter
from dschat_lora.config.data import DataConfig
from dschat_lora.data.rows import check_sources
from dschat_lora.experiments.nlg.config import (
    DecodeConfig,
    EvaluateConfig,
    NlgConfig,
    NlgOptimConfig,
)
from dschat_lora.models.source import ModelSource, find_model
from dschat_lora.runtime.checks import Check, check_can_be_made, check_task, model_fields
from dschat_lora.runtime.resume import read_state
from dschat_lora.runtime.validation import StageRules, check_supervised

_TARGETS = {"target_modules", "lora_module_name"}
# Options that set the rate, except in a cycle.
_RATES = ("lora_learning_rate", "lora_lr_multiplier", "num_warmup_steps")


def with_query_and_value(config: NlgConfig, source: ModelSource) -> NlgConfig:
    """With new adapters on queries and values, packed in GPT-2 with keys, unless options differ."""
    lora, given = config.lora, config.given
    if source.adapter is not None or lora.lora_dim == 0:
        return config
    packed = model_fields(source).get("model_type", "gpt2") == "gpt2" or "enable_lora" in given
    if not _TARGETS & given:
        lora = replace(lora, target_modules=("c_attn",) if packed else ("q_proj", "v_proj"))
    if "enable_lora" not in given and lora.target_modules == ("c_attn",):
        lora = replace(lora, enable_lora=("q", "v"))
    return replace(config, lora=lora)


def check_cycle(config: NlgConfig, source: ModelSource) -> None:
    """Refuse other options of length and rate with ``--lr_scheduler_type cycle``."""
    optim = config.optim
    if optim.lr_scheduler_type != "cycle":
        return
    if optim.max_steps:
        raise ValueError(
            f"--max_steps {optim.max_steps} and --i_steps {optim.i_steps} both say how long the "
            "run is; give one"
        )
    for name in _RATES:
        if name in config.given:
            raise ValueError(
                f"--{name} has no part in --lr_scheduler_type cycle: --i_lrs {optim.i_lrs} are "
                "the rates; drop it"
            )


def check_length(config: NlgConfig, source: ModelSource) -> None:
    """Refuse a run of less than one optimizer step."""
    in_optimizer_steps(config)


def check_accumulation(config: NlgConfig, source: ModelSource) -> None:
    """Refuse to resume at another accumulation with a schedule that counts micro-batches."""
    if not config.checkpoint or not config.optim.scheduler_counts_micro_steps:
        return
    before = read_state(Path(config.checkpoint))["config"]["gradient_accumulation_steps"]
    now = config.batch.gradient_accumulation_steps
    if now != before:
        raise ValueError(
            f"--scheduler_counts_micro_steps: the run had {before} micro-batches a step and would "
            f"have {now} from here on, which changes its rates and length; go on with the same "
            "number of processes and --per_device_train_batch_size"
        )


def in_optimizer_steps(config: NlgConfig) -> NlgConfig:
    """The config with the run's length, if options tell it, in optimizer steps, at least one."""
    optim = config.optim
    steps = optim.turns[0][-1] if optim.lr_scheduler_type == "cycle" else optim.max_steps
    micro = _micro_steps(config)
    if 0 < steps < micro:
        raise ValueError(
            f"--scheduler_counts_micro_steps: {steps} micro-steps make no optimizer step of "
            f"--gradient_accumulation_steps {micro}"
        )
    return replace(config, optim=replace(optim, max_steps=steps // micro))


NLG_CHECKS: tuple[Check[NlgConfig, ModelSource], ...] = (
    check_cycle,
    check_length,
    check_accumulation,
    with_query_and_value,
)
check_training = partial(check_supervised, rules=StageRules("nlg", checks=NLG_CHECKS))


def schedule(config: NlgConfig) -> Callable[[int], Callable[[int], float]]:
    """From the optimizer steps of the whole run, the multiplier of the peak rate at each.

    Where micro-steps are counted, each with an advance of the schedule, the optimizer's k-th step
    is at the last of its micro-steps, ``k * accumulation - 1`` counted from 0.
    """
    optim, micro = config.optim, _micro_steps(config)

    def factors(num_steps: int) -> Callable[[int], float]:
        total = num_steps * micro
        return lambda step: rate_factor(optim, (step + 1) * micro - 1, total=total)

    return factors


def rate_factor(optim: NlgOptimConfig, step: int, *, total: int) -> float:
    """The rate over ``--learning_rate`` after ``step`` of ``total`` advances of the schedule."""
    name, warmup = optim.lr_scheduler_type, optim.num_warmup_steps
    if name == "cycle":
        steps, rates = optim.turns
        return cycle(step, steps=steps, rates=rates) / optim.learning_rate
    if name == "constant":
        return constant(step, warmup=warmup)
    return (linear if name == "linear" else cosine)(step, warmup=warmup, total=total)


def _micro_steps(config: NlgConfig) -> int:
    """Advances of the schedule for each optimizer step."""
    counts = config.optim.scheduler_counts_micro_steps
    return config.batch.gradient_accumulation_steps if counts else 1


# The categories of WebNLG 2017 with texts to train on.
SEEN = {
    *("Airport", "Astronaut", "Building", "City", "ComicsCharacter", "Food", "Monument"),
    *("SportsTeam", "University", "WrittenWork"),
}


@dataclass(frozen=True)
class Prediction:
    """One line of the file that decode wrote."""

    text: str
    references: tuple[str, ...]
    category: str | None


def check_decode(config: DecodeConfig) -> DecodeConfig:
    """The config, if its model and its data can be there."""
    source = find_model(config.model_name_or_path)
    _check_lora_only(config, source.adapter)
    if source.adapter is not None:
        verify_adapter(source.adapter)
    check_task(source, ("CAUSAL_LM",))
    check_sources(DataConfig(data_path=config.data_path), "prompts")
    _check_output_file(config.output_path)
    return config


def check_evaluate(config: EvaluateConfig) -> EvaluateConfig:
    """The config, if its predictions can be read and the metrics' packages are there."""
    chosen_predictions(config)
    for package in ("sacrebleu", "nltk"):
        if find_spec(package) is None:
            raise ValueError(f"evaluate needs {package}: pip install 'dschat_lora[nlg]'")
    if config.output_path is not None:
        _check_output_file(config.output_path)
    return config


def chosen_predictions(config: EvaluateConfig) -> list[Prediction]:
    """The lines of ``--predictions`` that ``--filter`` leaves.

    Raises:
        ValueError: naming the file and line, or what is empty.
    """
    path = Path(config.predictions).expanduser()
    if not path.is_file():
        raise ValueError(f"--predictions {config.predictions} is no file; decode writes one")
    found = []
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                found.append(_prediction(f"{path}:{number}", line))
    uncategorised = next((p for p in found if p.category is None), None)
    if config.filter != "all" and uncategorised is not None:
        raise ValueError(
            f"--filter {config.filter} needs the category of every meaning, which WebNLG's files "
            f"have and {path} lacks"
        )
    if config.filter != "all":
        wanted = config.filter == "seen"
        found = [each for each in found if (each.category in SEEN) == wanted]
    if not found:
        raise ValueError(f"--predictions {path} has no meaning for --filter {config.filter}")
    return found


def _prediction(location: str, line: bytes) -> Prediction:
    try:
        values: Any = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise ValueError(f"{location}: not UTF-8 (byte {error.start + 1} of the line)") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"{location}: not valid JSON ({error.msg})") from error
    values = values if isinstance(values, dict) else {}
    text, references = values.get("prediction"), values.get("references")
    category = values.get("category")
    if not isinstance(text, str) or not isinstance(references, list):
        raise ValueError(f"{location}: a line has 'prediction' (text) and 'references' (a list)")
    if not references or not all(isinstance(r, str) and r.strip() for r in references):
        raise ValueError(f"{location}: 'references' must be one text or more, none empty")
    return Prediction(text, tuple(references), category if isinstance(category, str) else None)


def _check_output_file(name: str) -> None:
    path = Path(name).expanduser()
    if path.is_dir():
        raise ValueError(f"--output_path {name} is a directory; name a file")
    check_can_be_made(path.parent, option="output_path")


def _check_lora_only(config: DecodeConfig, adapter: Path | None) -> None:
    path, base = config.lora_path, config.model_name_or_path
    if path is None:
        if config.lora_alpha is not None or config.enable_lora:
            name = "enable_lora" if config.lora_alpha is None else "lora_alpha"
            raise ValueError(f"--{name} describes a --lora_path, and there is none")
        return
    if base is None:
        raise ValueError(
            f"--lora_path {path} holds LoRA factors alone; name their base in --model_name_or_path"
        )
    if adapter is not None:
        raise ValueError(
            f"--model_name_or_path {base} has an adapter of its own; --lora_path {path} goes on a "
            "base without one"
        )
    if not Path(path).expanduser().is_file():
        raise ValueError(f"--lora_path {path} is no file; give a .safetensors, .pt or .bin")
