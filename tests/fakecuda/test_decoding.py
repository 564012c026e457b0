"""Decoding on a fake GPU: what is captured, and that it is kept from call to call."""

import re

import pytest

from helpers.addons import of_the_whole
from helpers.spread import ALL

pytestmark = pytest.mark.stage


def test_a_second_call_replays_what_the_first_one_captured(fake_device):
    layers = 24 if ALL else 4
    first, second = fake_device.run("fakecuda.programs:decode", shape="opt-1.3b", layers=layers)
    # 256 + 128 columns: those of 384 and, for the last token, none more.
    assert first["graphs"] == 1
    assert first["replays"] == 126, "all steps but the prompts' and the first"
    assert (second["graphs"], second["replays"]) == (0, 127)
    assert {place.split()[-1] for place in second["waits"]} == {"finished"}
    assert sum(second["waits"].values()) == 128 // 16 - 1
    assert {each.split()[1] for each in second["products"]} == {"bfloat16"}
    (merged, _) = fake_device.run(
        "fakecuda.programs:decode", shape="opt-1.3b", layers=layers, merged=True
    )
    # Of each block; 8 before and after them: the counters, the mask, three of the embeddings and
    # their sum, the last norm, the head; and 3 of sampling, which casts no logits.
    assert merged["graph_operations"] == [11 * layers + 11]
    assert first["graph_operations"] == [11 * layers + 11]
    assert first["logits"] == second["logits"] == ["float32"], "the sums of 16-bit products"


@pytest.mark.parametrize(
    ("rows", "copies", "combined"),
    [(8, 1, True), (32, 1, False), (32, 8, True)],
    ids=["few rows are split", "rows that fill the card", "a prompt is read for its copies"],
)
def test_rows_attend_to_their_own_columns_by_one_launch_or_two(fake_device, rows, copies, combined):
    options = {"shape": "llama-3-8b", "layers": 2, "length": 250, "new_tokens": 4}
    first, second = fake_device.run("fakecuda.programs:decode", rows=rows, copies=copies, **options)
    kinds = first["graph_kinds"]
    assert kinds["dschat_lora::attend_columns"] == 2
    assert kinds.get("dschat_lora::combine_parts", 0) == 2 * combined
    assert not [name for name in kinds if "scaled_dot_product" in name]
    assert (first["graphs"], second["graphs"], second["replays"]) == (1, 0, 3)
    assert second["waits"] == {}


WITHOUT = "decoding without CUDA graphs, more slowly: "


def call_with(fake_device, fault, new_tokens):
    """What two calls note, whose prompts take 64 columns, and of what they warn."""
    options = {"fault": fault, "new_tokens": new_tokens}
    calls = fake_device.run("fakecuda.faults:decode_with", **options)
    return [(each["graphs"], each["replays"], each["holds"], each["left"]) for each in calls], [
        text.removeprefix(WITHOUT)
        for each in calls
        for text in each["warned"]
        if text.startswith(WITHOUT)
    ]


@pytest.mark.thorough
def test_each_shape_runs_once_as_it_is_before_it_is_captured(fake_device):
    noted, warned = call_with(fake_device, "none", 70)
    # 64 steps up to 128 columns, and 5 beyond.
    assert noted == [(2, 63 + 4, 2, [])] * 2
    assert warned == []


@pytest.mark.parametrize(
    ("fault", "begun", "reason"),
    [
        ("seen wait", 0, r"the model synchronizes with the GPU at faults\.py:\d+"),
        ("unseen wait", 0, r"CUDA error: operation not permitted .* synchronize at .* unseen_wait"),
        ("wrong", 1, "a model that minds captures"),
    ][:: 1 if ALL else 3],
)
def test_what_cannot_be_captured_is_told_and_leaves_nothing_behind(
    fake_device, fault, begun, reason
):
    noted, warned = call_with(fake_device, fault, 4)
    assert noted == [(begun, 0, 0, []), (0, 0, 0, [])], "the second call tries no more"
    assert len(warned) == (2 if fault == "seen wait" else 1)
    assert all(re.fullmatch(reason, text) for text in warned)


@pytest.mark.thorough
def test_after_a_failed_capture_numbers_are_drawn_and_no_graph_of_before_is_replayed(fake_device):
    before, after = fake_device.run("fakecuda.faults:decode_around_a_failed_capture")
    # 8 tokens: the first from the prompts, one as it is before the capture.
    assert before == [1, 6, 1]
    assert after == [0, 0, 0]


@pytest.mark.thorough
def test_cudnn_plans_attention_of_prompts_where_it_is_asked_for(fake_device):
    longest = [50, 65, 70, 100, 127, 128, 129, 200]
    sizes = fake_device.run("fakecuda.programs:planned", longest=longest, asked=False)
    assert sizes == []
    # Up to multiples of 64, but the last, of which the cache has room for 248.
    sizes = fake_device.run("fakecuda.programs:planned", longest=longest, asked=True)
    assert sizes == [[64, 64], [128, 128], [192, 192], [248, 248]]


@pytest.mark.parametrize("copies", [4, 1][: 2 if ALL else 1])
def test_rows_are_refilled_by_replays_and_the_host_waits_for_its_looks_alone(fake_device, copies):
    few, many = (
        fake_device.run("fakecuda.programs:refill", shape="opt-1.3b", layers=layers, copies=copies)
        for layers in (2, 24 if ALL else 3)
    )
    for noted in (few, many):
        assert [place.split()[-1] for place in noted["waits"]] == ["drawn"]
        assert noted["graphs"] == 0
        assert min(noted["joined"][:-1]) >= 8 // 4
    looks = sum(many["waits"].values())
    # One for each join where tokens run out at once, and those of every 16 tokens between.
    assert len(many["joined"]) <= looks <= len(many["joined"]) + 15
    # All that layers do is recorded, but for copies of factors and biases once a call, by an
    # operation for those of a type.
    assert many["launches"] == few["launches"]


@of_the_whole
@pytest.mark.thorough
def test_requests_that_come_and_go_replay_steps(fake_device):
    noted = fake_device.run("fakecuda.programs:serve", shape="opt-1.3b", layers=2)
    assert noted["warned"] == []
    # Three requests in four rows, then two in two up to 128 columns, and in a larger cache; the
    # first step of each shape runs as it is.
    assert (noted["graphs"], noted["replays"]) == (3, 9 + 17 + 11)
    assert {place.split()[-1] for place in noted["waits"]} == {"record"}
