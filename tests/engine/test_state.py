"""What an engine has learnt goes from any ZeRO stage and size to any other, bit for bit."""

import re
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from dschat_lora.engine.state import EngineState, check_same_names
from helpers.spread import ALL
from helpers.states import Toy, toy_groups, toy_loss

pytestmark = pytest.mark.stage

# A loss scale that an overflow and a few good steps move.
SCALING = {"fp16": {"initial_scale_power": 8, "loss_scale_window": 4, "hysteresis": 2}}
FULL = {"lora_dim": 0}
CASES = {
    "adapters in fp32": ((0, 2, 3, 1, 0), {}, ()),
    "every weight in fp32": ((0, 2, 3, 0), {"lora": FULL}, ()),
    "every weight in bf16": ((1, 2, 3, 1), {"lora": FULL, "dtype": "bf16"}, ()),
    "adapters in fp16": ((0, 2, 3, 0), {"dtype": "fp16", "deepspeed_json": SCALING}, (1, 2)),
}
# Steps after each hand-over: until the loss scale is doubled.
FURTHER = {case: 6 if "fp16" in case else 2 for case in CASES}
# (case, processes)
PLACES = [
    (case, size)
    for case in CASES
    for size in (1, 2)
    if ALL or (size, case) == (2, "adapters in fp16")
]
# Between stages a step's loss differs by rounding: of bf16 weights, of 16-bit activations.
TOLERANCE = {"adapters in fp32": 1e-5, "every weight in fp32": 1e-5}


@pytest.fixture(scope="module")
def carried(ranks, model_directory):
    """``carried(case, size)``: the reports of :func:`helpers.states.carry`, from rank 0."""

    @cache
    def of(case, size):
        stages, common, overflow_at = CASES[case]
        return ranks(size).run(
            "helpers.states:carry",
            path=model_directory("opt"),
            holders=[{"stage": stage} for stage in stages],
            common=common,
            overflow_at=overflow_at,
            further=FURTHER[case],
        )[0]

    return of


def bits(tensor):
    """The tensor as integers, so that the signs of zeros count."""
    return tensor.contiguous().view(torch.int32 if tensor.dtype == torch.float32 else torch.int16)


def assert_same_tensors(found, expected):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert found[name].shape == tensor.shape, name
        assert torch.equal(bits(found[name]), bits(tensor)), name


def assert_same_state(found, expected):
    assert found["facts"] == expected["facts"]
    assert_same_tensors(found["tensors"], expected["tensors"])


both_sizes = pytest.mark.parametrize("size", [1, 2] if ALL else [2])
every_place = pytest.mark.parametrize(("case", "size"), PLACES)
every_case = pytest.mark.parametrize("case", CASES if ALL else ["adapters in fp32"])


@every_place
def test_state_and_model_pass_through_every_stage_bit_for_bit(carried, case, size):
    first, *others = carried(case, size)
    steps = first["facts"]["optimizer_steps"]
    assert set(steps.values()) == {3 - len(CASES[case][2])}
    kinds = ("weight", "exp_avg", "exp_avg_sq")
    assert first["tensors"].keys() == {f"{kind}:{name}" for kind in kinds for name in steps}
    assert all(tensor.dtype == torch.float32 for tensor in first["tensors"].values())
    for name in steps:
        # Of 16-bit weights, the state holds the fp32 masters.
        weight = first["tensors"][f"weight:{name}"].to(first["model"][name].dtype)
        assert torch.equal(first["model"][name], weight), name
    for report in others:
        assert_same_state(report, first)
        assert_same_tensors(report["model"], first["model"])


@every_place
def test_same_stage_goes_on_to_the_bit_and_others_with_the_same_losses(carried, case, size):
    first, *others = carried(case, size)
    last = others[-1]
    assert last["further"] == first["further"]
    assert_same_state(last["later"], first["later"])
    steps = 3 - len(CASES[case][2]) + FURTHER[case]
    assert set(last["later"]["facts"]["optimizer_steps"].values()) == {steps}
    weights = [key for key in first["tensors"] if key.startswith("weight")]
    assert not all(torch.equal(first["tensors"][k], last["later"]["tensors"][k]) for k in weights)
    expected, *_ = zip(*first["further"], strict=True)
    for report in others:
        losses, *_ = zip(*report["further"], strict=True)
        assert losses == pytest.approx(expected, abs=TOLERANCE.get(case, 1e-2))
        # Nothing was rounded yet where the first of them is computed.
        assert losses[0] == pytest.approx(expected[0], abs=1e-5)


@both_sizes
def test_loss_scale_of_fp16_goes_on_where_it_was(carried, size):
    first, *others = carried("adapters in fp16", size)
    # The second overflow halved 2^8; the fifth good step after it doubles it.
    assert first["facts"]["loss_scaler"] == {
        "cur_scale": 128.0, "cur_iter": 3, "last_overflow_iter": 2, "cur_hysteresis": 1
    }  # fmt: skip
    for report in (first, *others):
        assert [scale for *_, scale in report["further"]] == [128.0] * 5 + [256.0]


