"""Whole tensors out of ZeRO 3's shards, shards of a model of rank 0's, and weights in between."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import compress
from types import MethodType
from typing import Any, Protocol, TypeGuard

import deepspeed
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from dschat_lora.algos.tensors import is_finite
from dschat_lora.engine.distributed import (
    broadcast_,
    data_rank,
    data_world_size,
    device,
    gather_over_ranks,
    grid,
    rank,
)


class TensorShard(Protocol):
    """How a tensor is divided among tensor-parallel ranks."""

    def full_shape(self, shape: Sequence[int]) -> torch.Size:
        """Of the whole tensor, given that of a rank's part."""

    def own(self, full: Tensor) -> Tensor:
        """This rank's part of a tensor that every rank has."""

    def whole(self, own: Tensor) -> Tensor:
        """The tensor whose part of this rank is ``own``; call on every rank."""


class QuantizedState(Protocol):
    """What else belongs to a quantised parameter, small and whole on every rank."""

    def mapped(self, function: Callable[[Tensor], Tensor]) -> "QuantizedState":
        """The same with ``function`` of each tensor."""


class ShardedParameter(Protocol):
    """A parameter of which ZeRO 3 holds a part on every rank, as DeepSpeed marks it."""

    data: Tensor
    ds_tensor: Tensor  # this rank's part
    ds_shape: torch.Size  # of the whole
    ds_numel: int


