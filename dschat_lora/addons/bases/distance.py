"""How far apart a model is on the base that its adapter was trained on, and on another one."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from dschat_lora.checkpoint.export import probe_logits
from dschat_lora.engine.distributed import device
from dschat_lora.lora.experts import expert_holders, fused_experts
from dschat_lora.lora.layers import LoraLinear, is_transposed, values_of
from dschat_lora.lora.merge import merge_deviation
from dschat_lora.lora.names import is_inside
from dschat_lora.lora.nf4 import NF4Linear, quantize
from dschat_lora.lora.targets import is_plain_linear, router_names
from dschat_lora.models.source import ModelSource
from dschat_lora.models.stored_weights import StoredWeights
from dschat_lora.runtime.merge import probe_ids

PROBE = 48  # tokens
# A weight in its own layout: of its name, what the model holds, and whether that is (in, out).
Weights = Callable[[str, Tensor, bool], Tensor]


def distance(model: PreTrainedModel, source: ModelSource, tokenizer: Tokenizer, bits: int) -> float:
    """KL from the model on the adapter's own base to the model as it is, in nats per token."""
    ids = probe_ids(tokenizer, getattr(model.config, "max_position_embeddings", None), PROBE)
    weights: Weights = _rounded
    if bits != 16:
        stored = StoredWeights(model, source.base)
        weights = lambda name, *_: stored.read(name).to(model.dtype)  # noqa: E731
    training = model.training
    model.eval()
    try:
        here = probe_logits(model, ids)
        with _other_weights(model, weights):
            there = probe_logits(model, ids)
    finally:
        model.train(training)
    mask = torch.ones(here.shape[:-1], dtype=torch.bool)
    return merge_deviation(there, here, mask).kl_nats_per_token


def _rounded(name: str, weight: Tensor, transposed: bool) -> Tensor:
    """A weight as NF4 would hold it."""
    weight = weight.detach()
    return values_of(quantize(weight, dtype=weight.dtype, transposed=transposed, worker=device()))


@contextmanager
def _other_weights(model: nn.Module, weights: Weights) -> Iterator[None]:
    """Within, layers of the blocks compute with other weights, one of which is there at a time.

    Of a mixture of experts all are there whose layer runs.
    """
    blocks = [name for name, module in model.named_modules() if isinstance(module, nn.ModuleList)]
    routers = router_names(model)
    layers = {
        name: module
        for name, module in model.named_modules()
        if is_inside(name, blocks, strictly=True)
        and name not in routers
        and (isinstance(module, NF4Linear | LoraLinear) or is_plain_linear(module))
    }
    experts = [hook for each in fused_experts(model) for hook in _hooked(*each, weights)]
    try:
        for name, layer in layers.items():
            layer.forward = partial(_forward_with, weights, name, layer, layer.forward)
        yield
    finally:
        for layer in layers.values():
            del layer.forward
        for hook in experts:
            hook.remove()


def _hooked(name: str, module: nn.Module, weights: Weights) -> list[RemovableHandle]:
    """Hooks by which fused experts compute with weights from ``weights``."""
    fused = expert_holders(module)
    held: list[nn.Parameter] = []

    def put(*_: object) -> None:
        held.extend(holder.get_parameter(own) for holder, own in fused.values())
        for (own_name, (holder, own)), weight in zip(fused.items(), held, strict=True):
            values = weights(f"{name}.{own_name}", weight, False)
            holder._parameters[own] = nn.Parameter(values, requires_grad=False)

    def restore(*_: object) -> None:
        for (holder, own), weight in zip(fused.values(), held, strict=True):
            holder._parameters[own] = weight
        held.clear()

    return [module.register_forward_pre_hook(put), module.register_forward_hook(restore)]


def _forward_with(
    weights: Weights,
    name: str,
    layer: nn.Module,
    forward: Callable[[Tensor], Tensor],
    x: Tensor,
) -> Tensor:
    """The layer's output with its weight from ``weights``."""
    own = layer.get_parameter("weight")
    other = weights(f"{name}.weight", own, is_transposed(layer))
    if isinstance(layer, NF4Linear):
        matrix = other.t() if layer.transposed else other
        return F.linear(x, matrix.to(x.dtype), layer._parameters["bias"])
    layer._parameters["weight"] = nn.Parameter(other, requires_grad=False)
    try:
        return forward(x)
    finally:
        layer._parameters["weight"] = own
