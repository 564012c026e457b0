"""Learning rates of adapters, and the optimizer's parameter groups."""

from collections.abc import Iterable
from typing import Any

from torch import nn

from dschat_lora.config.groups import LoraConfig, OptimConfig
from dschat_lora.lora.layers import full_shape
from dschat_lora.lora.model import adapter_parameters
from dschat_lora.lora.names import is_of_expert

# The upper end of what published recipes use to train every weight of a language model.
FULL_FINE_TUNING_RATE = 5e-5
# "LoRA Without Regret" (Thinking Machines, 2025, thinkingmachines.ai/blog/lora): the best rate of
# adapters is about 10 times that of all weights, in runs of about 100 steps up to 15 times, alike
# for supervised and reinforcement learning, with alpha 32 as here.
BEST_MULTIPLIER, MAX_MULTIPLIER = 10.0, 15.0


def suggested_lora_rate(full_rate: float, multiplier: float = BEST_MULTIPLIER) -> float:
    """A learning rate for adapters: ``multiplier`` times a good one for training every weight.

    Adapters want a larger rate than full fine-tuning of the same model, since only a low-rank
    change with B = 0 at the start is trained. DeepSpeed-Chat's users were told to start at 2 to 3
    times the full rate; measured since, about 10 times is best.
    """
    return full_rate * multiplier


def adapter_learning_rate(optim: OptimConfig) -> float:
    """Peak rate of the adapters: the one given, a multiple of the base's, or the default."""
    if optim.lora_learning_rate is not None:
        return optim.lora_learning_rate
    if optim.lora_lr_multiplier is not None:
        return suggested_lora_rate(optim.learning_rate, optim.lora_lr_multiplier)
    default = optim.default_lora_learning_rate
    return optim.learning_rate if default is None else default


def rate_warning(optim: OptimConfig, lora: LoraConfig) -> str | None:
    """What is doubtful about the adapters' rate, or None.

    Full fine-tuning is taken to use ``--learning_rate``, at most 5e-5. Below twice that,
    adapters learn too little; above 15 times, by multiplier, none was found to do better.
    """
    if lora.lora_dim == 0:
        return None
    rate, full = adapter_learning_rate(optim), min(optim.learning_rate, FULL_FINE_TUNING_RATE)
    if rate < 2 * full:
        return (
            f"adapters train at {rate:g}, a rate of full fine-tuning; about 10 times as much is "
            f"best as a rule: try --lora_learning_rate {suggested_lora_rate(full):g}"
        )
    multiplier = optim.lora_lr_multiplier
    if multiplier is not None and multiplier > MAX_MULTIPLIER:
        return (
            f"--lora_lr_multiplier {multiplier:g} is above {MAX_MULTIPLIER:g}, the most that was "
            "found to help, in runs of about 100 steps; start at 10"
        )
    return None


def parameter_groups(model: nn.Module, optim: OptimConfig) -> list[dict[str, Any]]:
    """The trained parameters of ``model`` in groups of one rate and one weight decay.

    Vectors (biases and the weights of every norm) do not decay; matrices, adapters' too, do.
    With ``--loraplus_lr_ratio`` (LoRA+, arXiv:2402.12354) ``lora_B`` has its own group; the
    factors of embeddings, whose A starts at zero instead of B, keep the adapters' rate, as do
    trained biases and saved modules. Experts of a mixture have groups of their own where
    ``--expert_learning_rate`` gives them another rate.

    Returns:
        Dicts with ``name`` ("base", "base_no_decay", "lora", "lora_B", "experts", "experts_B",
        "lora_no_decay"), ``params``, ``lr`` and ``weight_decay``; no group is empty.

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
            f"--expert_learning_rate {expert_rate:g} is for experts, and the adapter has factors "
            "of none; drop the option"
        )
    layers, expert_rate = (own & matrices) - experts, expert_rate or rate
    decay = optim.weight_decay
    groups = [
        group("base", base & matrices, optim.learning_rate, decay),
        group("base_no_decay", base - matrices, optim.learning_rate, 0.0),
        group("lora", layers - fast, rate, decay),
        group("lora_B", layers & fast, rate * ratio, decay),
        group("experts", experts - fast, expert_rate, decay),
        group("experts_B", experts & fast, expert_rate * ratio, decay),
        group("lora_no_decay", own - matrices, rate, 0.0),
    ]
    return [each for each in groups if each["params"]]
