"""Heads made ready for attention, by the kernel in Triton's interpreter against transformers'."""

import itertools

import pytest
import torch
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm, apply_rotary_pos_emb

from dschat_lora.kernels.heads import place_heads

FP32, FP16 = torch.float32, torch.float16  # the interpreter multiplies no bf16
EPS = 1e-3


def numbers(*shape, seed=0, dtype=FP32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def case(rows, heads, key_heads, size, rank, *, norms, rotates, dtype=FP32, columns=6):
    """Arguments, and by transformers the queries and the cache that they are to make, in fp64."""
    counts = [heads, key_heads, key_heads]
    sizes = [count * size for count in counts]
    products = numbers(rows, sum(sizes) + 3 * rank + 5, dtype=dtype)
    up = numbers(sum(sizes), rank, seed=1, dtype=dtype) if rank else None
    parts = [x.unflatten(1, (-1, size)) for x in products[:, : sum(sizes)].split(sizes, 1)]
    inner = products[:, sum(sizes) :] if rank else None
    cos, sin = (numbers(rows, size, seed=n, dtype=dtype) if rotates else None for n in (2, 3))
    weights = [numbers(size, seed=n, dtype=dtype) if norms else None for n in (4, 5)]
    # Of a larger cache, whose layers hold more rows, keys and values beside one another.
    stores = numbers(2, rows + 2, key_heads, columns, size, seed=6, dtype=dtype)
    where = torch.arange(rows) * 5 % columns
    made = []
    for number, part in enumerate(parts):
        x = part.double()
        if rank:
            update = inner[:, number * rank :][:, :rank].double()
            x = x + 0.5 * (update @ up.split(sizes)[number].double().T).view(x.shape)
        if norms and number < 2:
            norm = Qwen3RMSNorm(size, EPS)
            norm.weight.data = weights[number].double()
            x = norm(x)
        made.append(x)
    if rotates:
        pair = (x.transpose(0, 1)[None] for x in made[:2])
        pair = apply_rotary_pos_emb(*pair, cos.double()[None], sin.double()[None])
        made[:2] = (x[0].transpose(0, 1) for x in pair)
    expected = stores.double()
    for row in range(rows):
        expected[:, row, :, where[row]] = torch.stack([made[1][row], made[2][row]])
    arguments = (*parts, inner, up, 0.5, cos, sin, *weights, EPS, *stores, where)
    return arguments, stores, made[0].detach(), expected.detach()


def check(arguments, stores, queries, cache, dtype=FP32):
    before = [x.clone() for x in arguments[1:3]]
    place_heads(*arguments)
    limit = {FP32: 1e-6, FP16: 2**-11}[dtype]
    for given, expected in ((arguments[0], queries), (stores, cache)):
        assert (given.double() - expected).norm() < limit * expected.norm()
    untouched = cache == cache.to(dtype)
    assert torch.equal(stores[untouched], cache[untouched].to(dtype))
    assert all(map(torch.equal, arguments[1:3], before)), "the products of keys and values stay"


@pytest.mark.parametrize("dtype", [FP32, FP16])
@pytest.mark.parametrize(("norms", "rotates"), itertools.product([False, True], repeat=2))
@pytest.mark.parametrize("shape", [(1, 4, 2, 16, 4), (17, 2, 2, 24, 20), (3, 6, 1, 64, 0)])
@pytest.mark.usefixtures("by_kernel")
def test_heads_are_updated_normed_rotated_and_stored(shape, norms, rotates, dtype):
    check(*case(*shape, norms=norms, rotates=rotates, dtype=dtype), dtype)


@pytest.mark.usefixtures("by_kernel")
def test_all_rows_may_write_to_one_column():
    arguments, stores, *_ = case(3, 2, 2, 16, 0, norms=False, rotates=False)
    place_heads(*arguments[:-1], torch.tensor([2]).expand(3))
    assert torch.equal(stores[0, :3, :, 2], arguments[1])
    assert torch.equal(stores[1, :3, :, 2], arguments[2])
