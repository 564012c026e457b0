"""Updates of low rank by their kernels in Triton's interpreter, against a layer's plain sums."""

import pytest
import torch

from dschat_lora.kernels import low_rank

pytestmark = pytest.mark.usefixtures("by_kernel")
FP32, FP16 = torch.float32, torch.float16  # the interpreter multiplies no bf16


def numbers(*shape, seed=0, dtype=FP32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def case(rows, sizes, rank, dtype=FP32, spare=3):
    """Products of layers and of their first factors, the second factors, and the layers' sums."""
    products = numbers(rows, sum(sizes) + len(sizes) * rank + spare, dtype=dtype)
    up, outputs, first = numbers(sum(sizes), rank, seed=1, dtype=dtype), [], 0
    for number, size in enumerate(sizes):
        inner = products[:, sum(sizes) + number * rank :][:, :rank]
        block = slice(first, first + size)
        outputs.append(products[:, block].double() + 0.5 * inner.double() @ up[block].double().T)
        first += size
    return products, up, torch.cat(outputs, 1)


def close(result, expected, dtype=FP32):
    """Within rounding of the type, of which fp32 has 1e-5 for sums in another order."""
    error = (result.double() - expected).norm() / expected.norm()
    assert error < {FP32: 1e-6, FP16: 2**-11}[dtype], error


SHAPES = [(1, [32], 4), (5, [40, 8, 8], 4), (17, [33, 31, 7], 20), (70, [130, 66], 70)]


@pytest.mark.parametrize("dtype", [FP32, FP16])
@pytest.mark.parametrize(("rows", "sizes", "rank"), SHAPES)
def test_each_layer_gets_its_own_update_and_the_rest_stays(rows, sizes, rank, dtype):
    products, up, expected = case(rows, sizes, rank, dtype)
    behind = products[:, sum(sizes) :].clone()
    low_rank.add_low_rank(products, up, sizes, 0.5, False)
    close(products[:, : sum(sizes)], expected, dtype)
    assert torch.equal(products[:, sum(sizes) :], behind)


def test_a_relu_follows_the_update_and_lets_no_number_be_lost():
    products, up, expected = case(5, [40], 4)
    products[2, 7] = expected[2, 7] = torch.nan
    low_rank.add_low_rank(products, up, [40], 0.5, True)
    result = products[:, :40]
    assert result[2].isnan().nonzero().tolist() == [[7]]
    close(result.nan_to_num(), expected.relu().nan_to_num())


@pytest.mark.parametrize("dtype", [FP32, FP16])
@pytest.mark.parametrize("rank", [0, 4, 20])
def test_a_residual_is_added_to_a_layer_with_and_without_update(rank, dtype):
    products, up, expected = case(17, [70], rank, dtype)
    residual = numbers(17, 70, seed=2, dtype=dtype)
    result = low_rank.low_rank_residual(products, up if rank else None, 0.5, residual)
    close(result, expected + residual, dtype)
    assert result.dtype == dtype
    assert torch.equal(residual, numbers(17, 70, seed=2, dtype=dtype)), "it stays as it is"


@pytest.mark.parametrize("dtype", [FP32, FP16])
@pytest.mark.parametrize("rank", [0, 4, 20])
def test_gates_and_values_are_multiplied_after_their_updates(rank, dtype):
    products, up, expected = case(17, [70, 70], rank, dtype)
    gate, x = expected.chunk(2, 1)
    result = low_rank.low_rank_swiglu(products, up if rank else None, 0.5, 70)
    close(result, gate / (1 + (-gate).exp()) * x, dtype)
