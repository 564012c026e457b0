"""Decoding on a fake GPU: what is captured, and that it is kept from call to call."""

import pytest

pytestmark = pytest.mark.stage


def test_a_second_call_replays_what_the_first_one_captured(fake_device):
    first, second = fake_device.run("fakecuda.programs:decode", shape="opt-1.3b", new_tokens=128)
    # 256 + 128 columns: those of 384 and, for the last token, none more.
    assert first["graphs"] == 1
    assert first["replays"] == 126, "all steps but the prompts' and the first"
    assert (second["graphs"], second["replays"]) == (0, 127)
    assert {place.split()[-1] for place in second["waits"]} == {"finished"}
    assert sum(second["waits"].values()) == 128 // 16 - 1
    assert {each.split()[1] for each in second["products"]} == {"bfloat16"}
    (merged, _) = fake_device.run("fakecuda.programs:decode", shape="opt-1.3b", merged=True)
    assert merged["graph_operations"] == [304]
    # Of 24 blocks, 16 each, the ends of the model, and sampling.
    assert first["graph_operations"] == [400]
