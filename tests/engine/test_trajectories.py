"""Training at every ZeRO stage, in one and two processes, in three types: one and the same run."""

from functools import cache

import pytest
import torch

from dschat_lora.config.options import parse_config
from dschat_lora.config.stages import SupervisedConfig
from dschat_lora.runtime.micro_batches import smaller_micro_batches
from helpers.spread import ALL, pairwise

pytestmark = pytest.mark.stage

STAGES = (0, 1, 2, 3)
OVERFLOW = 2
STEPS = {"fp32": 8, "bf16": 6, "fp16": 6}
ROWS = pairwise({"dtype": tuple(STEPS), "size": (1, 2), "stage": STAGES})
# dtype -> (processes, stage) of each run
PLACES = {d: [(r["size"], r["stage"]) for r in ROWS if r["dtype"] == d] for d in STEPS}
# In one process, stages 1 and 2 share out nothing.
SPREAD = {1: (0, 3), 2: STAGES}
# Largest difference of a loss between any two of the runs.
TOLERANCE = {"fp32": 1e-5, "bf16": 1e-2, "fp16": 1e-2}
every_dtype = pytest.mark.parametrize("dtype", TOLERANCE if ALL else ["fp32", "fp16"])


@pytest.fixture(scope="module")
def trajectories(ranks, model_directory):
    """``trajectories(dtype)``: {(world size, stage): report}; fp16 overflows on one rank once."""

    @cache
    def of(dtype):
        run = {"path": model_directory("opt"), "dtype": dtype, "steps": STEPS[dtype]}
        run |= {"accumulation": 2, "overflow_at": OVERFLOW if dtype == "fp16" else None}
        reports = {}
        for size in (1, 2):
            places = [place for place in PLACES[dtype] if place[0] == size]
            runs = [run | {"micro": 4 // size, "stage": stage} for _, stage in places]
            results = ranks(size).run("helpers.runs:train_many", runs=runs)[0]
            reports |= zip(places, results, strict=True)
        return reports

    return of


@every_dtype
def test_losses_agree_over_zero_stages_and_processes(trajectories, dtype):
    losses = torch.tensor([r["losses"] for r in trajectories(dtype).values()])
    assert losses.shape == (len(PLACES[dtype]), STEPS[dtype])
    spread = (losses.max(0).values - losses.min(0).values).max()
    assert spread <= TOLERANCE[dtype]
    # The agreement says something only where training moves the loss much further.
    assert losses[0].max() - losses[0].min() > 10 * TOLERANCE[dtype]


@every_dtype
def test_gradient_norms_are_reported_and_agree_over_zero_stages_and_processes(trajectories, dtype):
    norms = torch.tensor([r["norms"] for r in trajectories(dtype).values()])
    if dtype == "fp16":
        assert not norms[:, OVERFLOW].isfinite().any()
        norms = torch.cat([norms[:, :OVERFLOW], norms[:, OVERFLOW + 1 :]], dim=1)
    assert (norms > 0).all()
    rtol = 1e-5 if dtype == "fp32" else 0.05
    torch.testing.assert_close(norms, norms[:1].expand_as(norms), rtol=rtol, atol=0.0)


@every_dtype
def test_trained_adapters_agree_over_zero_stages_and_the_base_keeps_its_bits(trajectories, dtype):
    reports = list(trajectories(dtype).values())
    for report in reports:
        assert report["base_changed"] == []
        assert all(value.abs().max() > 0 for value in report["trained"].values())
    atol = {"fp32": 1e-5, "bf16": 0.03, "fp16": 0.03}[dtype]
    for name, expected in reports[0]["trained"].items():
        assert expected.dtype == torch.float32
        for report in reports[1:]:
            torch.testing.assert_close(report["trained"][name], expected, rtol=0.0, atol=atol)


def test_overflow_on_one_rank_is_skipped_and_recorded_at_every_stage(trajectories):
    for report in trajectories("fp16").values():
        assert [step for step, skipped in enumerate(report["skipped"]) if skipped] == [OVERFLOW]
        assert report["scales"][0] == 2.0**16
        assert report["scales"][-1] <= report["scales"][0]


def test_only_fp16_has_a_loss_scale(trajectories):
    for dtype in ("fp32", *["bf16"] * ALL):
        for report in trajectories(dtype).values():
            assert set(report["scales"]) == {1.0}
            assert not any(report["skipped"])


@pytest.mark.thorough
@pytest.mark.parametrize("size", [1, 2] if ALL else [2])
def test_too_large_a_loss_scale_is_halved_alike_at_every_stage(ranks, model_directory, size):
    run = {
        "path": model_directory("opt"),
        "dtype": "fp16",
        "deepspeed_json": {"fp16": {"initial_scale_power": 22, "hysteresis": 1}},
        "steps": 8,
        "micro": 4 // size,
    }
    runs = [run | {"stage": stage} for stage in SPREAD[size]]
    reports = ranks(size).run("helpers.runs:train_many", runs=runs)[0]
    # Up to the first update nothing is rounded differently, so that all skip the same steps.
    skips = reports[0]["skipped"].index(False)
    assert 1 < skips < 8
    for report in reports:
        assert report["skipped"][: skips + 1] == [True] * skips + [False]
        assert report["scales"][: skips + 1] == [2.0 ** (22 - step) for step in range(skips + 1)]
        assert report["scales"][-1] == 2.0 ** (22 - sum(report["skipped"][:-1]))
        assert report["losses"] == pytest.approx(reports[0]["losses"], abs=1e-2)


# What trains, and on what: against the plain run of one process at stage 0.
TRAINED = {
    "adapters": {},
    "every weight": {"lora": {"lora_dim": 0}},
    "adapters and base": {"lora": {"lora_dim": 4, "only_optimize_lora": False}},
}
FACTORS = {
    "trained": tuple(TRAINED),
    "dtype": tuple(TOLERANCE),
    "size": (1, 2),
    "stage": STAGES,
    "offload": (False, True),
    "checkpointing": (False, True),
}


def is_possible(row):
    # Stage 0 shares out no optimizer state that could be kept elsewhere, and DeepSpeed does not
    # keep fp32 masters of fp16 weights on a CPU.
    has_masters = row["dtype"] != "fp16" or row["trained"] == "adapters"
    return has_masters and not (row["offload"] and row["stage"] == 0)


COMBINATIONS = pairwise(FACTORS, is_possible)
CHOSEN = COMBINATIONS[:: 1 if ALL else 3]


def named(row):
    words = [str(value) for value in row.values() if not isinstance(value, bool)]
    return ", ".join([*words, *(name for name, value in row.items() if value is True)])


@pytest.fixture(scope="module")
def combined(ranks, model_directory):
    """``combined(row)``: the report of a combination, and of the plain run."""
    plain = [
        {"trained": trained, "dtype": dtype, "size": 1, "stage": 0}
        for trained, dtype in {(row["trained"], row["dtype"]): None for row in CHOSEN}
    ]
    done = {}

    def of(row):
        if not done:
            for size in (1, 2):
                rows = [each for each in [*plain, *CHOSEN] if each["size"] == size]
                runs = [
                    {
                        "path": model_directory("llama"),
                        "steps": 4,
                        "micro": 4 // size,
                        **options(each),
                    }
                    for each in rows
                ]
                reports = ranks(size).run("helpers.runs:train_many", timeout=300, runs=runs)[0]
                done.update(zip(map(named, rows), reports, strict=True))
        return done[named(row)], done[f"{row['trained']}, {row['dtype']}, 1, 0"]

    return of


def options(row):
    return {**TRAINED[row["trained"]], **{n: row[n] for n in row if n not in ("trained", "size")}}


@pytest.mark.parametrize("row", CHOSEN, ids=named)
def test_losses_are_those_of_a_plain_run_whatever_is_shared_out_offloaded_and_recomputed(
    combined, row
):
    report, plain = combined(row)
    assert report["losses"] == pytest.approx(plain["losses"], abs=TOLERANCE[row["dtype"]])
    if row["trained"] == "adapters":
        assert report["base_changed"] == []
    if row["trained"] == "every weight":
        rtol = 1e-4 if row["dtype"] == "fp32" else 0.05
        assert report["norms"] == pytest.approx(plain["norms"], rel=rtol)


@pytest.mark.parametrize("size", [1, 2])
def test_losses_are_those_of_whole_steps_where_they_are_divided_or_recomputed(
    ranks, model_directory, size
):
    """What ``auto`` chooses between: the same rows in a step, packed, in other micro-batches."""
    rows = ["--per_device_train_batch_size", str(8 // size)]
    smaller = smaller_micro_batches(parse_config(SupervisedConfig, rows), longest=32)
    sizes = [tuple(options.values()) for options in smaller]
    assert sizes == [(rows, 8 // size // rows) for rows in {1: (4, 2, 1), 2: (2, 1)}[size]]
    run = {"path": model_directory("llama"), "steps": 4, "packing": True}
    whole = {"micro": 8 // size, "accumulation": 1}
    runs = [whole, whole | {"checkpointing": True}]
    runs += [{"micro": micro, "accumulation": times} for micro, times in sizes]
    runs = [run | each for each in runs]
    first, *others = ranks(size).run("helpers.runs:train_many", runs=runs)[0]
    for each in others:
        assert each["losses"] == pytest.approx(first["losses"], abs=1e-5)
        assert each["norms"] == pytest.approx(first["norms"], rel=1e-4)
        assert each["targets"] == first["targets"]
    assert max(first["losses"]) - min(first["losses"]) > 1e-4


def test_run_whose_loss_scale_reaches_its_minimum_ends_with_a_clear_line(ranks, model_directory):
    for stage in (0, 2):
        (result,) = ranks(1).run(
            "helpers.runs:fit_with_infinite_gradients",
            path=model_directory("opt"),
            stage=stage,
            dtype="fp16",
        )
        assert "not finite" in result["error"]
