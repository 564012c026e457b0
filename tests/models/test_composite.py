"""The text model of a composite checkpoint against transformers and PEFT on the whole model."""

import json
import shutil
from functools import partial, partialmethod
from types import SimpleNamespace

import peft
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    BitsAndBytesConfig,
)
from transformers.models.gemma3 import Gemma3ForConditionalGeneration

from dschat_lora.checkpoint.export import save_adapter, save_merged
from dschat_lora.config.groups import LoraConfig, ModelConfig
from dschat_lora.lora.model import adapter_parameters, base_names
from dschat_lora.models import composite
from dschat_lora.models.build import bits_of, build_causal_lm, build_reward_model
from dschat_lora.models.loading import (
    build_without_values,
    load_causal_lm,
    load_config,
    load_tokenizer,
)
from dschat_lora.models.source import find_model
from dschat_lora.models.stored_weights import load_parts
from helpers.addons import of_addon
from helpers.composites import COMPOSITES, save_composite, whole_model
from helpers.quantised import FP8, GPTQ, fp8, gptq, mend_bitsandbytes, rewrite
from helpers.rounding import assert_same_sums
from helpers.runs import CARD
from helpers.spread import ALL

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
KINDS = COMPOSITES if ALL else ("gemma3", "qwen3_5")
IDS = torch.arange(3, 83).view(2, 40) * 7 % 500
OPTIONS = ModelConfig()
# A merge adds the update to the weights, which rounds them.
ROUNDED = {"rtol": 1e-3, "atol": 1e-4}


@torch.no_grad()
def logits(model):
    return model.eval()(input_ids=IDS, use_cache=False).logits


def build(path, make=build_causal_lm, **lora):
    source = find_model(str(path))
    tokenizer = load_tokenizer(source.tokenizer, OPTIONS)
    config = LoraConfig(**{"lora_dim": 4, **lora})
    return make(source, tokenizer, OPTIONS, config, dtype=torch.float32, seed=0, meta=False)


def build_changed(path, make=build_causal_lm, **lora):
    """With an adapter that changes what the model says."""
    adapted = build(path, make, **lora)
    generator = torch.Generator().manual_seed(1)
    for parameter in adapter_parameters(adapted.model).values():
        parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
    return adapted


def write_adapter(directory, adapted, base):
    tokenizer = load_tokenizer(str(base), OPTIONS)
    more = {"base": str(base), "tokenizer": tokenizer, "card": CARD, "task_type": adapted.task}
    return save_adapter(directory, adapted.model, adapted.lora, **more)


def merge(directory, model, base):
    tokenizer = load_tokenizer(str(base), OPTIONS)
    more = {"tokenizer": tokenizer, "probe_ids": IDS[:1], "max_kl": 1e-3, "dropouts": {}}
    return save_merged(directory, model, **more)


def keys_of(directory):
    """The keys that the files of a model hold."""
    files = [safe_open(path, "pt") for path in directory.glob("*.safetensors")]
    return {key for file in files for key in file.keys()}  # noqa: SIM118


@pytest.fixture(scope="module", params=KINDS)
def case(request, tmp_path_factory):
    """A checkpoint, its text model with an adapter, and that adapter on disk."""
    home = tmp_path_factory.mktemp(request.param)
    base = save_composite(request.param, home / "base")
    (base / "preprocessor_config.json").write_text('{"size": 16}')
    adapted = build_changed(base)
    written = write_adapter(home / "adapter", adapted, base)
    said = logits(adapted.model)
    return SimpleNamespace(
        kind=request.param, home=home, base=base, adapted=adapted, written=written, said=said
    )


def test_the_text_model_computes_what_the_composite_model_computes_of_text(case):
    whole, text = whole_model(case.base), build(case.base).model
    assert_same_sums(logits(text), logits(whole))
    missing = {name for name, _ in whole.named_parameters()} - base_names(text).keys()
    assert missing
    assert all(name.startswith(text.place.left_out) for name in missing)
    tied = {name for pair in text._tied_weights_keys.items() for name in pair}
    assert tied <= base_names(text).keys()


