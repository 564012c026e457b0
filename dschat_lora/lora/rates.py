"""Learning rates of adapters, rules for them, and the optimizer's parameter groups."""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from torch import nn

from dschat_lora.config.groups import LoraConfig, OptimConfig, ScheduleConfig
from dschat_lora.config.plurals import counted
from dschat_lora.config.roles import Role
from dschat_lora.lora.layers import full_shape
from dschat_lora.lora.model import adapter_parameters
from dschat_lora.lora.names import is_inside, is_of_expert

# The upper end of what published recipes use to train every weight of a language model.
FULL_FINE_TUNING_RATE = 5e-5
# "LoRA Without Regret" (Thinking Machines, 2025, thinkingmachines.ai/blog/lora): the best rate of
# adapters is about 10 times that of all weights, in runs of about 100 steps up to 15 times, alike
# for supervised and reinforcement learning, with alpha 32 as here: a low-rank change with B = 0
# at the start is all that trains. DeepSpeed-Chat's users were told 2 to 3 times.
BEST_MULTIPLIER, MAX_MULTIPLIER = 10.0, 15.0

# By how much the best rate falls with the width, relative to 2,000: fitted by Thinking Machines to
# models of two families, and shipped in tinker-cookbook until its version of 2026. Elsewhere the
# square root stands between them.
RULE_WIDTH, RULE_ALPHA = 2000, 32.0
WIDTH_EXPONENTS: Mapping[str, float] = {"llama": 0.781, "qwen": 0.0775}
OTHER_EXPONENT = 0.5
# Relative to SFT: what tinker-cookbook's recipes use, by the rule's rate for their models. RL 4e-5
# on Llama-3.1-8B, DPO 1e-5 on Llama-3.2-1B.
STAGE_FACTORS: Mapping[str, float] = {"rlhf": 0.14, "dpo": 0.02}
# Samples of a step from which on a larger batch is known to cost adapters more than all weights.
# TRL's page on the same paper advises less than 32; tinker-cookbook's sweeps have 128.
MOST_SAMPLES = 128
# An adapter is taken to hold 2 bits a parameter, and a token of an answer to bring 1.
BITS_PER_PARAMETER, BITS_PER_TOKEN = 2.0, 1.0


class RuledRates(NamedTuple):
    """Peak rates by published rules."""

    base: float  # where every weight trains
    adapter: float
    reason: str


def ruled_rates(
    model_type: str, width: int, *, stage: str, lora: LoraConfig, factor: float | None = None
) -> RuledRates:
    """Rates for a model of ``width`` hidden units, by its type, its ``stage`` and its adapter.

    Full fine-tuning: ``5e-5 (2000 / width)^p``, with p of the family; adapters 10 times as much,
    whatever their rank at the scale 32 / rank ("LoRA Without Regret"), and inversely to the scale:
    in Adam's first steps the update is the rate times the scale. Other stages than SFT and reward
    models have a ``factor`` of their own.
    """
    family = next((name for name in WIDTH_EXPONENTS if name in model_type), None)
    exponent = WIDTH_EXPONENTS.get(family or "", OTHER_EXPONENT)
    factor = STAGE_FACTORS.get(stage, 1.0) if factor is None else factor
    base = FULL_FINE_TUNING_RATE * (RULE_WIDTH / width) ** exponent * factor
    words = f"5e-05 x (2000 / {width})^{exponent:g}, the exponent of {family or 'other families'}"
    words += f", x {factor:g} for {stage}" if factor != 1 else ""
    if lora.lora_dim == 0:
        return RuledRates(base, base, words)
    stretch = RULE_ALPHA / lora.lora_alpha
    if lora.use_rslora:
        stretch /= lora.lora_dim**0.5
    words += f", x {BEST_MULTIPLIER:g} for LoRA"
    words += f", x {stretch:.3g} for its scale" if stretch != 1 else ""
    return RuledRates(base, base * BEST_MULTIPLIER * stretch, words)


def length_warning(config: ScheduleConfig, num_steps: int) -> str | None:
    """A warning where a run ends before its warm-up, or None."""
    warmup = config.num_warmup_steps
    if not 0 < num_steps <= warmup or config.lr_scheduler_type == "constant":
        return None
    return (
        f"the run has {counted(num_steps, 'optimizer step')} and --num_warmup_steps {warmup}: the "
        f"rate never reaches its peak; warm up for {num_steps // 10} steps, or train longer"
    )


