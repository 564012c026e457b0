"""Triton's side of :mod:`dschat_lora.kernels.swiglu`: a block of one row a program."""

import triton
import triton.language as tl


@triton.jit
def swiglu_kernel(
    gate,
    x,
    output,
    gate_step,
    x_step,
    output_step,
    features,
    BLOCK: tl.constexpr,
) -> None:
    """``silu(gate) * x``, in fp32 and rounded once."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < features
    z = tl.load(gate + row * gate_step + columns, mask=inside, other=0.0).to(tl.float32)
    factor = tl.load(x + row * x_step + columns, mask=inside, other=0.0).to(tl.float32)
    product = z * tl.sigmoid(z) * factor
    tl.store(output + row * output_step + columns, product.to(output.dtype.element_ty), mask=inside)


@triton.jit
def swiglu_backward_kernel(
    grad,
    gate,
    x,
    grad_gate,
    grad_x,
    product,
    grad_step,
    gate_step,
    x_step,
    grad_gate_step,
    grad_x_step,
    product_step,
    features,
    WRITES_PRODUCT: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Gradients of both inputs; the product too, which may lie where ``grad`` does."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < features
    g = tl.load(grad + row * grad_step + columns, mask=inside, other=0.0).to(tl.float32)
    z = tl.load(gate + row * gate_step + columns, mask=inside, other=0.0).to(tl.float32)
    factor = tl.load(x + row * x_step + columns, mask=inside, other=0.0).to(tl.float32)
    sigmoid = tl.sigmoid(z)
    silu = z * sigmoid
    of_gate = g * factor * sigmoid * (1 + z * (1 - sigmoid))
    of_x = g * silu
    tl.store(
        grad_gate + row * grad_gate_step + columns,
        of_gate.to(grad_gate.dtype.element_ty),
        mask=inside,
    )
    tl.store(grad_x + row * grad_x_step + columns, of_x.to(grad_x.dtype.element_ty), mask=inside)
    if WRITES_PRODUCT:
        made = (silu * factor).to(product.dtype.element_ty)
        tl.store(product + row * product_step + columns, made, mask=inside)
