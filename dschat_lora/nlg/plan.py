"""What a training on data and texts is to do, settled before anything heavy is imported."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from dschat_lora.algos.schedules import constant, cosine, cycle, linear
from dschat_lora.config import LoraConfig
from dschat_lora.models.source import ModelSource
from dschat_lora.nlg.config import NlgConfig, NlgOptimConfig
from dschat_lora.preflight import StageRules, check_supervised, model_fields
from dschat_lora.resume import read_state

_TARGETS = {"target_modules", "lora_module_name"}
# What has a say in the rate, but for a cycle.
_RATES = ("lora_learning_rate", "lora_lr_multiplier", "num_warmup_steps")


def complete(config: NlgConfig, source: ModelSource) -> NlgConfig:
    """The config with the layers to adapt: query and value, unless an option says otherwise.

    Raises:
        ValueError: if options contradict each other, or the run that is gone on with.
    """
    if config.optim.lr_scheduler_type == "cycle":
        _check_cycle(config)
    in_optimizer_steps(config)
    _check_micro_steps(config)
    lora = config.lora
    if source.adapter is None and lora.lora_dim > 0:
        model_type = str(model_fields(source).get("model_type", "gpt2"))
        lora = query_and_value(lora, model_type, config.given)
    return replace(config, lora=lora)


check_training = partial(check_supervised, rules=StageRules("nlg", complete=complete))


def query_and_value(lora: LoraConfig, model_type: str, given: frozenset[str]) -> LoraConfig:
    """Factors for the projections of queries and values, packed in GPT-2 with those of keys.

    What is ``given`` stays.
    """
    if not _TARGETS & given:
        packed = model_type == "gpt2" or "enable_lora" in given
        lora = replace(lora, target_modules=("c_attn",) if packed else ("q_proj", "v_proj"))
    if "enable_lora" not in given and lora.target_modules == ("c_attn",):
        lora = replace(lora, enable_lora=("q", "v"))
    return lora


def _check_cycle(config: NlgConfig) -> None:
    optim = config.optim
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


def _check_micro_steps(config: NlgConfig) -> None:
    """Refuse to go on at another accumulation with a schedule that counts micro-batches."""
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
    """The config with the run's length, if options tell it, in optimizer steps.

    Raises:
        ValueError: if it is less than one.
    """
    optim = config.optim
    steps = optim.turns[0][-1] if optim.lr_scheduler_type == "cycle" else optim.max_steps
    micro = _micro_steps(config)
    if 0 < steps < micro:
        raise ValueError(
            f"--scheduler_counts_micro_steps: {steps} micro-steps make no optimizer step of "
            f"--gradient_accumulation_steps {micro}"
        )
    return replace(config, optim=replace(optim, max_steps=steps // micro))


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
