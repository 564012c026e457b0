"""What a training on data and texts is to do, settled before anything heavy is imported."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from dschat_lora.algos.schedules import constant, cosine, cycle, linear
from dschat_lora.config import LoraConfig
from dschat_lora.models.source import ModelSource
from dschat_lora.nlg.config import NlgConfig, NlgOptimConfig
from dschat_lora.preflight import StageRules, check_supervised, model_fields

_CHOICES = {"target_modules", "lora_module_name", "enable_lora"}


def complete(config: NlgConfig, source: ModelSource) -> NlgConfig:
    """The config with the layers to adapt: query and value, unless an option says otherwise.

    Raises:
        ValueError: if options contradict each other.
    """
    optim, lora = config.optim, config.lora
    if optim.max_steps and optim.lr_scheduler_type == "cycle":
        raise ValueError(
            f"--max_steps {optim.max_steps} and --i_steps {optim.i_steps} both say how long the "
            "run is; give one"
        )
    in_optimizer_steps(config)
    if source.adapter is None and not _CHOICES & config.given and lora.lora_dim > 0:
        lora = query_and_value(lora, str(model_fields(source).get("model_type", "gpt2")))
    return replace(config, lora=lora)


check_training = partial(check_supervised, rules=StageRules("nlg", complete=complete))


def query_and_value(lora: LoraConfig, model_type: str) -> LoraConfig:
    """Factors for the projections of queries and values, packed in GPT-2 with those of keys."""
    if model_type == "gpt2":
        return replace(lora, target_modules=("c_attn",), enable_lora=("q", "v"))
    return replace(lora, target_modules=("q_proj", "v_proj"))


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
