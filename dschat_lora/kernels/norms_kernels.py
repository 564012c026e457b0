"""Triton's side of :mod:`dschat_lora.kernels.norms`: one row a program."""

import triton
import triton.language as tl


@triton.jit
def rms_norm_kernel(x, weight, output, step, size, eps, WIDTH: tl.constexpr) -> None:
    """A row over its root mean square, times the weights."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, WIDTH)
    inside = columns < size
    values = tl.load(x + row * step + columns, mask=inside, other=0.0).to(tl.float32)
    scale = 1 / tl.sqrt(tl.sum(values * values, 0) / size + eps)
    weights = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    y = values * scale * weights
    tl.store(output + row * size + columns, y.to(output.dtype.element_ty), mask=inside)