def test_the_adapter_is_the_same_model_in_peft_on_the_original_checkpoint(case):
    whole = whole_model(case.base)
    before = logits(whole)
    loaded = peft.PeftModel.from_pretrained(whole, case.home / "adapter")
    assert_same_sums(logits(loaded), case.said)
    assert (case.said - before).abs().max() > 0.1
    factors = [name for name, _ in loaded.named_parameters() if ".lora_A." in name]
    assert len(factors) == len(case.adapted.targets)
    text = f"base_model.model.{case.adapted.model.text_path}."
    assert all(name.startswith(text) for name in factors)
    assert not any("PEFT" in fact for fact in case.adapted.facts())


def test_the_adapter_is_continued_as_it_was(case):
    assert_same_sums(logits(build(case.home / "adapter").model), case.said)


def test_an_adapter_of_peft_on_the_composite_model_is_continued(case):
    options = {"r": 3, "lora_alpha": 6, "init_lora_weights": False, "task_type": "CAUSAL_LM"}
    config = peft.LoraConfig(target_modules=case.written.target_modules, **options)
    whole = peft.get_peft_model(whole_model(case.base), config)
    whole.peft_config["default"].base_model_name_or_path = str(case.base)
    whole.save_pretrained(case.home / "of_peft")
    assert_same_sums(logits(build(case.home / "of_peft").model), logits(whole))


def test_the_merge_is_the_checkpoint_with_another_text_model(case):
    case.adapted.model.generation_config.eos_token_id = [3, 5]
    merge(case.home / "merged", case.adapted.model, case.base)
    before, after = whole_model(case.base), whole_model(case.home / "merged")
    torch.testing.assert_close(logits(after), case.said, **ROUNDED)
    rest = case.adapted.model.place.left_out
    values = after.state_dict()
    assert all(
        torch.equal(tensor, values[name])
        for name, tensor in before.state_dict().items()
        if name.startswith(rest)
    )
    assert keys_of(case.home / "merged") == keys_of(case.base)
    assert after.config.vision_config.to_dict() == before.config.vision_config.to_dict()
    assert after.generation_config.eos_token_id == [3, 5]
    assert (case.home / "merged" / "preprocessor_config.json").read_text() == '{"size": 16}'
    assert torch.equal(logits(build(case.home / "merged").model), logits(after))


def test_weights_that_are_read_one_by_one_are_the_same(case):
    config = load_config(str(case.base), OPTIONS)
    make = partial(composite.auto_class(config, "CAUSAL_LM").from_config, config)
    parts = build_without_values(make, None, meta=False)
    load_parts(parts, str(case.base))
    whole = load_causal_lm(str(case.base), config, OPTIONS, dtype=torch.float32, meta=False)
    values = whole.state_dict()
    assert all(torch.equal(t, values[name]) for name, t in parts.state_dict().items())


@torch.no_grad()
def test_a_reward_model_has_the_text_model_of_the_checkpoint(case):
    adapted = build_changed(case.base, build_reward_model)
    hidden = adapted.model.base_model(input_ids=IDS, use_cache=False).last_hidden_state
    config = write_adapter(case.home / "reward", adapted, case.base)
    assert config.target_modules == case.written.target_modules
    again = build(case.home / "reward", partial(build_reward_model, new_head=False))
    score = again.model.score(again.model.base_model(input_ids=IDS, use_cache=False)[0])
    assert_same_sums(score, adapted.model.score(hidden))


@pytest.fixture(scope="module")
def gemma(tmp_path_factory):
    return save_composite("gemma3", tmp_path_factory.mktemp("gemma") / "base")


@torch.no_grad()
def test_a_reward_model_is_the_same_in_peft_where_transformers_has_one_of_the_whole(
    gemma, tmp_path
):
    adapted = build_changed(gemma, build_reward_model)
    adapted.model.config.pad_token_id = 999
    write_adapter(tmp_path / "reward", adapted, gemma)
    whole = AutoModelForSequenceClassification.from_pretrained(gemma, num_labels=1)
    whole.config.get_text_config().pad_token_id = 999
    loaded = peft.PeftModel.from_pretrained(whole, tmp_path / "reward")
    assert_same_sums(logits(loaded), logits(adapted.model))
    merge(tmp_path / "merged", adapted.model, gemma)
    merged, report = AutoModelForSequenceClassification.from_pretrained(
        tmp_path / "merged", output_loading_info=True
    )
    assert not report["missing_keys"]
    merged.config.get_text_config().pad_token_id = 999
    assert_same_sums(logits(merged), logits(adapted.model))


