"""Merge an adapter into its base weights, and measure how far that moves the model."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dschat_lora.lora.layers import LoraEmbedding, full_shape, state_of
from dschat_lora.lora.model import AdapterLayer, LoraLayer, base_names
from dschat_lora.lora.trained import TrainedModule


@dataclass(frozen=True)
class MergeReport:
    """How far merged weights move the model, measured on a probe batch."""

    max_abs_logit: float  # largest difference of a logit
    kl_nats_per_token: float  # mean over tokens of KL(unmerged || merged)


@torch.no_grad()
def merged_state_dict(
    model: nn.Module, tensors: Mapping[str, Tensor] | None = None
) -> dict[str, Tensor]:
    """The pretrained model's state dict with the adapter added; ``model`` stays as it is.

    ``W + scaling * B A`` is computed in float32 and cast once to the type of W; of a quantised W
    the values are taken, so that the result is a plain model. Where ZeRO 3 holds
    the model's own values in shards, ``tensors`` holds whole ones by the names of
    ``model.state_dict()``: one name of a tied weight is enough, and what is absent is taken from
    the model.

    Returns:
        Tensors under the pretrained names. Adapted ones are new; the others are the given
        ones, detached. Where a tied weight is adapted under one name only, the names hold
        different values (see :func:`untied_by_merge`).

    Raises:
        ValueError: if a weight is sharded and ``tensors`` lacks it.
    """
    values = _whole_values(model, tensors or {})
    own, merged = model.state_dict(keep_vars=True), {}
    for original, name in base_names(model).items():
        weight, state = values[name].detach(), state_of(own[name])
        dtype = weight.dtype if state is None else state.dtype
        if state is not None:
            weight = state.values(weight, torch.float32)
        owner, layer = _adapter_of(model, name)
        part = name.removeprefix(f"{owner}.")
        if isinstance(layer, TrainedModule):
            part = part.removeprefix("base.")
            weight = values[f"{owner}.trained.{part}"].detach().to(dtype, copy=True)
        elif part == "bias" and f"{owner}.trained_bias" in values:
            weight = values[f"{owner}.trained_bias"].detach().to(dtype, copy=True)
        elif part == "weight" and isinstance(layer, LoraLayer):
            kind = "lora_embedding" if isinstance(layer, LoraEmbedding) else "lora"
            delta = layer.delta(values[f"{owner}.{kind}_A"], values[f"{owner}.{kind}_B"])
            weight = weight.float() + delta
        merged[original] = weight.to(dtype).contiguous() if state is not None else weight.to(dtype)
    return merged


def untied_by_merge(model: nn.Module) -> list[str]:
    """Pretrained names of tied weights that merging sets apart, such as an adapted head.

    Where there are any, the merged model's config must say ``tie_word_embeddings: false``.
    """
    state, names = model.state_dict(keep_vars=True), base_names(model)
    groups: dict[int, list[str]] = {}
    for original, name in names.items():
        groups.setdefault(id(state[name]), []).append(original)

    def has_own_weight(original: str) -> bool:
        return isinstance(_adapter_of(model, names[original])[1], LoraLayer | TrainedModule)

    tied = [group for group in groups.values() if len(group) > 1]
    return [name for group in tied if any(map(has_own_weight, group)) for name in group]


def check_mergeable(model: nn.Module) -> None:
    """Refuse to merge where blocks share a weight, and each has an adapter of its own for it.

    Of shared weights transformers loads one, but for those of embeddings and head.

    Raises:
        ValueError: naming the first such weight.
    """
    ends = ("get_input_embeddings", "get_output_embeddings")
    modules = [getattr(model, name)() for name in ends if hasattr(model, name)]
    embeddings = {id(each) for m in modules if m is not None for each in m.parameters()}
    state, names = model.state_dict(keep_vars=True), base_names(model)
    for name in untied_by_merge(model):
        if id(state[names[name]]) not in embeddings:
            raise ValueError(
                f"this model cannot be merged: blocks share {name}, but each has its own adapter; "
                "use the adapter unmerged"
            )


def merge_deviation(logits_before: Tensor, logits_after: Tensor, mask: Tensor) -> MergeReport:
    """Differences of (B, T, V) logits before and after merging, where the (B, T) mask is True.

    Raises:
        ValueError: if the shapes differ or the mask is False everywhere.
    """
    if logits_before.shape != logits_after.shape or mask.shape != logits_before.shape[:-1]:
        raise ValueError(
            f"merge_deviation: logits {tuple(logits_before.shape)} and "
            f"{tuple(logits_after.shape)} with mask {tuple(mask.shape)}"
        )
    if not mask.any():
        raise ValueError("merge_deviation: the probe batch has no token")
    # float64: the divergence is a difference of nearly equal numbers.
    before, after = logits_before[mask].double(), logits_after[mask].double()
    p, q = before.log_softmax(-1), after.log_softmax(-1)
    kl = (p.exp() * (p - q)).sum(-1).mean()
    return MergeReport((before - after).abs().max().item(), kl.item())


def check_merge(report: MergeReport, *, max_kl: float) -> None:
    """Refuse a merge that moves the model too far.

    Raises:
        ValueError: if the divergence is above ``max_kl`` nats per token, or not a number.
    """
    if not report.kl_nats_per_token <= max_kl:
        raise ValueError(
            f"the merged weights change the output distribution by {report.kl_nats_per_token:.3g} "
            f"nats per token (largest logit difference {report.max_abs_logit:.3g}), more than "
            f"--merge_max_kl {max_kl:g}; use the adapter unmerged, or merge into an fp32 base"
        )


def _whole_values(model: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    state = model.state_dict(keep_vars=True)
    given = {id(state[name]): tensor for name, tensor in tensors.items()}
    values = {name: given.get(id(own), own) for name, own in state.items()}
    for name, own in state.items():
        shape = full_shape(own)
        if state_of(own) is not None:  # of its codes
            shape = torch.Size(getattr(own, "ds_shape", own.shape))
        if values[name].shape != shape:
            raise ValueError(f"{name} must be given whole, {tuple(shape)}, to merge")
    return values


def _adapter_of(model: nn.Module, name: str) -> tuple[str, nn.Module | None]:
    """The adapter layer that the model's tensor ``name`` lies in, with its path."""
    module, path = model, ""
    for part in name.split(".")[:-1]:
        module, path = module.get_submodule(part), f"{path}.{part}".lstrip(".")
        if isinstance(module, AdapterLayer):
            return path, module
    return path, None
