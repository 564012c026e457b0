"""Linear layers and their adapters in fewer operations, for decoding."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from random import Random
from typing import Any

import psutil
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dschat_lora.generation.decode_layers import decoding_forwards
from dschat_lora.generation.stacked_linears import ROWS_MULTIPLE, StackedLinears, stack_weights
from dschat_lora.kernels.rounding import FORMATS, round_at_random
from dschat_lora.kernels.support import runs_kernels
from dschat_lora.lora.experts import LoraExperts, expert_holders, fused_experts
from dschat_lora.lora.layers import (
    LoraLinear,
    active_bias,
    full_shape,
    is_conv1d,
    is_quantized,
    value_bytes,
    value_dtype,
    values_of,
)
from dschat_lora.lora.nf4 import NF4Linear
from dschat_lora.lora.parallel import ParallelLinear, RowParallel, Split

Forward = Callable[[Tensor], Tensor]
_READ_ONE_INPUT = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
# Below so many products of a CPU layer, the call of oneDNN takes longer than the computation.
MIN_PACKED_PRODUCTS = 2**20


class FastLinears:
    """Forwards of linear layers and unmerged adapters that take fewer operations.

    Adapters are cast once, and added in the accumulator of their last product. On a GPU, frozen
    weights are moved to where the first factors of their adapters follow them, those of layers
    that read one input (q, k and v) together: two products then make the outputs of all. On a
    CPU, float32 weights are copied into the layout of oneDNN. No value of a parameter is changed.
    Weights must be whole, not sharded, and keep their values, but for those of adapters, which
    :meth:`in_use` reads again. Quantised weights are unpacked once, into copies, or by each layer
    whenever it runs; so are those of experts.

    Args:
        model: with or without adapters.
        stacked: whether weights are moved so; by default on a GPU.
        merged: add adapters to copies of the weights that they adapt. Those in 16 bits are rounded
            by chance, or the copies would lose most of a small update.
        rounding: what that chance is a function of, beside the layer, whenever copies are made.
        unpacked: whether quantised weights are unpacked once; by default where half of the free
            memory holds them.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        stacked: bool | None = None,
        merged: bool = False,
        rounding: Callable[[], object] = lambda: 0,
        unpacked: bool | None = None,
    ) -> None:
        size = value_bytes(model.parameters())
        self._unpacked = size == 0 or unpacked is True
        if size and unpacked is None:
            self._unpacked = has_room_unpacked(model, size)
        self._rounding, self._merged = rounding, list[tuple[Tensor, LoraLinear]]()
        self._copies: list[Tensor] = []
        self._sources: list[Callable[[], Any]] = []  # of what each is a copy
        self._forwards: dict[nn.Module, Forward] = {}
        self._stacks: dict[tuple[nn.Module, ...], StackedLinears] = {}
        self._experts: list[tuple[nn.Module, str, nn.Parameter]] = []  # with unpacked weights
        if self._unpacked and size:
            self._experts += _unpacked_experts(model)
        self._expert_casts = [
            (layer, self._casts_of(layer))
            for layer in model.modules()
            if isinstance(layer, LoraExperts) and layer.lora_A.dtype != value_dtype(layer.weight)
        ]
        for layers in _adapted_groups(model):
            device = layers[0].weight.device
            default = device.type == "cuda" or runs_kernels(device)
            stacks = default if stacked is None else stacked
            if merged:
                for group in [layers] if stacks else [[layer] for layer in layers]:
                    self._use(group, self._merge(group))
            elif stacks and all(map(self._can_stack, layers)):
                self._use(layers, self._stack(layers))
        for module in model.modules():
            if "forward" not in vars(module) and module not in self._forwards:
                forward = self._forward_of(module)
                if forward is not None:
                    self._forwards[module] = forward
        self._forwards |= decoding_forwards(model, self._stacks)

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Within, the layers compute so, with the values that adapters have now."""
        self._refresh_copies()
        self._merge_adapters()
        codes = [holder._parameters[name] for holder, name, _ in self._experts]
        try:
            for holder, name, values in self._experts:
                holder._parameters[name] = values
            for layer, casts in self._expert_casts:
                layer.casts = casts
            for module, forward in self._forwards.items():
                module.forward = forward
            yield
        finally:
            for (holder, name, _), packed in zip(self._experts, codes, strict=True):
                holder._parameters[name] = packed
            for layer, _ in self._expert_casts:
                layer.casts = None
            for module in self._forwards:
                del module.forward

    def _forward_of(self, module: nn.Module) -> Forward | None:
        """A faster forward of ``module``; None where it is no linear layer of a known kind."""
        if not self._computes_whole(module):
            return None
        if type(module) is nn.Linear:
            return _linear(module.weight, module.bias)
        if isinstance(module, NF4Linear):
            return _linear(_stored(module), module._parameters.get("bias"))
        if isinstance(module, ParallelLinear) or (
            isinstance(module, LoraLinear) and not module.enabled
        ):
            product = _linear(_stored(module), _inner_bias(module, module.bias))
            return _around(module, product, module.bias)
        if is_conv1d(module):
            return _linear(module.get_parameter("weight").T, module._parameters.get("bias"))
        if not isinstance(module, LoraLinear):
            return None
        weight, bias = _stored(module), self._active_bias(module)
        down = self._cast(partial(_factor, module, 0), weight.dtype)
        up = self._cast(partial(_factor, module, 1), weight.dtype)
        base, up, scaling = _linear(weight, _inner_bias(module, bias)), up.T, module.scaling

        def forward(x: Tensor) -> Tensor:
            rows = x.reshape(-1, x.shape[-1])
            output = base(rows)
            output.addmm_(F.linear(rows, down), up, alpha=scaling)
            return output.view(*x.shape[:-1], output.shape[-1])

        return _around(module, forward, bias)

    def _computes_whole(self, module: nn.Module) -> bool:
        """Whether the layer's weight is whole, or there is room to unpack it."""
        return self._unpacked or not is_quantized(module._parameters.get("weight"))

    def _can_stack(self, layer: LoraLinear) -> bool:
        """Whether the weight is frozen, whole and stored (out, in)."""
        frozen = not (
            layer.weight.requires_grad
            or layer.transposed
            or getattr(layer, "split", None) is not None
        )
        return frozen and self._computes_whole(layer)

    def _use(self, layers: Sequence[LoraLinear], products: StackedLinears) -> None:
        self._stacks[tuple(layers)] = products
        for number, layer in enumerate(layers):
            forward = partial(products.read, number)
            self._forwards[layer] = _around(layer, forward, self._active_bias(layer))

    def _merge(self, layers: Sequence[LoraLinear]) -> StackedLinears:
        """The layers with their adapters in one copy of their weights."""
        shapes = [_shape(layer) for layer in layers]
        sizes = [shape[0] for shape in shapes]
        weight = layers[0].weight
        stack = weight.new_empty(sum(sizes), shapes[0][1], dtype=value_dtype(weight))
        for layer, part in zip(layers, torch.split(stack, sizes), strict=True):
            self._merged.append((part, layer))
        return StackedLinears(stack, self._bias(layers, sizes, len(stack)), sizes)

    def _refresh_copies(self) -> None:
        """Copy what has changed since the last time, on a GPU all of a type by one operation."""
        alike: dict[tuple[torch.dtype, torch.dtype], tuple[list[Tensor], list[Tensor]]] = {}
        for copy, read in zip(self._copies, self._sources, strict=True):
            source = read().detach()
            # One of another layout would have the others of its list copied one by one, too.
            if copy.is_cuda and copy.is_contiguous() and source.is_contiguous():
                copies, sources = alike.setdefault((copy.dtype, source.dtype), ([], []))
                copies.append(copy)
                sources.append(source)
            else:
                copy.copy_(source)
        for copies, sources in alike.values():
            torch._foreach_copy_(copies, sources)

    def _merge_adapters(self) -> None:
        """Make merged copies anew, one by one: in fp32 they take memory."""
        drawn_from = self._rounding() if self._merged else None
        for number, (copy, layer) in enumerate(self._merged):
            if copy.dtype in FORMATS:
                seed = Random(f"{drawn_from} {number}").getrandbits(32)
                round_at_random(copy, _merged_weight(layer), seed)
            else:
                copy.copy_(_merged_weight(layer))

    def _stack(self, layers: Sequence[LoraLinear]) -> StackedLinears:
        """The layers with the first factors of their adapters behind their weights.

        Those of lower rank than others have zeros.
        """
        sizes = [layer.out_features for layer in layers]
        rank = max(len(layer.factors()[0]) for layer in layers)
        stack = _stack_of(layers, spare=rank * len(layers))
        up = stack.new_zeros(sum(sizes), rank)
        downs, ups = torch.split(stack[sum(sizes) :], rank), torch.split(up, sizes)
        for layer, down, block in zip(layers, downs, ups, strict=False):
            own = len(layer.factors()[0])
            self._refresh(down[:own], partial(_factor, layer, 0))
            self._refresh(block[:, :own], partial(_factor, layer, 1))
        bias = self._bias(layers, sizes, len(stack))
        return StackedLinears(stack, bias, sizes, up, layers[0].scaling)

    def _bias(self, layers: Sequence[LoraLinear], sizes: list[int], length: int) -> Tensor | None:
        """(length,) biases of the layers one after another, then 0; None where there are none."""
        with_bias = [
            layer for layer in layers if _inner_bias(layer, active_bias(layer)) is not None
        ]
        if not with_bias:
            return None
        weight = layers[0].weight
        stack = weight.new_zeros(length, dtype=value_dtype(weight))
        for layer, part in zip(layers, torch.split(stack[: sum(sizes)], sizes), strict=True):
            if layer in with_bias:
                self._refresh(part, partial(active_bias, layer))
        return stack

    def _active_bias(self, layer: LoraLinear) -> Tensor | None:
        if layer.trained_bias is None:
            return layer.bias
        return self._cast(lambda: layer.trained_bias, value_dtype(layer.weight))

    def _cast(self, source: Callable[[], Any], dtype: torch.dtype) -> Tensor:
        """A parameter of this type as it is; of what else it is, a copy that is refreshed."""
        tensor: Tensor = source()
        if isinstance(tensor, nn.Parameter) and tensor.dtype == dtype:
            return tensor
        copy = torch.empty_like(tensor, dtype=dtype)
        self._refresh(copy, source)
        return copy

    def _casts_of(self, layer: LoraExperts) -> tuple[Tensor, Tensor]:
        """Copies of the factors of experts."""
        down, up = layer.empty_casts(value_dtype(layer.weight))
        self._refresh(down[:, : layer.r], lambda: layer.lora_A)
        self._refresh(up[..., : layer.r], lambda: layer.lora_B)
        return down, up

    def _refresh(self, copy: Tensor, source: Callable[[], Any]) -> None:
        self._copies.append(copy)
        self._sources.append(source)


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
    # oneDNN has a layout of its own for float32 weights on a CPU.
    known = hasattr(torch.ops.mkldnn, "_linear_pointwise")
    usable = known and bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]
    if not usable or weight.device.type != "cpu" or weight.dtype != torch.float32:
        return lambda x: F.linear(x, weight, bias)
    packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), None)
    fewest = MIN_PACKED_PRODUCTS / len(weight)

    def forward(x: Tensor) -> Tensor:
        if x.numel() < fewest:
            return F.linear(x, weight, bias)
        output: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
        return output

    return forward


