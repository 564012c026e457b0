"""What a trained engine leaves behind, at every ZeRO stage, loaded by stock libraries."""

import json

import peft
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from dschat_lora.checkpoint.adapter import load_adapter, lora_config_of
from dschat_lora.lora.model import adapter_parameters, apply_lora
from helpers.runs import load_model
from helpers.spread import ALL
from helpers.tiny import VOCAB

pytestmark = [pytest.mark.stage, pytest.mark.filterwarnings("ignore::UserWarning")]

RUNS = {
    "adapter": {"lora_dim": 4, "lora_alpha": 8.0},
    "adapted head": {"lora_dim": 4, "target_modules": ["lm_head", "q_proj"]},
    "full": {"lora_dim": 0},
}
KINDS = {"opt": "tied", "llama": "untied"}
# (processes, stage) of each run; each names its first to compare with
SHAPES = {
    "adapter": [(2, 0), *[(2, 1), (2, 2)] * ALL, (2, 3), (1, 0)],
    "adapted head": [(2, 0), (2, 3), *[(1, 0)] * ALL],
    "full": [(2, 0), *[(2, 2)] * ALL, (2, 3)],
}


@pytest.fixture(scope="module")
def exported(ranks, model_directory, tmp_path_factory):
    """{(kind, run): {(size, stage): (directory, report of rank 0)}} after two steps."""
    root, done = tmp_path_factory.mktemp("exported"), {}
    for size in (2, 1):
        runs, keys = [], []
        for kind in KINDS:
            for name, lora in RUNS.items():
                for stage in [stage for n, stage in SHAPES[name] if n == size]:
                    directory = root / f"{kind}-{name}-{size}-{stage}"
                    run = {"path": model_directory(kind), "lora": lora, "stage": stage}
                    run |= {"steps": 2, "micro": 4 // size, "accumulation": 1}
                    run["save_merged_to"] = str(directory / "model")
                    if lora["lora_dim"]:
                        run["save_adapter_to"] = str(directory / "adapter")
                    runs.append(run)
                    keys.append(((kind, name), (size, stage), directory))
        reports = ranks(size).run("helpers.runs:train_many", runs=runs)[0]
        for (run, shape, directory), report in zip(keys, reports, strict=True):
            done.setdefault(run, {})[shape] = (directory, report)
    return done


@torch.no_grad()
def logits(model):
    ids = torch.randint(3, VOCAB, (3, 9), generator=torch.Generator().manual_seed(1))
    return model.eval()(ids).logits


@torch.no_grad()
def trained_logits(path, lora, report):
    """Logits of our layers with the trained values in place."""
    model = load_model(path, lora)
    parameters = dict(model.named_parameters())
    for name, value in report["trained"].items():
        parameters[name].copy_(value)
    return logits(model)


@pytest.mark.parametrize("name", ["adapter", "adapted head"])
@pytest.mark.parametrize("kind", KINDS)
def test_saved_adapter_is_that_of_every_stage_and_gives_the_trained_logits_in_stock_peft(
    exported, model_directory, kind, name
):
    shapes, path = exported[kind, name], model_directory(kind)
    first = load_file(shapes[2, 0][0] / "adapter" / "adapter_model.safetensors")
    config = (shapes[2, 0][0] / "adapter" / "adapter_config.json").read_bytes()
    for directory, report in shapes.values():
        tensors = load_file(directory / "adapter" / "adapter_model.safetensors")
        assert len(tensors) == len(report["trained"])
        torch.testing.assert_close(tensors, first, rtol=1e-5, atol=1e-6)
        assert (directory / "adapter" / "adapter_config.json").read_bytes() == config
        base = AutoModelForCausalLM.from_pretrained(path)
        untrained = logits(base)
        theirs = peft.PeftModel.from_pretrained(base, directory / "adapter")
        expected = trained_logits(path, RUNS[name], report)
        torch.testing.assert_close(logits(theirs), expected, rtol=1e-5, atol=1e-5)
        assert (expected - untrained).abs().max() > 0.01


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("kind", KINDS)
def test_merged_model_gives_the_trained_logits_in_transformers(
    exported, model_directory, kind, name
):
    path = model_directory(kind)
    for directory, report in exported[kind, name].values():
        merged = AutoModelForCausalLM.from_pretrained(directory / "model")
        expected = trained_logits(path, RUNS[name], report)
        torch.testing.assert_close(logits(merged), expected, rtol=1e-5, atol=1e-5)
        tied = merged.get_input_embeddings().weight is merged.get_output_embeddings().weight
        assert tied == (kind == "opt" and name != "adapted head")
        # transformers sees by itself that the two differ; other readers go by this.
        config = json.loads((directory / "model" / "config.json").read_text(encoding="utf-8"))
        assert config["tie_word_embeddings"] == tied
        # Every matrix where all weights train, nothing of the base where adapters do.
        changed = set(report["base_changed"])
        if name == "full":
            changed = {n for n in changed if "proj.weight" in n}
            assert changed == {n for n in report["trained"] if "proj.weight" in n}
        else:
            assert not changed


def test_training_continues_from_a_saved_adapter(exported, model_directory):
    directory, report = exported["llama", "adapter"][2, 3]
    model = AutoModelForCausalLM.from_pretrained(model_directory("llama"))
    apply_lora(model, lora_config_of(directory / "adapter"), seed=5)
    load_adapter(model, directory / "adapter")
    for name, value in adapter_parameters(model).items():
        assert torch.equal(value.detach(), report["trained"][name])