def capacity_warnings(
    lora: LoraConfig, *, samples_per_step: float, parameters: int, tokens: int, width: int
) -> list[str]:
    """Warnings of what adapters bear less well than all weights, by "LoRA Without Regret".

    Of the samples of a step a packed row is one, as it is as long as one. ``parameters`` are those
    that train, ``tokens`` the supervised ones of the data; a rank as large as the ``width`` of the
    hidden states is no low one.
    """
    if lora.lora_dim == 0:
        return []
    warnings = []
    if samples_per_step > MOST_SAMPLES:
        warnings.append(
            f"a step has about {samples_per_step:,.0f} samples, a packed row counted as one: with "
            f"batches above {MOST_SAMPLES} adapters lose more than full fine-tuning at any rank; "
            "lower --gradient_accumulation_steps or --per_device_train_batch_size"
        )
    held, brought = BITS_PER_PARAMETER * parameters, BITS_PER_TOKEN * tokens
    if brought > held:
        rank = int(-(-lora.lora_dim * brought // held))
        remedy = f"try --lora_dim {rank}, or train" if rank < width else "train"
        warnings.append(
            f"an adapter of {parameters:,} parameters holds about {held:,.0f} bits, and the "
            f"data's {tokens:,} supervised tokens bring about {brought:,.0f}: at some point it "
            f"will learn more slowly than full fine-tuning; {remedy} all weights"
        )
    return warnings


def octaves_above(rate: float, octaves: int) -> float:
    """``rate`` doubled so many times, in three digits that can be typed; halved below 0."""
    return float(f"{rate * 2.0**octaves:.3g}")


def base_rate(optim: OptimConfig) -> float:
    """Peak rate of base weights: the one given or, with ``auto``, that of the rules."""
    if optim.learning_rate == "auto":
        assert optim.ruled is not None, "the rules need the model"
        return optim.ruled[0]
    return optim.learning_rate


def adapter_learning_rate(optim: OptimConfig) -> float:
    """Peak rate of the adapters: the one given, a multiple of the base's, by rule or default."""
    if optim.lora_learning_rate is not None:
        return optim.lora_learning_rate
    if optim.lora_lr_multiplier is not None:
        return base_rate(optim) * optim.lora_lr_multiplier
    if optim.learning_rate == "auto" and optim.ruled is not None:
        return optim.ruled[1]
    default = optim.default_lora_learning_rate
    return base_rate(optim) if default is None else default


def adapter_rates(roles: Iterable[Role]) -> dict[str, float]:
    """Peak rates of adapters by their options, but for multiples of other rates."""
    return {
        f"{role.prefix}lora_learning_rate": adapter_learning_rate(role.optim)
        for role in roles
        if role.lora.lora_dim and role.optim.lora_lr_multiplier is None
    }


def rate_warning(optim: OptimConfig, lora: LoraConfig) -> str | None:
    """What is doubtful about the adapters' rate, or None.

    Full fine-tuning is taken to use ``--learning_rate``, at most a tenth of the default rate of
    adapters. Below twice that they learn too little; above 15 times, by multiplier, none was
    found to do better.
    """
    by_rule = optim.learning_rate == "auto" and optim.lora_learning_rate is None
    if lora.lora_dim == 0 or (by_rule and optim.lora_lr_multiplier is None):
        return None
    default = optim.default_lora_learning_rate
    most = FULL_FINE_TUNING_RATE if default is None else default / BEST_MULTIPLIER
    rate, full = adapter_learning_rate(optim), min(base_rate(optim), most)
    if rate < 2 * full:
        return (
            f"adapters train at {rate:g}, a learning rate of full fine-tuning; about 10 times "
            f"that is usually best: try --lora_learning_rate {full * BEST_MULTIPLIER:g}"
        )
    multiplier = optim.lora_lr_multiplier
    if multiplier is not None and multiplier > MAX_MULTIPLIER:
        return (
            f"--lora_lr_multiplier {multiplier:g} is above {MAX_MULTIPLIER:g}, the highest that "
            "helped in measurements, in runs of about 100 steps; start at 10"
        )
    return None


def parameter_groups(model: nn.Module, optim: OptimConfig) -> list[dict[str, Any]]:
    """The trained parameters of ``model`` in groups of one rate and one weight decay.

    Vectors (biases and the weights of every norm) do not decay; matrices, adapters' too, do.
    With ``--loraplus_lr_ratio`` (LoRA+, arXiv:2402.12354) ``lora_B`` has its own group; the
    factors of embeddings, whose A starts at zero instead of B, keep the adapters' rate, as do
    trained biases and saved modules. Experts of a mixture have groups of their own where
    ``--expert_learning_rate`` gives them another rate.

    Factors beside the text model of a composite one may have a rate of their own, too.

    Returns:
        Dicts with ``name`` ("base", "base_no_decay", "lora", "lora_B", "experts", "experts_B",
        "rest", "rest_B", "lora_no_decay"), ``params``, ``lr`` and ``weight_decay``; no group is
        empty.

    Raises:
        ValueError: if there is a rate of experts, and none is adapted.
    """
    rate, ratio = adapter_learning_rate(optim), optim.loraplus_lr_ratio
    adapter = adapter_parameters(model)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    matrices = {name for name, p in trained.items() if len(full_shape(p)) > 1}
    fast = {name for name in adapter if name.endswith(".lora_B")} if ratio != 1 else set()

    def group(name: str, names: Iterable[str], lr: float, weight_decay: float) -> dict[str, Any]:
        chosen = set(names)
        params = [p for key, p in trained.items() if key in chosen]
        return {"name": name, "params": params, "lr": lr, "weight_decay": weight_decay}

    base, own = trained.keys() - adapter.keys(), trained.keys() & adapter.keys()
    expert_rate = optim.expert_learning_rate
    experts = set(filter(is_of_expert, own)) if expert_rate is not None else set()
    if expert_rate is not None and not experts:
        raise ValueError(
            f"--expert_learning_rate {expert_rate:g} is for MoE experts, but the adapter has "
            "none; drop the option"
        )
    rest_rate: float | None = getattr(model, "rest_rate", None)
    beside = getattr(model, "rest", ()) if rest_rate is not None else ()
    rest = {name for name in own & matrices if is_inside(name, beside)}
    layers = (own & matrices) - experts - rest
    parts = ("lora", layers, rate), ("experts", experts, expert_rate), ("rest", rest, rest_rate)
    decay = optim.weight_decay
    groups = [
        group("base", base & matrices, base_rate(optim), decay),
        group("base_no_decay", base - matrices, base_rate(optim), 0.0),
        *(
            group(f"{name}{ending}", chosen, (own_rate or rate) * factor, decay)
            for name, names, own_rate in parts
            for ending, chosen, factor in (("", names - fast, 1.0), ("_B", names & fast, ratio))
        ),
        group("lora_no_decay", own - matrices, rate, 0.0),
    ]
    return [each for each in groups if each["params"]]
