"""Tensors of an adapter: names and layout in PEFT's files, and checks of rank and scaling."""

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import TypeVar

from torch import Tensor, nn

from dschat_lora.algos.tensors import check_finite
from dschat_lora.checkpoint.adapter_config import AdapterConfig
from dschat_lora.config.groups import LoraConfig
from dschat_lora.lora.groups import Groups, groups_of_parts
from dschat_lora.lora.model import lora_layers, lora_scaling
from dschat_lora.lora.names import (
    EXPERT_WEIGHTS,
    adapted_modules,
    is_ending,
    is_expert_weight,
    is_of_expert,
)
from dschat_lora.lora.targets import matching_key

NumberT = TypeVar("NumberT", int, float)


def groups_of(config: AdapterConfig) -> Groups | None:
    """How the adapter's packed layers are cut; None if its layers have one pair of factors.

    Raises:
        ValueError: if what the file says of them makes no sense.
    """
    parts = config.enable_lora
    return groups_of_parts(config.group_sizes, parts) if parts else None


def lora_settings(config: AdapterConfig, names: Iterable[str]) -> LoraConfig:
    """Rank and scale of the factors among ``names`` of parameters, of each module.

    Raises:
        ValueError: if a pattern of the adapter cannot be read.
    """
    modules = sorted(adapted_modules(names))
    has_experts = any(map(is_of_expert, modules))
    return LoraConfig(
        lora_dim=config.r,
        lora_alpha=config.lora_alpha,
        lora_dropout=config.lora_dropout,
        use_rslora=config.use_rslora,
        enable_lora=config.enable_lora,
        expert_lora_dim=config.r if has_experts else None,  # but for those that have their own
        ranks=_own(config.rank_pattern, modules, config.target_parameters),
        alphas=_own(config.alpha_pattern, modules, config.target_parameters),
    )


def _own(
    pattern: Mapping[str, NumberT], modules: Iterable[str], parameters: Collection[str]
) -> tuple[tuple[str, NumberT], ...]:
    """(module, its number) of those that the pattern says one for.

    PEFT compares it with the name of the weight where it finds a layer by one of ``parameters``.
    """
    numbers = []
    for name in modules if pattern else ():
        weight = f"{name}.weight"
        found_by = (not is_expert_weight(name) and is_ending(weight, e) for e in parameters)
        by_weight = any(found_by)
        if (key := matching_key(pattern, weight if by_weight else name)) is not None:
            numbers.append((name, pattern[key]))
    return tuple(numbers)


def check_scaling(model: nn.Module, config: LoraConfig, *, where: str) -> None:
    """Refuse factors trained with ``config``, whose scaling differs from that of the layers.

    Raises:
        ValueError: naming ``where`` and the first layer that differs.
    """
    for name, layer in lora_layers(model).items():
        own = config.of_module(name)
        scaling = lora_scaling(own)
        if layer.scaling != scaling:
            raise ValueError(
                f"{where} was trained with scaling {scaling:g} (lora_alpha {own.lora_alpha:g}, "
                f"r {own.lora_dim}, use_rslora {own.use_rslora}); {name} has "
                f"{layer.scaling:g}"
            )


def check_tensors(
    tensors: Mapping[str, Tensor], config: LoraConfig, *, where: str, groups: Groups | None = None
) -> None:
    """Refuse factors that lack their partner, are of another rank, or are not finite.

    ``tensors`` are by the names of :func:`adapter_parameters`; A has as many rows as ``config``
    says of its module, for each enabled part of packed layers, B as many columns.

    Raises:
        ValueError: naming ``where``, the directory or file, and the tensor.
    """
    if not any(".lora_" in name for name in tensors):
        raise ValueError(f"{where} holds no LoRA factor")
    for name, tensor in tensors.items():
        stem, factor = name[:-1], name[-1]
        if ".lora_" in name:
            partner = stem + ("B" if factor == "A" else "A")
            if partner not in tensors:
                raise ValueError(f"{where}: {partner} is missing beside {name}")
            r = config.of_module(name.rpartition(".")[0]).lora_dim
            rank = r * groups.count if groups is not None and factor == "A" else r
            wanted = f"({rank}, n)" if factor == "A" else f"(n, {rank})"
            rank_axis = -2 if factor == "A" else -1
            if tensor.ndim not in (2, 3) or tensor.shape[rank_axis] != rank or tensor.numel() == 0:
                raise ValueError(
                    f"{where}: {name} must be {wanted} for rank {r}, got {tuple(tensor.shape)}"
                )
        check_finite(tensor, f"{where}: {name}")


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
    words = module.split(".")
    paths = (".".join(words[: length + 1]) for length in range(len(words)))
    saved = next((path for path in paths if path.endswith(config.modules_to_save)), None)
    if saved is not None:  # the outermost module that modules_to_save names
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
    adapted = [name for name in names if any(is_ending(name, target) for target in targets)]
    return adapted[-1 - depth] if depth < len(adapted) else None