@pytest.mark.parametrize("kind", ["mistral3", "qwen3_vl"] if ALL else ["mistral3"])
def test_a_reward_model_is_merged_alone_where_transformers_has_none_of_the_whole(kind, tmp_path):
    base = save_composite(kind, tmp_path / "base")
    adapted = build_changed(base, build_reward_model)
    adapted.model.config.pad_token_id = 999
    if kind == "qwen3_vl":
        with pytest.raises(ValueError, match="has no reward model of qwen3_vl_text"):
            merge(tmp_path / "merged", adapted.model, base)
        return
    merge(tmp_path / "merged", adapted.model, base)
    merged = AutoModelForSequenceClassification.from_pretrained(tmp_path / "merged")
    assert merged.config.model_type == "mistral"
    words = "it is the text model alone: transformers has no reward model of mistral3"
    assert composite.merged_words(adapted.model) == words
    merged.config.pad_token_id = 999
    assert_same_sums(logits(merged), logits(adapted.model))
    again = build(tmp_path / "merged", partial(build_reward_model, new_head=False), lora_dim=0)
    again.model.config.pad_token_id = 999
    assert_same_sums(logits(again.model), logits(adapted.model))


def test_a_head_that_is_trained_is_no_longer_the_embedding_in_the_merge(gemma, tmp_path):
    adapted = build_changed(gemma, modules_to_save=("lm_head",))
    write_adapter(tmp_path / "adapter", adapted, gemma)
    loaded = peft.PeftModel.from_pretrained(whole_model(gemma), tmp_path / "adapter")
    assert_same_sums(logits(loaded), logits(adapted.model))
    merge(tmp_path / "merged", adapted.model, gemma)
    torch.testing.assert_close(
        logits(whole_model(tmp_path / "merged")), logits(adapted.model), **ROUNDED
    )


def test_parameters_that_stand_beside_the_text_model_are_left_out(tmp_path):
    base = save_composite("llava_next", tmp_path / "base")
    text = build(base).model
    assert "model.image_newline" in text.place.left_out
    assert_same_sums(logits(text), logits(whole_model(base)))


@pytest.mark.parametrize("kind", ["gemma3", *["llama4"] * ALL])
def test_a_text_model_trained_in_full_with_more_tokens_is_written_into_the_checkpoint(
    kind, tmp_path
):
    base = save_composite(kind, tmp_path / "base")
    model = build(base, lora_dim=0).model
    rows = model.config.vocab_size + 3
    model.resize_token_embeddings(rows, mean_resizing=False)
    merge(tmp_path / "model", model, base)
    after = whole_model(tmp_path / "model")
    assert logits(after).shape[-1] == rows
    assert_same_sums(logits(after), logits(model))


def test_layers_are_chosen_by_the_names_of_the_composite_model(gemma):
    pattern = r"model\.language_model\.layers\.1\..*\.q_proj"
    targets = build(gemma, target_modules=(pattern,)).targets
    assert targets == ["model.language_model.layers.1.self_attn.q_proj"]


def test_an_adapter_of_the_text_model_by_its_own_names_is_refused(tmp_path):
    base = save_composite("qwen3_5", tmp_path / "base")
    model = AutoModelForCausalLM.from_pretrained(base)
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"]))
    adapted.peft_config["default"].base_model_name_or_path = str(base)
    adapted.save_pretrained(tmp_path / "alone")
    with pytest.raises(ValueError, match=r"factors of model\.layers\.1\S+, which is not a layer"):
        build(tmp_path / "alone")


def test_the_card_loads_the_composite_model(case):
    text = (case.home / "adapter" / "README.md").read_text()
    auto = "CausalLM" if case.kind.startswith("gemma") else "ImageTextToText"
    assert f"base_model = AutoModelFor{auto}.from_pretrained(" in text


def test_a_type_that_was_never_tried_is_tried_as_it_is_loaded(gemma, monkeypatch):
    monkeypatch.setattr(composite, "TRIED", frozenset())
    build(gemma)
    build(gemma, build_reward_model)