def _stored(layer: LoraLinear | ParallelLinear | NF4Linear) -> Tensor:
    """(out, in) weight that this rank holds; of a quantised one a copy of its values."""
    weight = values_of(layer.weight)
    return weight.T if layer.transposed else weight


def _shape(layer: LoraLinear) -> torch.Size:
    """(out, in) of the weight that this rank holds."""
    weight = layer.weight
    shape = full_shape(weight) if is_quantized(weight) else weight.shape
    return shape[::-1] if layer.transposed else shape


def _stack_of(layers: Sequence[LoraLinear], *, spare: int) -> Tensor:
    """(rows, in) weights of the layers one after another, and at least ``spare`` rows of zeros."""
    if not is_quantized(layers[0].weight):
        return stack_weights([layer.weight for layer in layers], spare=spare)
    rows = sum(_shape(layer)[0] for layer in layers) + spare
    rows += -rows % ROWS_MULTIPLE
    weight = layers[0].weight
    stack = weight.new_zeros(rows, layers[0].in_features, dtype=value_dtype(weight))
    row = 0
    for layer in layers:
        values = _stored(layer)
        stack[row : row + len(values)] = values
        row += len(values)
    return stack


def _unpacked_experts(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
    """Modules with quantised weights of experts, the names of those there, and their values."""
    for _, experts in fused_experts(model):
        for module, name in expert_holders(experts).values():
            if is_quantized(weight := module.get_parameter(name)):
                yield module, name, nn.Parameter(values_of(weight), requires_grad=False)


def has_room_unpacked(model: nn.Module, size: int) -> bool:
    """Whether half of the free memory of the model's device holds ``size`` bytes."""
    device = next(model.parameters()).device
    if device.type != "cuda":
        free = int(psutil.virtual_memory().available)
    else:  # also what torch has reserved and does not use
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        free = int(torch.cuda.mem_get_info(device)[0] + unused)
    return size <= free // 2


def _factor(layer: LoraLinear, number: int) -> Tensor:
    return layer.factors()[number]


def _merged_weight(layer: LoraLinear) -> Tensor:
    """(out, in) fp32 of the weight with its update."""
    weight = values_of(layer.weight, torch.float32) + layer.delta(layer.lora_A, layer.lora_B)
    return weight.T if layer.transposed else weight


def _adapted_groups(model: nn.Module) -> Iterator[list[LoraLinear]]:
    """Layers with adapters in use, those that as a rule read the same input together."""
    grouped: set[nn.Module] = set()
    for module in model.modules():
        for names in _READ_ONE_INPUT:
            layers = [child for name in names if (child := module._modules.get(name)) is not None]
            plain = [each for each in layers if isinstance(each, LoraLinear) and each.enabled]
            alike = all(getattr(each, "split", None) is None for each in plain)
            if len(plain) == len(names) and alike and len({e.scaling for e in plain}) == 1:
                grouped.update(plain)
                yield plain
    for module in model.modules():
        if isinstance(module, LoraLinear) and module.enabled and module not in grouped:
            yield [module]
