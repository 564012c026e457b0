"""The rotation of queries and keys by Triton's interpreter, against complex numbers."""

import pytest
import torch

from dschat_lora.kernels.rotary import rotate

pytestmark = pytest.mark.usefixtures("by_kernel")


def drawn(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def turned(x, angles):
    """Halves of vectors as real and imaginary parts, turned by (B, T, D / 2) angles."""
    z = torch.complex(*x.double().chunk(2, -1)) * torch.polar(angles.new_ones(()), angles)[:, None]
    return torch.cat([z.real, z.imag], -1).float()


@pytest.mark.parametrize("rows", [1, 2], ids=["one table", "a table a row"])
@pytest.mark.parametrize(("heads", "key_heads", "size"), [(3, 1, 6), (8, 2, 8), (9, 9, 2)])
def test_vectors_are_turned_by_angles_and_gradients_back(rows, heads, key_heads, size):
    # As layers make them, heads side by side, and keys in a matrix with other columns.
    q = drawn(2, 5, heads * size).view(2, 5, heads, size).transpose(1, 2)
    k = drawn(2, 5, 3 + key_heads, size)[:, :, 3:].transpose(1, 2)
    angles = 3 * drawn(rows, 5, size // 2).double()
    cos, sin = (f(angles).float().repeat(1, 1, 2) for f in (torch.cos, torch.sin))
    result = rotate(q, k, cos, sin, False)
    torch.testing.assert_close([*result], [turned(x, angles) for x in (q, k)], rtol=1e-5, atol=1e-5)
    back = rotate(*result, cos, sin, True)
    torch.testing.assert_close([*back], [q, k], rtol=1e-5, atol=1e-5)
    assert result[0].transpose(1, 2).is_contiguous()


def test_the_gradient_is_that_of_autograd_where_halves_differ():
    q, k, cos, sin = drawn(1, 2, 3, 4), drawn(1, 1, 3, 4), drawn(1, 3, 4), drawn(1, 3, 4)
    sin.mul_(2)
    grads = drawn(1, 2, 3, 4), drawn(1, 1, 3, 4)
    expected = []
    for x, grad in zip((q, k), grads, strict=True):
        leaf = x.clone().requires_grad_()
        other = torch.cat([-leaf[..., 2:], leaf[..., :2]], -1)  # rotate_half of transformers
        expected += torch.autograd.grad(leaf * cos[:, None] + other * sin[:, None], leaf, grad)
    result = rotate(*grads, cos, sin, True)
    torch.testing.assert_close([*result], expected, rtol=1e-5, atol=1e-5)


def test_tables_that_lie_otherwise_and_no_tokens_are_taken():
    q, k, angles = drawn(1, 2, 3, 4), drawn(1, 1, 3, 4), drawn(1, 3, 2).double()
    cos, sin = (f(angles).float().repeat(1, 1, 2) for f in (torch.cos, torch.sin))
    expected = rotate(q, k, cos, sin, False)
    apart = sin.mT.contiguous().mT
    torch.testing.assert_close(rotate(q, k, cos, apart, False), expected)
    none = rotate(q[:, :, :0], k[:, :, :0], cos[:, :0], sin[:, :0], False)
    assert [x.shape[2] for x in none] == [0, 0]
