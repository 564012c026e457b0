"""Training on a 4-bit base: one run at every ZeRO stage, in one and two processes."""

import pytest
import torch
from safetensors.torch import load_file

from helpers.spread import ALL

pytestmark = pytest.mark.stage
PLACES = [(1, 0), *((2, stage) for stage in range(4)), (1, 3)] if ALL else [(1, 0), (2, 3)]
STEPS = 20 if ALL else 5


@pytest.fixture(scope="module")
def reports(ranks, model_directory, tmp_path_factory):
    """{(processes, stage): report of the run, with the directory of its merged model}."""
    by_place = {}
    for size, stage in PLACES:
        merged = tmp_path_factory.mktemp(f"merged{size}{stage}") / "model"
        run = {
            **{"path": model_directory("llama"), "bits": 4, "steps": STEPS, "stage": stage},
            **{"micro": 4 // size, "accumulation": 2, "save_merged_to": str(merged)},
        }
        report = ranks(size).run("helpers.runs:train", **run)[0]
        by_place[size, stage] = report | {"merged": merged}
    return by_place


@pytest.mark.thorough
def test_losses_agree_over_zero_stages_and_processes(reports):
    losses = torch.tensor([report["losses"] for report in reports.values()])
    assert losses.shape == (len(PLACES), STEPS)
    assert (losses.max(0).values - losses.min(0).values).max() <= 1e-5
    assert losses[0].max() - losses[0].min() > 1e-3


@pytest.mark.thorough
def test_no_code_of_the_base_changes(reports):
    assert [report["base_changed"] for report in reports.values()] == [[]] * len(PLACES)


@pytest.mark.thorough
def test_merged_models_agree_and_are_whole(reports):
    merged = [load_file(report["merged"] / "model.safetensors") for report in reports.values()]
    for name, expected in merged[0].items():
        assert expected.is_floating_point(), name
        for other in merged[1:]:
            torch.testing.assert_close(other[name], expected, rtol=1e-4, atol=1e-4)
    assert "quantization_config" not in (reports[1, 0]["merged"] / "config.json").read_text()
