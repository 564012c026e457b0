"""Training experts' adapters: one run at every ZeRO stage, in one and two processes."""

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from helpers.runs import LORA
from helpers.spread import ALL

pytestmark = pytest.mark.stage
PLACES = [(1, 0), *((2, stage) for stage in range(4)), (1, 3)] if ALL else [(1, 0), (2, 3)]
STEPS = 20 if ALL else 5


@pytest.fixture(scope="module")
def reports(ranks, model_directory, tmp_path_factory):
    """{(processes, stage): report of the run, with the directories of what it saved}."""
    by_place = {}
    for size, stage in PLACES:
        home = tmp_path_factory.mktemp(f"experts{size}{stage}")
        run = {
            **{"path": model_directory("qwen3_moe"), "steps": STEPS, "stage": stage},
            **{"micro": 4 // size, "accumulation": 2, "checkpointing": stage == 3},
            "lora": LORA | {"expert_lora_dim": LORA["lora_dim"]},
            **{"save_merged_to": str(home / "model"), "save_adapter_to": str(home / "adapter")},
        }
        by_place[size, stage] = ranks(size).run("helpers.runs:train", **run)[0] | {"home": home}
    return by_place


def test_losses_agree_over_zero_stages_and_processes(reports):
    losses = torch.tensor([report["losses"] for report in reports.values()])
    assert losses.shape == (len(PLACES), STEPS)
    assert (losses.max(0).values - losses.min(0).values).max() <= 1e-5
    assert losses[0].max() - losses[0].min() > 1e-3


def test_nothing_of_the_base_changes(reports):
    assert [report["base_changed"] for report in reports.values()] == [[]] * len(PLACES)


def test_every_expert_that_was_chosen_has_learned(reports):
    for report in reports.values():
        tensors = load_file(report["home"] / "adapter" / "adapter_model.safetensors")
        factors = [t for name, t in tensors.items() if ".experts." in name and "lora_B" in name]
        assert len(factors) == 4
        assert all(factor.any() for factor in factors)


def test_merged_models_agree_and_are_those_of_stock_peft(reports, model_directory):
    tensors = {
        place: load_file(report["home"] / "model" / "model.safetensors")
        for place, report in reports.items()
    }
    for place, report in reports.items():
        base = AutoModelForCausalLM.from_pretrained(model_directory("qwen3_moe"))
        theirs = PeftModel.from_pretrained(base, report["home"] / "adapter").merge_and_unload()
        whole = AutoModelForCausalLM.from_pretrained(report["home"] / "model")
        for name, tensor in whole.state_dict().items():
            torch.testing.assert_close(tensor, theirs.state_dict()[name], rtol=0, atol=1e-6)
        for name, expected in tensors[PLACES[0]].items():
            torch.testing.assert_close(tensors[place][name], expected, rtol=1e-4, atol=1e-4)
