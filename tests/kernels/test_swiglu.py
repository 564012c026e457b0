"""SwiGLU's kernels by Triton's interpreter, against the formula and autograd."""

import pytest
import torch
import torch.nn.functional as F

from dschat_lora.kernels.swiglu import swiglu, swiglu_backward

pytestmark = pytest.mark.usefixtures("by_kernel")


def drawn(*shape, count=3, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return [3 * torch.randn(shape, generator=generator).to(dtype) for _ in range(count)]


def by_autograd(grad, gate, x):
    """The product and both gradients, of the formula in fp64."""
    gate, x = (each.double().requires_grad_() for each in (gate, x))
    product = F.silu(gate) * x
    return product.detach(), *torch.autograd.grad(product, (gate, x), grad.double())


@pytest.mark.parametrize("features", [1, 3, 1025])
def test_products_and_gradients_are_those_of_autograd(features):
    grad, gate, x = drawn(5, features)
    expected = [each.float() for each in by_autograd(grad, gate, x)]
    torch.testing.assert_close(swiglu(gate, x), expected[0], rtol=1e-5, atol=1e-5)
    before = grad.clone()
    for product in (None, torch.zeros_like(x), grad):
        result = swiglu_backward(grad, gate, x, product)
        torch.testing.assert_close([*result], expected[1:], rtol=1e-5, atol=1e-5)
        if product is None:
            assert torch.equal(grad, before)
        else:
            torch.testing.assert_close(product, expected[0], rtol=1e-5, atol=1e-5)


def test_halves_of_a_matrix_and_columns_are_read_where_they_lie():
    grad, both = drawn(4, 14, count=2)
    grad, (gate, x) = grad[:, ::2], both.chunk(2, dim=1)
    expected = [each.float() for each in by_autograd(grad, gate, x)]
    torch.testing.assert_close(swiglu(gate, x), expected[0], rtol=1e-5, atol=1e-5)
    result = swiglu_backward(grad, gate, x, None)
    torch.testing.assert_close([*result], expected[1:], rtol=1e-5, atol=1e-5)


def test_bf16_is_rounded_once(by_kernel):
    given = drawn(3, 200, dtype=torch.bfloat16)
    expected = by_autograd(*given)
    result = [swiglu(*given[1:]), *swiglu_backward(*given, None)]
    for value, exact in zip(result, expected, strict=True):
        assert value.dtype == torch.bfloat16
        # Half a unit in the last of 8 bits; a whole one of the interpreter, which cuts off.
        unit = 2**-7 if by_kernel else 2**-8
        torch.testing.assert_close(value.double(), exact, rtol=unit + 1e-5, atol=1e-6)


def test_no_rows_give_none():
    grad, gate, x = drawn(0, 7)
    assert swiglu(gate, x).shape == (0, 7)
    assert [each.shape for each in swiglu_backward(grad, gate, x, None)] == [(0, 7)] * 2