@every_case
def test_state_of_one_process_goes_to_two_and_back_bit_for_bit(
    ranks, model_directory, case, tmp_path
):
    stages, common, overflow_at = CASES[case]
    alone = [{"stage": stages[0]}]
    passed = {"path": model_directory("opt"), "common": common, "further": 1}
    one, two, back = (str(tmp_path / name) for name in ("one", "two", "back"))
    ((first,),) = ranks(1).run(
        "helpers.states:carry", holders=alone, overflow_at=overflow_at, write_to=one, **passed
    )
    holders = [{"stage": stage} for stage in (stages[0], 2, 3)]
    there = ranks(2).run(
        "helpers.states:carry", holders=holders, read_from=one, write_to=two, **passed
    )[0]
    ((home,),) = ranks(1).run(
        "helpers.states:carry", holders=alone, read_from=two, write_to=back, **passed
    )
    for report in there:
        assert_same_state(report, first)
        assert report["further"][0][0] == pytest.approx(first["further"][0][0], abs=1e-5)
    assert_same_state(home, first)
    assert home["further"] == first["further"]
    assert_same_state(home["later"], first["later"])
    files = [next(Path(run).rglob("model-*.safetensors")) for run in (one, two, back)]
    assert files[0].read_bytes() == files[1].read_bytes() == files[2].read_bytes()


# ---------------------------------------------------------------------------- odd sizes


@both_sizes
def test_odd_sizes_groups_and_negative_zeros_pass_through_every_stage(ranks, size):
    holders = [{"stage": stage} for stage in (0, 1, 2, 3, 0)]
    holders[3:3] = [{"stage": 3, "zero": {"sub_group_size": 16}}]
    holders[3:3] = [{"stage": stage, "offload": True} for stage in (2, 3)]
    first, *others = ranks(size).run("helpers.states:carry", holders=holders, planted=True)[0]
    for tensor in first["tensors"].values():
        assert int(bits(tensor.flatten()[:1])) == -(2**31)
    for report in others:
        assert_same_state(report, first)
        assert_same_tensors(report["model"], first["model"])
        for (loss, norm, _), (loss0, norm0, _) in zip(
            report["further"], first["further"], strict=True
        ):
            assert (loss, norm) == pytest.approx((loss0, norm0), rel=1e-5)
    assert others[-1]["further"] == first["further"]
    assert_same_state(others[-1]["later"], first["later"])


@both_sizes
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_state_is_that_of_torchs_adamw(ranks, size, stage):
    (report,) = ranks(size).run("helpers.states:carry", holders=[{"stage": stage}])[0]
    model = Toy()
    adam = torch.optim.AdamW(toy_groups(model), betas=(0.9, 0.95), eps=1e-8)
    for step in range(3):
        adam.zero_grad()
        (toy_loss(model, step) / 6).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adam.step()
    assert report["facts"] == {
        "optimizer_steps": dict.fromkeys(("inner", "outer", "bias", "gain"), 3),
        "loss_scaler": None,
    }
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(report["tensors"][f"weight:{name}"], parameter.detach())
        for key in ("exp_avg", "exp_avg_sq"):
            expected = adam.state[parameter][key]
            torch.testing.assert_close(report["tensors"][f"{key}:{name}"], expected)


@both_sizes
def test_run_whose_every_step_was_skipped_has_no_moments_and_goes_on(ranks, size):
    holders = [{"stage": stage} for stage in (0, 1, 2, 3, 0)]
    first, *others = ranks(size).run(
        "helpers.states:carry", holders=holders, steps=2, overflow_at=(0, 1)
    )[0]
    assert [norm for _, norm, _ in first["before"]] == [float("inf")] * 2
    names = [name for name, _ in Toy().named_parameters()]
    assert first["facts"]["optimizer_steps"] == dict.fromkeys(names, 0)
    assert_same_tensors(
        first["tensors"], {f"weight:{n}": p.detach() for n, p in Toy().named_parameters()}
    )
    for report in others:
        assert_same_state(report, first)
    assert others[-1]["further"] == first["further"]
    assert_same_state(others[-1]["later"], first["later"])
    assert first["later"]["facts"]["optimizer_steps"] == dict.fromkeys(names, 3)


@pytest.mark.parametrize(
    ("now", "then", "message"),
    [
        ("a b c", "a", "the checkpoint lacks b: other parameters train now (2 differ)"),
        ("a", "a b", "the checkpoint holds b: other parameters train now (1 differ)"),
        ("b", "a", "the checkpoint lacks b: other parameters train now (2 differ)"),
    ],
)
def test_state_of_other_parameters_is_refused_by_name(now, then, message):
    whole = re.escape(f"{message}; resume with the options it was written with")
    with pytest.raises(ValueError, match=f"^{whole}$"):
        check_same_names(dict.fromkeys(now.split()), dict.fromkeys(then.split()))


def test_tensor_of_another_shape_is_refused_and_never_broadcast():
    layer = torch.nn.Linear(3, 2, bias=False)
    before = layer.weight.detach().clone()
    adam = torch.optim.AdamW(layer.parameters())
    kept = {"zero_stage": 0, "device": "cpu", "optimizer": None, "loss_scaler": None}
    state = EngineState(SimpleNamespace(adam=adam, **kept), layer)
    facts = {"optimizer_steps": {"weight": 0}, "loss_scaler": None}
    message = r"the checkpoint's weight:weight has shape \[1, 3\], not \[2, 3\]"
    with pytest.raises(ValueError, match=message):
        state.load(facts, lambda key: torch.ones(1, 3))
    assert torch.equal(layer.weight, before)