def test_a_text_model_that_alone_computes_something_else_is_refused(gemma, monkeypatch):
    monkeypatch.setattr(composite, "TRIED", frozenset())
    forward = Gemma3ForConditionalGeneration.forward

    def scaled(self, *args, **kwargs):
        outputs = forward(self, *args, **kwargs)
        outputs.logits = outputs.logits * 1.01
        return outputs

    monkeypatch.setattr(Gemma3ForConditionalGeneration, "forward", scaled)
    with pytest.raises(
        ValueError,
        match=r"gemma3 cannot be trained without the rest \(its outputs differ by 0\.0099\)",
    ):
        build(gemma)


def test_a_checkpoint_in_several_files_is_merged_into_several(gemma, tmp_path, monkeypatch):
    adapted = build_changed(gemma)
    save = Gemma3ForConditionalGeneration.save_pretrained
    monkeypatch.setattr(
        Gemma3ForConditionalGeneration,
        "save_pretrained",
        partialmethod(save, max_shard_size="50KB"),
    )
    merge(tmp_path / "merged", adapted.model, gemma)
    index = json.loads((tmp_path / "merged" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == keys_of(gemma)
    assert len(set(index["weight_map"].values())) > 2
    torch.testing.assert_close(
        logits(whole_model(tmp_path / "merged")), logits(adapted.model), **ROUNDED
    )


@torch.no_grad()
@pytest.mark.parametrize("kind", ["mistral3", "qwen3_5_moe", "qwen3_vl"] if ALL else ["mistral3"])
def test_the_card_makes_a_reward_model_of_the_whole_where_transformers_has_none(
    kind, tmp_path, monkeypatch
):
    base = save_composite(kind, tmp_path / "base")
    adapted = build_changed(base, build_reward_model)
    adapted.model.config.pad_token_id = 999
    write_adapter(tmp_path / "reward", adapted, base)
    code = (tmp_path / "reward" / "README.md").read_text().split("```")[1].removeprefix("python")
    monkeypatch.chdir(tmp_path)
    # The class is registered for this one test.
    known = AutoModelForSequenceClassification._model_mapping
    monkeypatch.setattr(known, "_extra_content", dict(known._extra_content))
    scope = {}
    exec(code.replace("path/of/this/directory", "reward"), scope)
    scope["base_model"].config.get_text_config().pad_token_id = 999
    assert_same_sums(logits(scope["model"]), logits(adapted.model))


QUANTISED = {"fp8": (fp8, FP8), "gptq": (gptq, GPTQ)}


@pytest.mark.skipif(not of_addon("bases.forms"), reason="the add-on is not there")
@pytest.mark.parametrize("kind", QUANTISED if ALL else ["fp8"])
def test_a_quantised_composite_model_is_read_as_values_and_merged_whole(kind, gemma, tmp_path):
    base = shutil.copytree(gemma, tmp_path / "base")
    values = rewrite(gemma, base, *QUANTISED[kind], part="language_model")
    plain = shutil.copytree(gemma, tmp_path / "plain")
    values = {name: value.contiguous() for name, value in values.items()}
    save_file(values, plain / "model.safetensors", metadata={"format": "pt"})
    assert_same_sums(logits(build(base).model), logits(whole_model(plain)))
    assert (logits(whole_model(plain)) - logits(whole_model(gemma))).abs().max() > 1e-3
    adapted = build_changed(base)
    merge(tmp_path / "merged", adapted.model, base)
    assert "quantization_config" not in (tmp_path / "merged" / "config.json").read_text()
    assert keys_of(tmp_path / "merged") == keys_of(gemma)
    torch.testing.assert_close(
        logits(whole_model(tmp_path / "merged")), logits(adapted.model), **ROUNDED
    )


def test_a_composite_model_of_bitsandbytes_is_read_and_its_vision_is_not_merged(
    gemma, tmp_path, monkeypatch
):
    pytest.importorskip("bitsandbytes")
    mend_bitsandbytes(monkeypatch)
    four_bits = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    stock = AutoModelForImageTextToText.from_pretrained(gemma, quantization_config=four_bits)
    base = shutil.copytree(gemma, tmp_path / "base")
    stock.save_pretrained(base)
    model = build(base).model
    assert bits_of(model) == 4
    torch.testing.assert_close(logits(model), logits(stock).to(torch.float32), **ROUNDED)
    with pytest.raises(ValueError, match="is quantised, which a merged model"):
        merge(tmp_path / "merged", model, base)
