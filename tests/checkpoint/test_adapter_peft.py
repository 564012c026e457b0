"""Adapters exchanged with stock PEFT, which is the reference for layout and meaning."""

import json
import warnings
from dataclasses import replace

import peft
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from dschat_lora.checkpoint.adapter import load_adapter, lora_config_of, read_adapter, write_adapter
from dschat_lora.checkpoint.adapter_config import verify_adapter
from dschat_lora.checkpoint.manifest import write_manifest
from dschat_lora.config.groups import LoraConfig
from dschat_lora.lora.model import adapter_layout, adapter_parameters, apply_lora
from helpers.tiny import random_ids, randomise, tiny_model, trained, write_trained

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

OURS = {
    "opt, default": ("projected_opt", {}),
    "opt, rslora": ("projected_opt", {"use_rslora": True, "lora_alpha": 5.5}),
    "opt, embeddings": ("projected_opt", {"target_modules": ("embed_tokens", "q_proj", "lm_head")}),
    "opt, projections": ("projected_opt", {"lora_module_name": "proj"}),
    "opt, one layer": ("projected_opt", {"lora_module_name": "layers.1.self_attn"}),
    "opt, pattern": ("projected_opt", {"target_modules": (r".*\.0\.(fc1|.*q_proj)",)}),
    "opt, adapted biases": ("projected_opt", {"train_bias": "lora_only"}),
    "opt, all biases": ("projected_opt", {"train_bias": "all", "target_modules": ("q_proj",)}),
    "opt, head and norm in full": ("projected_opt", {"modules_to_save": ("lm_head", "fc1")}),
    "opt, everything": (
        "projected_opt",
        {
            "target_modules": ("embed_tokens", "v_proj"),
            "train_bias": "all",
            "modules_to_save": ("project_in", "final_layer_norm"),
            "use_rslora": True,
        },
    ),
    "llama, default": ("llama", {}),
    "llama, embedding and head in full": (
        "llama",
        {"modules_to_save": ("embed_tokens", "lm_head")},
    ),
    "gpt2, default": ("gpt2", {}),
    "gpt2, embedding": ("gpt2", {"target_modules": ("wte", "c_attn", "mlp.c_proj")}),
    "gpt2, all biases": ("gpt2", {"train_bias": "all", "target_modules": ("c_fc",)}),
    "gpt2, parts": ("gpt2", {"target_modules": ("c_attn",), "enable_lora": ("v", "q")}),
    "gpt2, parts and biases": (
        "gpt2",
        {"target_modules": ("c_attn",), "enable_lora": ("k",), "train_bias": "lora_only"},
    ),
    "phi3, unequal parts, rslora": (
        "phi3",
        {
            "target_modules": ("qkv_proj",),
            "enable_lora": ("q", "v"),
            "use_rslora": True,
            "lora_alpha": 5.5,
        },
    ),
    "reward, score": ("reward", {"modules_to_save": ("score",)}),
}


def loaded(model, directory):
    """The model with the adapter of a directory."""
    apply_lora(model, lora_config_of(directory), seed=9)
    assert set(load_adapter(model, directory)) == adapter_parameters(model).keys()
    return model


def peft_model(kind, config=peft.LoraConfig, **options):
    options = {"r": 3} | ({"lora_alpha": 7} if config is peft.LoraConfig else {}) | options
    return peft.get_peft_model(tiny_model(kind), config(**options)).eval()


@pytest.mark.parametrize(("kind", "options"), OURS.values(), ids=OURS)
def test_stock_peft_loads_our_adapter_with_equal_logits(kind, options, tmp_path):
    config = LoraConfig(**{"lora_dim": 3, "lora_alpha": 6} | options)
    model, ids = trained(tiny_model(kind), config), random_ids()
    task = "SEQ_CLS" if kind == "reward" else "CAUSAL_LM"
    write_trained(tmp_path / "adapter", model, config, task_type=task)
    # PEFT corrects this one by itself, with a warning; other readers do not.
    assert read_adapter(tmp_path / "adapter").config.fan_in_fan_out == (kind == "gpt2")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        theirs = peft.PeftModel.from_pretrained(tiny_model(kind), tmp_path / "adapter").eval()
    assert not any("missing adapter keys" in str(w.message) for w in caught)
    expected = theirs(ids).logits
    torch.testing.assert_close(model(ids).logits, expected, rtol=1e-5, atol=1e-5)
    assert (expected - tiny_model(kind)(ids).logits).abs().max() > 0.01
    again = loaded(tiny_model(kind), tmp_path / "adapter")
    assert torch.equal(again(ids).logits, model(ids).logits)


