"""Checks of LoRA factors: shapes, rank, scaling and parts of packed layers."""

from collections.abc import Collection, Iterable, Mapping
from typing import TypeVar

from torch import Tensor, nn

from dschat_lora.algos.tensors import check_finite
from dschat_lora.checkpoint.adapter_config import AdapterConfig
from dschat_lora.config.groups import LoraConfig
from dschat_lora.lora.groups import Groups, groups_of_parts
from dschat_lora.lora.model import lora_layers, lora_scaling
from dschat_lora.lora.names import adapted_modules, is_ending, is_expert_weight, is_of_expert
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
    found = []
    for name in modules if pattern else ():
        weight = f"{name}.weight"
        found_by = (not is_expert_weight(name) and is_ending(weight, e) for e in parameters)
        by_weight = any(found_by)
        if (key := matching_key(pattern, weight if by_weight else name)) is not None:
            found.append((name, pattern[key]))
    return tuple(found)


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
