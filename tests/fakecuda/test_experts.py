"""Layers of experts on a fake GPU: what they launch does not grow with how many there are."""

import pytest

from fakecuda.test_training import check_estimate, train
from helpers.spread import ALL

pytestmark = [pytest.mark.stage, pytest.mark.thorough]
SHAPE = {"shape": "qwen3-30b-a3b", "layers": 1}


def unpacked(found):
    return found["operations"].get("bitsandbytes::dequantize_4bit", 0)


@pytest.mark.parametrize("base_bits", [16, 4] if ALL else [4])
def test_a_step_launches_as_much_for_64_experts_as_for_8(fake_device, base_bits):
    few, many = (
        train(fake_device, **SHAPE, experts=n, rows=2, base_bits=base_bits) for n in (8, 64)
    )
    # q, k, v, o, and the experts' two, however many experts there are; and in the backward pass
    # of a first layer the last three.
    assert unpacked(few) == unpacked(many) == (0 if base_bits == 16 else 6 + 3)
    assert few["launches"] == many["launches"]
    assert few["operations"]["_grouped_mm"] == 2 * (3 + 5)
    assert few["operations"].get("constant_pad_nd", 0) == 0
    assert set(few["waits"]) == set(many["waits"])
    if base_bits == 16:
        check_estimate(many)


@pytest.mark.parametrize("base_bits", [16, 4] if ALL else [4])
def test_decoding_launches_as_much_and_unpacks_once_a_rollout(fake_device, base_bits):
    options = {**SHAPE, "new_tokens": 8, "calls": 1, "base_bits": base_bits}
    few, many = (
        fake_device.run("fakecuda.programs:decode", **options, experts=n)[0] for n in (8, 64)
    )
    assert few["graph_operations"] == many["graph_operations"]
    assert few["launches"] == many["launches"]
    for noted in (few, many):
        assert noted["graph_kinds"]["_grouped_mm"] == 2 * 3
        assert "constant_pad_nd" not in noted["graph_kinds"]
        assert "bitsandbytes::dequantize_4bit" not in noted["graph_kinds"]
        assert unpacked(noted) == (0 if base_bits == 16 else 4 + 2)