PARTS = LoraConfig(lora_dim=3, lora_alpha=5.5, target_modules=("c_attn",), enable_lora=("q", "v"))


def test_an_adapter_of_parts_goes_on_as_one_and_in_peft_as_a_plain_one(tmp_path):
    model, ids, directory = trained(tiny_model("gpt2"), PARTS), random_ids(), tmp_path / "adapter"
    write_trained(directory, model, PARTS)
    stored = lora_config_of(directory)
    assert (stored.lora_dim, stored.lora_alpha, stored.enable_lora) == (3, 5.5, ("q", "v"))
    adapter = read_adapter(directory)
    assert (adapter.config.r, adapter.config.lora_alpha) == (3, 5.5)
    assert {tuple(t.shape) for t in adapter.tensors.values()} == {(6, 32), (64, 3)}
    fields = json.loads((directory / "adapter_config.json").read_text())
    assert (fields["r"], fields["lora_alpha"]) == (6, 11)
    other = tiny_model("gpt2")
    apply_lora(other, replace(PARTS, enable_lora=("q", "k")), seed=0)
    message = r"trained with --enable_lora q v; the factors of transformer.h.0.attn.c_attn are for"
    with pytest.raises(ValueError, match=message):
        load_adapter(other, directory)
    theirs = peft.PeftModel.from_pretrained(tiny_model("gpt2"), directory)
    theirs.save_pretrained(tmp_path / "theirs")
    stored = lora_config_of(tmp_path / "theirs")
    assert (stored.lora_dim, stored.lora_alpha, stored.enable_lora) == (6, 11, ())
    again = loaded(tiny_model("gpt2"), tmp_path / "theirs")
    torch.testing.assert_close(again(ids).logits, model(ids).logits)
    # Values between the parts.
    path = directory / "adapter_model.safetensors"
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    tensors = load_file(path)
    tensors["base_model.model.transformer.h.1.attn.c_attn.lora_B.weight"][40, 1] = 0.1  # of k
    message = r"transformer.h.1.attn.c_attn.lora_B: values other than zero stand outside the blocks"
    note = r"is damaged: it notes '\[\]' of packed layers"
    for more, words in (({}, message), ({"packed": "[]"}, note)):
        save_file(tensors, path, metadata | more)
        write_manifest(directory, kind="adapter")
        with pytest.raises(ValueError, match=words):
            read_adapter(directory)


def test_parameters_that_begin_anew_are_left_as_they_are(tmp_path):
    config = LoraConfig(lora_dim=2, modules_to_save=("score",))
    model = trained(tiny_model("reward"), config)
    tensors = {name: p.detach() for name, p in adapter_parameters(model).items()}
    tensors["score.trained.weight"] = torch.ones(3, 16)  # of another task
    layout = adapter_layout(model)
    write_adapter(tmp_path / "a", tensors, config, layout=layout, base_model_name_or_path="b")
    other = tiny_model("reward")
    apply_lora(other, config, seed=1)
    before = adapter_parameters(other)["score.trained.weight"].clone()
    with pytest.raises(ValueError, match=r"score.trained.weight is \(3, 16\), the model has"):
        load_adapter(other, tmp_path / "a")
    loaded = load_adapter(other, tmp_path / "a", new={"score.trained.weight"})
    assert set(loaded) == tensors.keys() - {"score.trained.weight"}
    assert torch.equal(adapter_parameters(other)["score.trained.weight"], before)


THEIRS = {
    "opt, all linear": ("projected_opt", {"target_modules": "all-linear"}),
    "opt, rslora": ("projected_opt", {"target_modules": ["q_proj", "v_proj"], "use_rslora": True}),
    "opt, embeddings": ("projected_opt", {"target_modules": ["embed_tokens", "fc1"]}),
    "opt, adapted biases": ("projected_opt", {"target_modules": ["q_proj"], "bias": "lora_only"}),
    "opt, everything": (
        "projected_opt",
        {
            "target_modules": ["q_proj", "embed_tokens"],
            "bias": "all",
            "modules_to_save": ["project_in"],
        },
    ),
    "opt, some layers": (
        "projected_opt",
        {"target_modules": ["q_proj"], "layers_to_transform": [1]},
    ),
    "llama, pattern": ("llama", {"target_modules": r".*\.1\..*_proj"}),
    "llama, no bias to train": ("llama", {"target_modules": ["q_proj"], "bias": "all"}),
    "llama, in full": ("llama", {"modules_to_save": ["embed_tokens", "lm_head"]}),
    "gpt2, all linear": ("gpt2", {"target_modules": "all-linear", "fan_in_fan_out": True}),
    "gpt2, all biases": ("gpt2", {"target_modules": ["c_attn"], "bias": "all"}),
    "reward": ("reward", {"target_modules": ["q_proj"], "task_type": "SEQ_CLS"}),
}


