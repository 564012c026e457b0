"""Checks of LoRA factors: shapes, rank, scaling and parts of packed layers."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from dschat_lora.checkpoint.adapter_config import AdapterConfig
from dschat_lora.config.groups import LoraConfig
from dschat_lora.lora.groups import Groups, groups_of_parts
from dschat_lora.lora.model import lora_layers, lora_scaling


def groups_of(config: AdapterConfig) -> Groups | None:
    """How the adapter's packed layers are cut; None if its layers have one pair of factors.

    Raises:
        ValueError: if what the file says of them makes no sense.
    """
    parts = config.enable_lora
    return groups_of_parts(config.group_sizes, parts) if parts else None


def check_scaling(model: nn.Module, config: LoraConfig, *, where: str) -> None:
    """Refuse factors trained with ``config``, whose scaling differs from that of the layers.

    Raises:
        ValueError: naming ``where`` and the first layer that differs.
    """
    scaling = lora_scaling(config)
    for name, layer in lora_layers(model).items():
        if layer.scaling != scaling:
            raise ValueError(
                f"{where} was trained with scaling {scaling:g} (lora_alpha {config.lora_alpha:g}, "
                f"r {config.lora_dim}, use_rslora {config.use_rslora}); {name} has "
                f"{layer.scaling:g}"
            )


def check_tensors(
    tensors: Mapping[str, Tensor], r: int, *, where: str, groups: Groups | None = None
) -> None:
    """Refuse factors that lack their partner, are not of rank ``r``, or are not finite.

    ``tensors`` are by the names of :func:`adapter_parameters`; A has ``r`` rows, for each enabled
    part of packed layers, B as many columns.

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
            rank = r * groups.count if groups is not None and factor == "A" else r
            wanted = f"({rank}, n)" if factor == "A" else f"(n, {rank})"
            rank_axis = 0 if factor == "A" else 1
            if tensor.ndim != 2 or tensor.shape[rank_axis] != rank or tensor.numel() == 0:
                raise ValueError(
                    f"{where}: {name} must be {wanted} for rank {r}, got {tuple(tensor.shape)}"
                )
        if not torch.isfinite(tensor).all():
            raise ValueError(f"{where}: {name} holds values that are not finite")
