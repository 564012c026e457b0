"""Fast kernels for decoding: linear layers with adapters, and attention on a CPU."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from dschat_lora.lora.layers import LoraLinear, active_bias, is_conv1d
from dschat_lora.lora.parallel import ParallelLinear, RowParallel, Split

Forward = Callable[[Tensor], Tensor]
Reader = Callable[[Tensor], Tensor]  # (..., in) x -> (tokens, size) product with a matrix
_READ_ONE_INPUT = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
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

    Adapters are cast once, and added in the accumulator of their last product. On a GPU those of
    layers that read one input (q, k and v) share the product with it; on a CPU, float32 weights
    are copied into the layout of oneDNN. No parameter is touched. Weights must be whole, not
    sharded, and keep their values, but for those of adapters, which :meth:`in_use` reads again.

    Args:
        model: with or without adapters.
        share_inputs: whether layers that read one input share products; by default on a GPU.
        merged: add adapters to copies of the weights that they adapt, which are rounded anew.
    """

    def __init__(
        self, model: nn.Module, *, share_inputs: bool | None = None, merged: bool = False
    ) -> None:
        self._merges = merged
        self._copies: list[Tensor] = []
        self._sources: list[Callable[[], Tensor]] = []  # of what each is a copy
        self._readers: dict[nn.Module, Reader] = {}
        for layers in _siblings(model):
            if share_inputs or (share_inputs is None and layers[0].weight.is_cuda):
                self._share(layers)
        pairs = [
            (module, self._forward_of(module))
            for module in model.modules()
            if "forward" not in vars(module)
        ]
        self._forwards = [(module, forward) for module, forward in pairs if forward is not None]

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Within, the layers compute so, with the values that adapters have now."""
        for copy, source in zip(self._copies, self._sources, strict=True):
            copy.copy_(source())  # one by one: merged weights in fp32 take memory
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
        if module.enabled and self._merges:
            return self._merged(module, bias)
        product = _linear(weight, _inner_bias(module, bias))
        if module.enabled:
            lora_b = self._cast(lambda: module.factors()[1], weight.dtype)
            reader = self._readers.get(module)
            if reader is None:
                reader = _reader(self._cast(lambda: module.factors()[0], weight.dtype))
            product = _adapted(product, reader, lora_b.T, module.scaling)
        return _around(module, product, bias)

    def _share(self, layers: Sequence[LoraLinear]) -> None:
        """Have these layers read their input by one product with all their A."""
        matrices = [partial(_merged_weight if self._merges else _down, each) for each in layers]
        sizes = [layer.out_features if self._merges else len(_down(layer)) for layer in layers]
        stack = layers[0].weight.new_empty(sum(sizes), layers[0].in_features)
        shared = _SharedInput(stack, sizes, self._shared_bias(layers, sizes))
        self._copies += torch.split(stack, sizes)
        self._sources += matrices
        for number, layer in enumerate(layers):
            self._readers[layer] = partial(shared.read, number)

    def _shared_bias(self, layers: Sequence[LoraLinear], sizes: list[int]) -> Tensor | None:
        """The biases of merged layers one after another; None where there are none."""
        found = [layer for layer in layers if active_bias(layer) is not None]
        if not self._merges or not found:
            return None
        stack = layers[0].weight.new_zeros(sum(sizes))
        for layer, part in zip(layers, torch.split(stack, sizes), strict=True):
            if layer in found:
                self._copies.append(part)
                self._sources.append(partial(_bias, layer))
        return stack

    def _merged(self, layer: LoraLinear, bias: Tensor | None) -> Forward:
        """The layer with its adapter in a copy of its weight."""
        reader = self._readers.get(layer)
        if reader is None:
            weight = self._cast(partial(_merged_weight, layer), layer.weight.dtype)
            return _around(layer, lambda x: F.linear(x, weight, _inner_bias(layer, bias)), bias)
        return lambda x: reader(x).reshape(*x.shape[:-1], layer.out_features)

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


def _down(layer: LoraLinear) -> Tensor:
    return layer.factors()[0]


def _merged_weight(layer: LoraLinear) -> Tensor:
    """(out, in) fp32 of the weight with its update."""
    weight = layer.weight.float() + layer.delta(layer.lora_A, layer.lora_B)
    return weight.T if layer.transposed else weight


def _bias(layer: LoraLinear) -> Tensor:
    bias = active_bias(layer)
    assert bias is not None
    return bias


class _SharedInput:
    """``x M^T`` of layers that read one input, of which the first one called computes it for all.

    Where a layer is given another tensor than the one before it, it is computed anew.
    """

    def __init__(self, stack: Tensor, sizes: list[int], bias: Tensor | None) -> None:
        self._stack, self._sizes, self._bias = stack, sizes, bias
        self._input: Tensor | None = None
        self._parts: tuple[Tensor, ...] = ()

    def read(self, number: int, x: Tensor) -> Tensor:
        """(tokens, size) of the layer with this number, for (..., in) x."""
        if x is not self._input:
            products = F.linear(x.reshape(-1, x.shape[-1]), self._stack, self._bias)
            self._input, self._parts = x, torch.split(products, self._sizes, dim=1)
        part = self._parts[number]
        if number == len(self._sizes) - 1:
            self._input, self._parts = None, ()
        return part


def _siblings(model: nn.Module) -> Iterator[list[LoraLinear]]:
    """Layers with adapters in use that as a rule read the same input."""
    for module in model.modules():
        for names in _READ_ONE_INPUT:
            layers = [child for name in names if (child := module._modules.get(name)) is not None]
            plain = [each for each in layers if isinstance(each, LoraLinear) and each.enabled]
            whole = all(getattr(each, "split", None) is None for each in plain)
            if len(plain) == len(names) and whole:
                yield plain


def _reader(down: Tensor) -> Reader:
    return lambda x: F.linear(x.reshape(-1, x.shape[-1]), down)


def _adapted(base: Forward, reader: Reader, up: Tensor, scaling: float) -> Forward:
    """``x -> base(x) + scaling * x A^T B^T``; ``reader`` gives ``x A^T``, (r, out) up is B^T."""

    def forward(x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        output = base(rows)
        output.addmm_(reader(x), up, alpha=scaling)
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
