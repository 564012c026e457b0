"""Fast kernels for decoding: linear layers with adapters, and attention on a CPU."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from dschat_lora.lora.layers import LoraLinear, is_conv1d
from dschat_lora.lora.parallel import ParallelLinear, RowParallel, Split

Forward = Callable[[Tensor], Tensor]
# Below so many products of a CPU layer, the call of oneDNN takes longer than the computation.
MIN_PACKED_PRODUCTS = 2**20
MAX_PRODUCT_TOKENS = 64  # for more, the fused kernel of attention is better
_ATTENTION = "dschat_lora_decode"
# Options of attention layers without effect where a mask is given, out of training.
_WITHOUT_EFFECT = {"dropout", "is_causal", "position_ids", "sliding_window", "use_cache"}


@contextmanager
def fast_linears(model: nn.Module) -> Iterator[None]:
    """Within, linear layers and their adapters compute as :class:`FastLinears` does."""
    with FastLinears(model).in_use():
        yield


class FastLinears:
    """Forwards of linear layers and unmerged adapters that take fewer operations.

    Adapters are cast once, and added in the accumulator of their last product. On a CPU,
    float32 weights are copied into the layout of oneDNN. No parameter is touched. Weights must be
    whole, not sharded, and keep their values, but for those of adapters, which :meth:`in_use`
    reads again.
    """

    def __init__(self, model: nn.Module) -> None:
        self._copies: list[Tensor] = []
        self._sources: list[Callable[[], Tensor]] = []  # of what each is a copy
        pairs = [
            (module, self._forward_of(module))
            for module in model.modules()
            if "forward" not in vars(module)
        ]
        self._forwards = [(module, forward) for module, forward in pairs if forward is not None]

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Within, the layers compute so, with the values that adapters have now."""
        if self._copies:
            torch._foreach_copy_(self._copies, [source() for source in self._sources])
        try:
            for module, forward in self._forwards:
                module.forward = forward
            yield
        finally:
            for module, _ in self._forwards:
                del module.forward

    def _forward_of(self, module: nn.Module) -> Forward | None:
        """A faster forward of ``module``; None where it is no linear layer of a known kind."""
        if type(module) is nn.Linear:
            return _linear(module.weight, module.bias)
        if isinstance(module, ParallelLinear):
            weight = module.weight.T if module.transposed else module.weight
            return _around(module, _linear(weight, _inner_bias(module, module.bias)), module.bias)
        if is_conv1d(module):
            return _linear(module.get_parameter("weight").T, module._parameters.get("bias"))
        if not isinstance(module, LoraLinear):
            return None
        weight = module.weight.T if module.transposed else module.weight
        bias: Tensor | None = module.bias
        if module.enabled and module.trained_bias is not None:
            bias = self._cast(lambda: module.trained_bias, weight.dtype)
        product = _linear(weight, _inner_bias(module, bias))
        if module.enabled:
            lora_a = self._cast(lambda: module.factors()[0], weight.dtype)
            lora_b = self._cast(lambda: module.factors()[1], weight.dtype)
            product = _adapted(product, lora_a, lora_b.T, module.scaling)
        return _around(module, product, bias)

    def _cast(self, source: Callable[[], Any], dtype: torch.dtype) -> Tensor:
        """A parameter of this type as it is; of what else it is, a copy that is refreshed."""
        tensor: Tensor = source()
        if isinstance(tensor, nn.Parameter) and tensor.dtype == dtype:
            return tensor
        self._copies.append(torch.empty_like(tensor, dtype=dtype))
        self._sources.append(source)
        return self._copies[-1]


def _inner_bias(module: nn.Module, bias: Tensor | None) -> Tensor | None:
    """What is added in the product itself; a divided row layer adds its bias to the sum."""
    return None if isinstance(getattr(module, "split", None), RowParallel) else bias


def _around(module: nn.Module, product: Forward, bias: Tensor | None) -> Forward:
    """The layer, given its product with what this rank holds."""
    split: Split | None = getattr(module, "split", None)
    if split is None:
        return product
    return lambda x: split.around(x, lambda own, _: product(own), bias)


def _linear(weight: Tensor, bias: Tensor | None) -> Forward:
    """``x -> x W^T + b`` of (out, in) W."""
    if not _packs(weight):
        return lambda x: F.linear(x, weight, bias)
    packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), None)
    fewest = MIN_PACKED_PRODUCTS / len(weight)

    def forward(x: Tensor) -> Tensor:
        if x.numel() < fewest:
            return F.linear(x, weight, bias)
        output: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
        return output

    return forward


def _adapted(base: Forward, down: Tensor, up: Tensor, scaling: float) -> Forward:
    """``x -> base(x) + scaling * x A^T B^T`` of (r, in) A and (r, out) B^T."""

    def forward(x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        output = base(rows)
        output.addmm_(F.linear(rows, down), up, alpha=scaling)
        return output.view(*x.shape[:-1], output.shape[-1])

    return forward


def _packs(weight: Tensor) -> bool:
    """Whether oneDNN has a packed layout for this weight."""
    known = hasattr(torch.ops.mkldnn, "_linear_pointwise")
    usable = known and bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]
    return usable and weight.device.type == "cpu" and weight.dtype == torch.float32


@contextmanager
def fast_attention(model: PreTrainedModel) -> Iterator[None]:
    """Within, layers that use "sdpa" on a CPU attend from few tokens by plain products.

    The fused kernel is made for many; on a CPU it took two to ten times as long for one.
    Masks must be given whole: transformers makes none for attention it does not know.
    """
    config = model.config
    if config._attn_implementation != "sdpa" or model.device.type != "cpu":
        yield
        return
    AttentionInterface.register(_ATTENTION, attend_by_products)
    try:
        config._attn_implementation = _ATTENTION
        yield
    finally:
        config._attn_implementation = "sdpa"


def attend_by_products(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    **options: object,
) -> tuple[Tensor, None]:
    """Attention as transformers' "sdpa", to which it falls back for many tokens.

    Of (B, heads, T, D) queries, and (B, key heads, columns, D) keys and values, where heads are a
    multiple of key heads, under a (B, 1, T, columns) additive mask.

    Returns:
        (B, T, heads, D), and None for weights.
    """
    rows, heads, tokens, size = query.shape
    unknown = bool(options.keys() - _WITHOUT_EFFECT)
    if unknown or scaling is None or attention_mask is None or tokens > MAX_PRODUCT_TOKENS:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **options
        )
    if scaling != 1:
        query = query * scaling
    # Heads that share a key (grouped-query attention) are rows of one product.
    grouped = query.reshape(rows, key.shape[1], -1, size)
    scores = torch.matmul(grouped, key.transpose(2, 3)).view(rows, heads, tokens, -1)
    scores += attention_mask
    weights = scores.softmax(-1).view(*grouped.shape[:3], -1)
    return torch.matmul(weights, value).view(rows, heads, tokens, -1).transpose(1, 2), None