@torch.no_grad()
def gather_to_cpu(parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """Full copies on rank 0's CPU in the parameters' own types, however they are divided.

    One parameter is whole at a time. Call on every rank; the others get an empty dict.
    """
    full = {}
    for name, parameter in parameters.items():
        with gathered([parameter]):
            whole = whole_of_parts(parameter, parameter.detach())
            if rank() == 0:
                full[name] = whole.to("cpu", copy=True)
    return full


def broken_parameters(parameters: Mapping[str, Tensor]) -> list[str]:
    """Names of the parameters that hold NaN or infinity, in this rank's part of them."""
    own = {name: getattr(p, "ds_tensor", p).detach() for name, p in parameters.items()}
    return [n for n, part in own.items() if part.is_floating_point() and not is_finite(part)]


def tensor_shard(parameter: Tensor) -> TensorShard | None:
    """How a parameter is divided among tensor-parallel ranks; None if each holds all of it."""
    return getattr(parameter, "tensor_shard", None)


def whole_of_parts(parameter: Tensor, own: Tensor) -> Tensor:
    """The whole of what each tensor-parallel rank holds a part of, cut as ``parameter`` is.

    Call on every rank.
    """
    shard = tensor_shard(parameter)
    return own if shard is None else shard.whole(own)


@contextmanager
def gathered(parameters: list[nn.Parameter]) -> Iterator[None]:
    """Inside the block sharded parameters are whole, to be read only; call on every rank."""
    sharded = [p for p in parameters if hasattr(p, "ds_id")]
    with deepspeed.zero.GatheredParameters(sharded, enabled=bool(sharded)):
        yield


@torch.no_grad()
def shard_from_rank_zero(model: nn.Module, ds_config: Mapping[str, Any]) -> None:
    """Split the parameters of ``model`` over data-parallel ranks, module by module, for ZeRO 3.

    The first of them holds real values; the others may hold a model on the meta device, so that
    no other process ever needs memory for the whole of it. Buffers and what belongs to quantised
    parameters, never sharded, are copied.
    Call on every rank.
    """
    ranks, replaced = grid(), dict[int, nn.Parameter]()
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is None or hasattr(parameter, "ds_id"):
                continue
            if parameter.is_meta:
                key = id(parameter)
                if key not in replaced:
                    empty = torch.empty_like(parameter, device=device())
                    real = nn.Parameter(empty, requires_grad=parameter.requires_grad)
                    real.__dict__.update(parameter.__dict__)
                    replaced[key] = real
                module._parameters[name] = replaced[key]
            if (state := quantized_state(parameter)) is not None:
                module._parameters[name].nf4 = state.mapped(_from_rank_zero)  # type: ignore[union-attr]
        for name, buffer in list(module._buffers.items()):
            if buffer is not None:
                module._buffers[name] = _from_rank_zero(buffer)
        if own := {name: p for name, p in module._parameters.items() if p is not None}:
            holder = nn.Module()  # of these alone, without the children of their owner
            holder._parameters = dict(own)
            deepspeed.zero.Init(
                module=holder,
                data_parallel_group=ranks.data_group if ranks is not None else None,
                config_dict_or_path=dict(ds_config),
                mpu=ranks,
            )


def gather_with_parents(model: nn.Module) -> None:
    """Have ZeRO 3 gather for the module around it what a module has that is never called.

    Layers of LFM2, Mamba and others read the weight of a convolution, those of Gemma 3n call other
    methods of a module. DeepSpeed finds that out in the forward pass of a whole model alone.
    """
    for module in model.modules():
        for child in module.children():
            reads = isinstance(child, nn.Conv1d) or isinstance(module, nn.MultiheadAttention)
            if reads or type(child).__name__ == "Gemma3nTextAltUp":
                for parameter in child.parameters(recurse=False):
                    deepspeed.zero.register_external_parameter(module, parameter)


def quantized_state(parameter: Tensor) -> QuantizedState | None:
    """What a quantised parameter's values are made of besides itself; None for any other."""
    return getattr(parameter, "nf4", None)


def _from_rank_zero(tensor: Tensor) -> Tensor:
    """The first data-parallel rank's tensor, on this device; others may have it on meta."""
    here = torch.empty_like(tensor, device=device()) if tensor.is_meta else tensor
    return broadcast_(here.to(device()))


class Snapshot:
    """The values of parameters at one time, to compute with them again later.

    Every rank keeps what it may need to put them in place: its shards at ZeRO 3, and whole
    values. Make it on every rank.
    """

    @torch.no_grad()
    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self._parameters = list(parameters)
        self._shards = [p.ds_tensor.clone() for p in filter(is_sharded, self._parameters)]
        with gathered(parameters):
            self._wholes = [p.detach().clone() for p in parameters]

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Inside the block the parameters have those values; nothing may be trained there."""
        shards = [p.ds_tensor.data for p in filter(is_sharded, self._parameters)]
        # DeepSpeed may keep small parameters whole on every rank, beside their shards.
        pairs: list[tuple[Any, Tensor]] = list(zip(self._parameters, self._wholes, strict=True))
        present = [p.data.numel() == whole.numel() for p, whole in pairs]
        wholes = [p.data for p, _ in compress(pairs, present)]
        values = [whole for _, whole in compress(pairs, present)]
        before = [tensor.clone() for tensor in (*shards, *wholes)]
        _copy([*shards, *wholes], [*self._shards, *values])
        try:
            yield
        finally:
            _copy([*shards, *wholes], before)
            for (p, whole), here in zip(pairs, present, strict=True):
                if not here and p.data.numel() == whole.numel():
                    p.partition()  # gathered inside the block, and to be gathered again


def own_shard(parameter: Tensor | ShardedParameter, value: Tensor) -> Tensor:
    """This rank's part of ``value`` as ZeRO 3 cuts it: equal parts, the last filled with zeros."""
    assert is_sharded(parameter)
    size = parameter.ds_tensor.numel()
    filled = torch.zeros(size * data_world_size(), dtype=value.dtype, device=value.device)
    filled[: value.numel()] = value.flatten()
    return filled[size * data_rank() : size * (data_rank() + 1)]


def whole_of_shards(parameter: ShardedParameter, shard: Tensor) -> Tensor:
    """The whole tensor of which each rank holds a part as ``parameter`` is cut. On every rank."""
    parts = gather_over_ranks(shard.flatten())
    return parts[: parameter.ds_numel].view(parameter.ds_shape)


def is_sharded(parameter: object) -> TypeGuard[ShardedParameter]:
    """Whether ZeRO 3 holds the parameter in parts."""
    return hasattr(parameter, "ds_tensor")


@torch.no_grad()
def _copy(targets: list[Tensor], values: list[Tensor]) -> None:
    if targets:
        torch._foreach_copy_(targets, values)


def free_between_passes(model: nn.Module) -> None:
    """Have every ``nn.Linear`` of ``model`` keep its weight as a parameter, not as a view of it.

    For the gradient of its input torch keeps ``W^T``, a view that holds the whole weight in memory
    until the backward pass, though ZeRO 3 has freed the parameter. DeepSpeed's
    ``memory_efficient_linear`` replaces torch's function in the whole process; this changes the
    layers of one model, and no value.
    """
    for module in model.modules():
        if isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward:
            module.forward = MethodType(_forward, module)  # type: ignore[method-assign]


def _forward(module: nn.Linear, x: Tensor) -> Tensor:
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return F.linear(x, module.weight, module.bias)
    weight: Tensor = module.weight
    bias: Tensor | None = module.bias
    if torch.is_autocast_enabled(x.device.type) and x.dtype != torch.float64:
        dtype = torch.get_autocast_dtype(x.device.type)
        x, weight = x.to(dtype), weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    output: Tensor = _Linear.apply(x, weight, bias)  # type: ignore[no-untyped-call]
    return output


class _Linear(torch.autograd.Function):
    """``x W^T + b``; W is read anew in the backward pass, when DeepSpeed has gathered it again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)
        return F.linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        wants_x, wants_weight, wants_bias = ctx.needs_input_grad
        rows = grad.reshape(-1, weight.shape[0])
        return (
            (rows @ weight).view(*grad.shape[:-1], weight.shape[1]) if wants_x else None,
            rows.t() @ x.reshape(-1, weight.shape[1]) if wants_weight else None,
            rows.sum(0) if wants_bias else None,
        )
