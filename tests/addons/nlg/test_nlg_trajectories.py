"""Training GPT-2 as microsoft/LoRA does: every ZeRO stage and process count is loralib's run."""

import nlg_runs
import pytest
import torch

from helpers.spread import ALL

pytestmark = pytest.mark.stage

# (processes, ZeRO stage, rows of a micro-batch, accumulation): 8 rows a step
LAYOUTS = [(1, 0, 8, 1), (1, 0, 2, 4), (2, 0, 4, 1), (2, 1, 2, 2), (2, 2, 1, 4), (2, 3, 4, 1)]
LAYOUTS = LAYOUTS if ALL else LAYOUTS[1::3]


@pytest.fixture(scope="module")
def runs(ranks, model_directory):
    """The run of each layout, and under None loralib's."""
    path = model_directory("gpt2")
    runs_of = {None: nlg_runs.loralibs(path)}
    for size in (1, 2):
        layouts = [layout for layout in LAYOUTS if layout[0] == size]
        wanted = [{"stage": s, "micro": m, "accumulation": a} for _, s, m, a in layouts]
        reports = ranks(size).run("nlg_runs:ours_many", path=path, runs=wanted)
        runs_of |= dict(zip(layouts, reports[0], strict=True))
        for layout, *each in zip(layouts, *reports, strict=True):
            runs_of[layout] |= {"ranks": [report["own"] for report in each]}
    return runs_of


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_losses_and_gradient_norms_are_loralibs(runs, layout):
    for name in ("losses", "norms"):
        torch.testing.assert_close(
            torch.tensor(runs[layout][name]), torch.tensor(runs[None][name]), rtol=2e-6, atol=0
        )


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_trained_factors_are_loralibs(runs, layout):
    factors, expected = runs[layout]["factors"], runs[None]["factors"]
    assert factors.keys() == expected.keys()
    for name, tensor in factors.items():
        assert tensor.abs().max() > 1e-3
        torch.testing.assert_close(tensor, expected[name], rtol=0, atol=1e-6)


@pytest.mark.parametrize("layout", [each for each in LAYOUTS if each[0] == 2 and each[1] < 3])
def test_every_process_has_the_same_factors_bit_for_bit(runs, layout):
    first, second = runs[layout]["ranks"]
    assert all(torch.equal(first[name], second[name]) for name in first)
