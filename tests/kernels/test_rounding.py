"""Rounding by chance: neighbours alone, in the mean the value, and as by Triton's interpreter."""

import runpy
from pathlib import Path

import pytest
import torch

from dschat_lora.kernels import support
from dschat_lora.kernels.rounding import FORMATS, _plain, round_at_random


def drawn(values, dtype, seeds):
    result = torch.empty(len(seeds), *values.shape, dtype=dtype)
    for out, seed in zip(result, seeds, strict=True):
        round_at_random(out, values, seed)
    return result.double()


@pytest.mark.parametrize("dtype", FORMATS)
def test_each_value_becomes_a_neighbour_and_their_mean_is_the_value(dtype):
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(300, generator=generator) * torch.logspace(-7, 2, 300)
    values[:3] = torch.tensor([0.0, 1.0, -0.5])  # have no neighbours but themselves
    result = drawn(values, dtype, range(4000))
    # Neighbours by torch's own order of the numbers of a type.
    nearest = values.to(dtype)
    codes = nearest.view(torch.int16).int()
    towards = torch.where((values - nearest.float()) * values >= 0, 1, -1)
    other = torch.where(values == nearest.float(), codes, codes + towards)
    other = other.to(torch.int16).view(dtype).double()
    assert ((result == nearest.double()) | (result == other)).all()
    distance = (nearest.double() - other).abs()
    off = (result.mean(0) - values.double()).abs()
    # Five standard deviations of the mean of 4,000 draws of two values.
    assert (off <= 5 * 0.5 * distance / 4000**0.5 + 1e-4 * distance).all()
    assert torch.equal(result[:, :3], values[:3].double().expand(4000, -1))


def test_places_and_seeds_draw_apart_and_again_the_same():
    values = torch.full((64, 64), 1 + 2.0**-8)  # half way to the next number
    result = drawn(values, torch.bfloat16, [0, 0, 1])
    assert torch.equal(result[0], result[1])
    ups = result > 1
    for axis in (0, 1):  # neither rows nor columns agree
        assert 0.3 < (ups[0] == ups[0].roll(1, axis)).float().mean() < 0.7
    assert 0.3 < (ups[0] == ups[2]).float().mean() < 0.7
    assert 0.45 < ups.float().mean() < 0.55


@pytest.mark.filterwarnings("ignore:invalid value")  # of infinity
@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("count", [1, 1024, 2100])
def test_the_kernel_gives_what_torch_gives(dtype, count, monkeypatch):
    monkeypatch.setattr(support, "ON_CPU", True)
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(count, generator=generator) * torch.logspace(-9, 3, count)
    values[-1] = torch.inf
    result, expected = torch.zeros(2, count, dtype=dtype)
    round_at_random(result, values, 2**32 - 7)
    _plain(expected, values, 2**32 - 7)
    torch.testing.assert_close(result, expected, rtol=0, atol=0, equal_nan=True)
    assert not result[-1].isfinite()


@pytest.mark.thorough
def test_the_documentation_says_what_a_merged_update_keeps():
    root = Path(__file__).parents[2]
    rows = runpy.run_path(str(root / "scripts" / "rounding_table.py"))["rows"]()
    assert "\n".join(rows) in (root / "benchmarks" / "quality.md").read_text()
