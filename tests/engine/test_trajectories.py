"""Up to thirty steps of training at every ZeRO stage, in one and two processes, in three types."""

import pytest
import torch

pytestmark = pytest.mark.stage

STAGES = (0, 1, 2, 3)
OVERFLOW = 4
STEPS = {"fp32": 30, "bf16": 12, "fp16": 12}
# In one process, stages 1 and 2 share out nothing.
SPREAD = {1: (0, 3), 2: STAGES}
PLACES = {"fp32": {1: STAGES, 2: STAGES}, "bf16": SPREAD, "fp16": SPREAD}
# Largest difference of a loss between any two of the runs.
TOLERANCE = {"fp32": 1e-5, "bf16": 1e-2, "fp16": 1e-2}


@pytest.fixture(scope="module")
def trajectories(ranks, model_directory):
    """``trajectories(dtype)``: {(world size, stage): report}; fp16 overflows on one rank once."""
    done = {}

    def of(dtype):
        if dtype not in done:
            done[dtype] = {
                (size, stage): report
                for size, stages in PLACES[dtype].items()
                for stage, report in zip(
                    stages, _runs(ranks(size), model_directory("opt"), dtype), strict=True
                )
            }
        return done[dtype]

    return of


def _runs(ranks, path, dtype):
    run = {"path": path, "dtype": dtype, "steps": STEPS[dtype], "micro": 4 // ranks.size}
    run |= {"accumulation": 2, "overflow_at": OVERFLOW if dtype == "fp16" else None}
    runs = [run | {"stage": stage} for stage in PLACES[dtype][ranks.size]]
    return ranks.run("helpers.runs:train_many", runs=runs)[0]


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_losses_agree_over_zero_stages_and_processes(trajectories, dtype):
    losses = torch.tensor([r["losses"] for r in trajectories(dtype).values()])
    assert losses.shape == (8 if dtype == "fp32" else 6, STEPS[dtype])
    spread = (losses.max(0).values - losses.min(0).values).max()
    assert spread <= TOLERANCE[dtype]
    # The agreement says something only where training moves the loss much further.
    assert losses[0].max() - losses[0].min() > 10 * TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_gradient_norms_are_reported_and_agree_over_zero_stages_and_processes(trajectories, dtype):
    norms = torch.tensor([r["norms"] for r in trajectories(dtype).values()])
    if dtype == "fp16":
        assert not norms[:, OVERFLOW].isfinite().any()
        norms = torch.cat([norms[:, :OVERFLOW], norms[:, OVERFLOW + 1 :]], dim=1)
    assert (norms > 0).all()
    rtol = 1e-5 if dtype == "fp32" else 0.05
    torch.testing.assert_close(norms, norms[:1].expand_as(norms), rtol=rtol, atol=0.0)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_trained_adapters_agree_over_zero_stages_and_processes(trajectories, dtype):
    reports = list(trajectories(dtype).values())
    atol = {"fp32": 1e-5, "bf16": 0.03, "fp16": 0.03}[dtype]
    for name, expected in reports[0]["trained"].items():
        assert expected.dtype == torch.float32
        for report in reports[1:]:
            torch.testing.assert_close(report["trained"][name], expected, rtol=0.0, atol=atol)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_base_weights_are_bit_identical_after_training(trajectories, dtype):
    for report in trajectories(dtype).values():
        assert report["base_changed"] == []
        assert all(value.abs().max() > 0 for value in report["trained"].values())


def test_overflow_on_one_rank_is_skipped_and_recorded_at_every_stage(trajectories):
    for report in trajectories("fp16").values():
        assert [step for step, skipped in enumerate(report["skipped"]) if skipped] == [OVERFLOW]
        assert report["scales"][0] == 2.0**16
        assert report["scales"][-1] <= report["scales"][0]


def test_only_fp16_has_a_loss_scale(trajectories):
    for dtype in ("fp32", "bf16"):
        for report in trajectories(dtype).values():
            assert set(report["scales"]) == {1.0}
            assert not any(report["skipped"])


@pytest.mark.parametrize("size", [1, 2])
def test_too_large_a_loss_scale_is_halved_alike_at_every_stage(ranks, model_directory, size):
    run = {
        "path": model_directory("opt"),
        "dtype": "fp16",
        "deepspeed_json": {"fp16": {"initial_scale_power": 22, "hysteresis": 1}},
        "steps": 10,
        "micro": 4 // size,
    }
    runs = [run | {"stage": stage} for stage in STAGES]
    reports = ranks(size).run("helpers.runs:train_many", runs=runs)[0]
    # Up to the first update nothing is rounded differently, so that all skip the same steps.
    skips = reports[0]["skipped"].index(False)
    assert 1 < skips < 8
    for report in reports:
        assert report["skipped"][: skips + 1] == [True] * skips + [False]
        assert report["scales"][: skips + 1] == [2.0 ** (22 - step) for step in range(skips + 1)]
        assert report["scales"][-1] == 2.0 ** (22 - sum(report["skipped"][:-1]))
        assert report["losses"] == pytest.approx(reports[0]["losses"], abs=1e-2)


# DeepSpeed does not keep fp32 masters of fp16 weights on a CPU.
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_full_fine_tuning_agrees_over_zero_stages_and_processes(ranks, model_directory, dtype):
    run = {"path": model_directory("llama"), "lora": {"lora_dim": 0}, "dtype": dtype, "steps": 6}
    reports = [
        report
        for size, stages in SPREAD.items()
        for report in ranks(size).run(
            "helpers.runs:train_many",
            runs=[run | {"micro": 4 // size, "stage": stage} for stage in stages],
        )[0]
    ]
    losses = torch.tensor([report["losses"] for report in reports])
    assert (losses.max(0).values - losses.min(0).values).max() <= TOLERANCE[dtype]
    norms = torch.tensor([report["norms"] for report in reports])
    rtol = 1e-4 if dtype == "fp32" else 0.05
    torch.testing.assert_close(norms, norms[:1].expand_as(norms), rtol=rtol, atol=0.0)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_offload_and_recomputation_change_no_loss(ranks, model_directory, dtype, size):
    run = {"path": model_directory("llama"), "dtype": dtype, "steps": 5, "micro": 4 // size}
    plain, *others = ranks(size).run(
        "helpers.runs:train_many",
        runs=[run | {"stage": 0}]
        + [run | {"stage": stage, "offload": True} for stage in (1, 2, 3)]
        + [run | {"stage": stage, "checkpointing": True} for stage in (0, 3)]
        + [run | {"stage": 3, "checkpointing": True, "offload": True}],
    )[0]
    for report in others:
        assert report["losses"] == pytest.approx(plain["losses"], abs=TOLERANCE[dtype])
        assert report["base_changed"] == []


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_adapters_beside_a_trained_base_agree_over_zero_stages(ranks, model_directory, dtype):
    lora = {"lora_dim": 4, "only_optimize_lora": False}
    run = {"path": model_directory("llama"), "lora": lora, "dtype": dtype, "steps": 5, "micro": 2}
    runs = [run | {"stage": stage} for stage in STAGES]
    losses = torch.tensor(
        [r["losses"] for r in ranks(2).run("helpers.runs:train_many", runs=runs)[0]]
    )
    assert (losses.max(0).values - losses.min(0).values).max() <= TOLERANCE[dtype]


def test_run_whose_loss_scale_reaches_its_minimum_ends_with_a_clear_line(ranks, model_directory):
    for stage in (0, 2):
        (result,) = ranks(1).run(
            "helpers.runs:fit_with_infinite_gradients",
            path=model_directory("opt"),
            stage=stage,
            dtype="fp16",
        )
        assert "not finite" in result["error"]