def peft_adapter(kind, options, directory):
    theirs = peft_model(kind, **options)
    randomise(p for p in theirs.parameters() if p.requires_grad)
    theirs.save_pretrained(directory)
    return theirs


@pytest.mark.parametrize(("kind", "options"), THEIRS.values(), ids=THEIRS)
def test_adapter_made_by_peft_gives_equal_logits_here(kind, options, tmp_path):
    theirs = peft_adapter(kind, options, tmp_path)
    ours, ids = loaded(tiny_model(kind), tmp_path), random_ids()
    expected = theirs(ids).logits
    torch.testing.assert_close(ours(ids).logits, expected, rtol=1e-5, atol=1e-5)
    assert (expected - tiny_model(kind)(ids).logits).abs().max() > 0.01
    if not read_adapter(tmp_path).base_tensors:  # of half precision it is read as float32
        theirs.half().save_pretrained(tmp_path)
        adapter = read_adapter(tmp_path)
        trained = adapter_parameters(loaded(tiny_model(kind), tmp_path))
        dtypes = {t.dtype for t in (*adapter.tensors.values(), *trained.values())}
        assert dtypes == {torch.float32}


@pytest.mark.parametrize("kind", ["llama", "gpt2", "projected_opt"])
def test_all_linear_adapts_what_peft_adapts(kind):
    theirs = peft_model(kind, target_modules="all-linear", task_type="CAUSAL_LM")
    expected = [
        name.removeprefix("base_model.model.")
        for name, module in theirs.named_modules()
        if isinstance(module, peft.tuners.lora.LoraLayer)
    ]
    if kind == "projected_opt":  # but for the projections around the blocks
        expected = [name for name in expected if "layers" in name]
    assert apply_lora(tiny_model(kind), LoraConfig(lora_dim=3), seed=0) == expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"use_dora": True}, "use_dora True is not supported"),
        ({"lora_bias": True}, "lora_bias True is not supported"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights 'pissa' is not supported"),
        ({"trainable_token_indices": [1, 2]}, "trainable_token_indices"),
        ({"config": peft.LoHaConfig}, "peft_type 'LOHA' is not supported"),
    ],
)
def test_variants_of_lora_and_other_methods_are_refused_by_name(options, message, tmp_path):
    peft_model("projected_opt", target_modules=["q_proj"], **options).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=message):
        lora_config_of(tmp_path)


def test_resized_embedding_in_a_peft_adapter_is_refused(tmp_path):
    peft_adapter("projected_opt", {"target_modules": ["embed_tokens"]}, tmp_path)
    model = tiny_model("projected_opt")
    apply_lora(model, lora_config_of(tmp_path), seed=0)
    with torch.no_grad():
        model.model.decoder.embed_tokens.weight[3] += 1
    with pytest.raises(ValueError, match=r"embed_tokens\.weight of another base"):
        load_adapter(model, tmp_path)


@pytest.mark.parametrize("kind", ["projected_opt", "llama"])
def test_adapter_saved_anew_by_peft_is_read_once_its_old_manifest_is_deleted(kind, tmp_path):
    config, directory = LoraConfig(lora_dim=3, lora_alpha=6), tmp_path / "adapter"
    model = tiny_model(kind)
    apply_lora(model, config, seed=0)
    write_trained(directory, model, config)
    theirs = peft.PeftModel.from_pretrained(tiny_model(kind), directory, is_trainable=True)
    randomise(p for p in theirs.parameters() if p.requires_grad)
    theirs.save_pretrained(directory)
    message = rf"adapter_\w+\.\w+ has .*; if PEFT has saved the adapter again, delete {directory}"
    for read in (read_adapter, verify_adapter):
        with pytest.raises(ValueError, match=message):
            read(directory)
    (directory / "manifest.json").unlink()
    verify_adapter(directory)
    load_adapter(model, directory)
    ids = random_ids()
    torch.testing.assert_close(model(ids).logits, theirs.eval()(ids).logits, rtol=1e-5, atol=1e-5)
