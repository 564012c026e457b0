"""Frozen weights in four bits: NF4 with double quantisation (QLoRA, arXiv:2305.14314, section 3).

A quantised weight is a parameter of bitsandbytes' codes, two a byte, whose attribute ``nf4`` says
what they stand for (:class:`NF4State`). No other module knows the format. bitsandbytes computes
codes and values; none of its layers runs: its ``Linear4bit``, in evaluation on a CPU with
AVX512-BF16, rewrites the weight that all roles share.
"""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from dschat_lora.lora.autograd import Context, QuantState
from dschat_lora.lora.layers import state_of

BLOCK_SIZE, SCALES_BLOCK_SIZE = 64, 256
PIECE = 2**16  # weights that a CPU quantises at a time
STATE_KEY = "quant_state.bitsandbytes__nf4"  # of a stored weight, after its name


@dataclass(frozen=True)
class NF4State:
    """What the codes of a weight stand for.

    Block b of ``block_size`` codes has the values ``nf4[code] * absmax[b]`` (eq. 4 and 6), with
    ``absmax = scale_values[scales] * scale_absmax + offset`` where scales are quantised in turn.

    Attributes:
        shape: of the matrix of codes, (out, in), or of those of several experts, in the order in
            which the model has them. transposed: the weight is that matrix's transpose, (in, out),
            as in GPT-2.
        dtype: in which the weight computes by default.
        scales: (blocks,) uint8 codes of ``absmax``, or ``absmax`` itself in float32.
        scale_values: (256,) float32 values of those codes, or None.
        scale_absmax: (ceil(blocks / scale_block_size),) float32, or None.
        offset: () float32 mean of ``absmax``, or None.
    """

    shape: torch.Size
    transposed: bool
    dtype: torch.dtype
    scales: Tensor
    scale_values: Tensor | None = None
    scale_absmax: Tensor | None = None
    offset: Tensor | None = None
    block_size: int = BLOCK_SIZE
    scale_block_size: int = SCALES_BLOCK_SIZE

    def tensors(self) -> dict[str, Tensor]:
        """The tensors in it, by name."""
        return {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}

    def mapped(self, function: Callable[[Tensor], Tensor]) -> "NF4State":
        """The same with ``function`` of each tensor."""
        _register_operators()  # on ranks that get their weights from rank 0
        mapped: dict[str, Any] = {n: function(t) for n, t in self.tensors().items()}
        return replace(self, **mapped)

    def follow_(self, device: torch.device) -> None:
        """Move the tensors, in place, to where modules or engines have moved the codes."""
        if self.scales.device != device:
            for name, tensor in self.tensors().items():
                object.__setattr__(self, name, tensor.to(device))

    def absmax(self) -> Tensor:
        """(blocks,) float32 largest absolute value of each block."""
        if self.scale_values is None or self.scale_absmax is None or self.offset is None:
            return self.scales
        values: Tensor = torch.ops.bitsandbytes.dequantize_blockwise(
            self.scales,
            self.scale_absmax,
            self.scale_values,
            self.scale_block_size,
            torch.float32,
        )
        return values + self.offset

    def values(self, codes: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """The values of a weight, computed in float32 and rounded once to ``dtype``.

        ``codes`` are the parameter's data, whole; ``dtype`` is by default that of the state.
        """
        self.follow_(codes.device)
        count, size = self.shape.numel(), self.block_size
        # By blocks: on a CPU with AVX-512 bitsandbytes 0.50 gets rows of 16 values wrong.
        rows = (count // size, size) if count % size == 0 else (count,)
        values: Tensor = torch.ops.bitsandbytes.dequantize_4bit(
            codes, self.absmax(), size, "nf4", rows, dtype or self.dtype
        )
        values = values.view(self.shape)
        return values.t() if self.transposed else values

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """``x W^T + b`` of the weight whose state this is, in the dtype of ``x``."""
        return product(x, weight, bias)


@torch.no_grad()
def quantize(
    weight: Tensor,
    *,
    dtype: torch.dtype,
    transposed: bool = False,
    worker: torch.device | None = None,
) -> nn.Parameter:
    """A frozen parameter that holds ``weight`` in NF4, on the device of ``weight``.

    Values are quantised as they are given, whatever ``dtype`` they will compute in. The device
    ``worker`` does the work, by default that of ``weight``. On the meta device the result has
    shapes alone.
    """
    matrix = weight.t() if transposed else weight
    if weight.is_meta:
        return _empty(matrix.shape, dtype, transposed)
    _register_operators()
    worker = worker or weight.device
    codes, absmax = _packed(matrix, worker)
    from bitsandbytes.functional import quantize_blockwise

    offset = absmax.mean()
    scales, state = quantize_blockwise((absmax - offset).to(worker), blocksize=SCALES_BLOCK_SIZE)
    nf4 = NF4State(matrix.shape, transposed, dtype, scales, state.code, state.absmax, offset)
    return _parameter(codes, nf4.mapped(lambda t: t.to(weight.device)))


def _packed(matrix: Tensor, worker: torch.device) -> tuple[Tensor, Tensor]:
    """Codes, two a byte, and the largest absolute value of each block, on the matrix's device.

    ``worker`` computes them. A CPU takes a piece at a time: temporaries have 20 bytes a weight, and
    between the codes of two layers they would leave the heap fragmented.
    """
    matrix = matrix.flatten(0, -2)
    count, width = matrix.numel(), matrix.shape[1]
    codes = matrix.new_empty(math.ceil(count / 2), 1, dtype=torch.uint8)
    absmax = matrix.new_empty(math.ceil(count / BLOCK_SIZE), dtype=torch.float32)
    # A whole number of blocks, whatever the width.
    rows = BLOCK_SIZE * max(1, PIECE // (BLOCK_SIZE * width))
    rows = rows if worker.type == "cpu" else len(matrix)
    for first in range(0, len(matrix), rows):
        values = matrix[first : first + rows].to(worker).float().contiguous()
        parts = torch.ops.bitsandbytes.quantize_4bit(values, BLOCK_SIZE, "nf4", torch.uint8)
        for whole, part, size in zip((codes, absmax), parts, (2, BLOCK_SIZE), strict=True):
            start = first * width // size
            whole[start : start + len(part)] = part
    return codes, absmax


@torch.no_grad()
def from_stored(
    read: Callable[[str], Tensor], *, shape: torch.Size, dtype: torch.dtype, transposed: bool
) -> nn.Parameter:
    """A quantised weight of a packed checkpoint, as transformers and bitsandbytes write it.

    Args:
        read: gives a stored tensor by what follows the weight's name in its key; "" the codes.
        shape: of the weight that the model has.
        dtype: in which the weight is to compute.
        transposed: the weight is (in, out), as in GPT-2; codes are stored (out, in).

    Raises:
        ValueError: if it is of another shape or kind.
    """
    _register_operators()
    fields: Mapping[str, object] = json.loads(bytes(read(f".{STATE_KEY}").tolist()))
    matrix = shape[::-1] if transposed else shape
    if fields["quant_type"] != "nf4" or fields["shape"] != list(matrix):
        raise ValueError(
            f"holds {fields['quant_type']} codes of the shape {fields['shape']}, not nf4 codes "
            f"of {list(matrix)}"
        )
    nf4 = NF4State(
        torch.Size(matrix),
        transposed,
        dtype,
        read(".absmax"),
        block_size=int(str(fields["blocksize"])),
    )
    if "nested_blocksize" in fields:
        nf4 = replace(
            nf4,
            scale_values=read(".nested_quant_map"),
            scale_absmax=read(".nested_absmax"),
            offset=torch.tensor(float(str(fields["nested_offset"]))),
            scale_block_size=int(str(fields["nested_blocksize"])),
        )
    return _parameter(read("").view(torch.uint8).reshape(-1, 1), nf4)


class NF4Linear(nn.Module):
    """``x W^T + b`` with W in NF4, unpacked in the forward and again in the backward pass.

    Attributes:
        weight: codes of the (out, in) W, or of the (in, out) one of a ``transposed`` layer.
        bias: (out,) or None. in_features, out_features: of the layer.
    """

    weight: nn.Parameter

    def __init__(self, base: nn.Module, *, transposed: bool, dtype: torch.dtype) -> None:
        """Take the place of ``base``, whose weight is on the meta device."""
        super().__init__()
        weight = base.get_parameter("weight")
        self.transposed = transposed
        self.weight = quantize(weight, dtype=dtype, transposed=transposed)
        self.register_parameter("bias", base._parameters.get("bias"))
        sizes = weight.shape if transposed else weight.shape[::-1]
        self.in_features, self.out_features = sizes
        self.train(base.training)

    def forward(self, x: Tensor) -> Tensor:
        """(..., in) -> (..., out), in the dtype of ``x``."""
        return product(x, self.weight, self._parameters["bias"])

    def extra_repr(self) -> str:
        """Shape, for ``print(model)``."""
        return f"in_features={self.in_features}, out_features={self.out_features}"


def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``x W^T + b`` of a quantised weight, in the dtype of ``x``."""
    output: Tensor = _Product.apply(x, weight, bias, state_of(weight))  # type: ignore[no-untyped-call]
    return output


class _Product(torch.autograd.Function):
    """Keeps the codes for the backward pass: the values would take the room that they save."""

    @staticmethod
    def forward(
        ctx: Context, x: Tensor, weight: Tensor, bias: Tensor | None, state: QuantState
    ) -> Tensor:
        ctx.save_for_backward(weight)
        ctx.state = state
        return F.linear(
            x, _matrix(weight, state, x.dtype), None if bias is None else bias.to(x.dtype)
        )

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        (weight,) = ctx.saved_tensors
        wants_x, _, wants_bias, _ = ctx.needs_input_grad
        flat = grad.reshape(-1, grad.shape[-1])
        grad_x = None
        if wants_x and ctx.state is not None:
            grad_x = flat @ _matrix(weight, ctx.state, grad.dtype)
            grad_x = grad_x.view(*grad.shape[:-1], grad_x.shape[-1])
        return grad_x, None, flat.sum(0) if wants_bias else None, None


def _matrix(weight: Tensor, state: QuantState, dtype: torch.dtype) -> Tensor:
    """(out, in) values."""
    values = state.values(weight.detach(), dtype)
    return values.t() if state.transposed else values


def _empty(shape: torch.Size, dtype: torch.dtype, transposed: bool) -> nn.Parameter:
    """What :func:`quantize` returns for a matrix of ``shape`` on the meta device."""
    blocks = math.ceil(shape.numel() / BLOCK_SIZE)

    def empty(*sizes: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(sizes, dtype=dtype, device="meta")

    scale_absmax = empty(math.ceil(blocks / SCALES_BLOCK_SIZE))
    scales = empty(blocks, dtype=torch.uint8)
    state = NF4State(shape, transposed, dtype, scales, empty(256), scale_absmax, empty())
    return _parameter(empty(math.ceil(shape.numel() / 2), 1, dtype=torch.uint8), state)


def _parameter(codes: Tensor, state: NF4State) -> nn.Parameter:
    parameter = nn.Parameter(codes, requires_grad=False)
    parameter.nf4 = state  # type: ignore[attr-defined]
    return parameter


def _register_operators() -> None:
    """Make ``torch.ops.bitsandbytes`` known."""
    import bitsandbytes  # noqa: F401
