"""Names of tensors in PEFT's files, from ours and back."""

from collections.abc import Collection
from pathlib import Path

from torch import Tensor

from dschat_lora.checkpoint.adapter_config import AdapterConfig
from dschat_lora.lora.names import EXPERT_WEIGHTS, is_ending, is_expert_weight

_PREFIX = "base_model.model."


def file_name(name: str, adapted: Collection[str]) -> str:
    """Key in the file for a name of :func:`dschat_lora.lora.model.adapter_parameters`.

    PEFT keeps the bias of ``adapted`` modules, those with LoRA factors, one level deeper. It wraps
    a module once for each of its adapted parameters, the first one inmost.
    """
    module, _, part = name.rpartition(".")
    if is_of_experts(name):
        experts, _, weight = module.rpartition(".")
        later = EXPERT_WEIGHTS[EXPERT_WEIGHTS.index(weight) + 1 :]
        depth = sum(f"{experts}.{other}" in adapted for other in later)
        return f"{_PREFIX}{experts}{'.base_layer' * depth}.{part}.weight"
    if ".trained." in name:
        return _PREFIX + name.replace(".trained.", ".", 1)
    if part in ("lora_A", "lora_B"):
        return f"{_PREFIX}{name}.weight"
    if part == "trained_bias":
        owner = f"{module}.base_layer" if module in adapted else module
        return f"{_PREFIX}{owner}.bias"
    return _PREFIX + name


def our_name(key: str, config: AdapterConfig, path: Path) -> tuple[str, bool]:
    """Our name for a key of the file, and whether it is a weight of the base.

    Raises:
        ValueError: at a name that PEFT does not give to plain LoRA.
    """
    name = key.removeprefix(_PREFIX).replace(".modules_to_save.", ".")
    module, _, part = name.rpartition(".")
    if module.endswith((".lora_A", ".lora_B")) and part == "weight":
        module, part = module.rsplit(".", 1)
    if part in ("lora_A", "lora_B"):
        module = _parameter(module, config.target_parameters) or module
    is_factor = part in ("lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B")
    if not key.startswith(_PREFIX) or ("lora_" in name and not is_factor):
        raise ValueError(f"{path}: unexpected tensor {key!r}")
    if is_factor:
        return f"{module}.{part}", False
    if ".original_module." in name:
        return name.replace(".original_module.", "."), True
    saved = _saved_parent(module, config.modules_to_save)
    if saved is not None:
        return f"{saved}.trained.{name.removeprefix(f'{saved}.')}", False
    module = module.removesuffix(".base_layer")
    if part == "bias" and config.bias != "none":
        return f"{module}.trained_bias", False
    return f"{module}.{part}", True


def is_of_experts(name: str) -> bool:
    """Whether a parameter of ours is a factor of experts."""
    module, _, part = name.rpartition(".")
    return part in ("lora_A", "lora_B") and is_expert_weight(module)


def flat_factor(name: str, tensor: Tensor) -> Tensor:
    """A factor as PEFT's files have it: of experts (E, r, in) as (E r, in), (E, out, r) as
    (out, r E); any other as it is.
    """
    if not is_of_experts(name):
        return tensor
    if name.endswith("A"):
        return tensor.flatten(0, 1)
    return tensor.permute(1, 2, 0).flatten(1)


def factor_of_experts(name: str, tensor: Tensor, rank: int, path: Path) -> Tensor:
    """What :func:`flat_factor` made ``tensor`` of.

    Raises:
        ValueError: if it is no multiple of the rank.
    """
    count, rest = divmod(tensor.shape[0 if name.endswith("A") else 1], rank)
    if rest or not count:
        raise ValueError(
            f"{path}: {name} is {tuple(tensor.shape)}, no whole number of experts of rank {rank}"
        )
    if name.endswith("A"):
        return tensor.view(count, rank, -1)
    return tensor.view(-1, rank, count).permute(2, 0, 1).contiguous()


def _parameter(module: str, targets: Collection[str]) -> str | None:
    """The adapted weight of experts that PEFT's wrapped ``module`` has factors for, if any."""
    owner, depth = module, 0
    while owner.endswith(".base_layer"):
        owner, depth = owner.removesuffix(".base_layer"), depth + 1
    if not is_ending(owner, "experts"):
        return None
    names = [f"{owner}.{weight}" for weight in EXPERT_WEIGHTS]
    found = [name for name in names if any(is_ending(name, target) for target in targets)]
    return found[-1 - depth] if depth < len(found) else None


def _saved_parent(module: str, endings: tuple[str, ...]) -> str | None:
    """The outermost module on the path ``module`` that PEFT's ``modules_to_save`` names."""
    parts = module.split(".")
    paths = (".".join(parts[: length + 1]) for length in range(len(parts)))
    return next((path for path in paths if path.endswith(endings)), None)
