"""Full checkpoints of microsoft/LoRA, files of weights and of factors, are decoded directly."""

import json
import re

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from dschat_lora.addons.nlg import decode
from dschat_lora.addons.nlg.config import DecodeConfig
from dschat_lora.addons.nlg.decode import load_model, read_meanings
from dschat_lora.addons.nlg.gpt2_checkpoint import gpt2_with_weights, read_gpt2_checkpoint
from dschat_lora.addons.nlg.validation import check_decode
from dschat_lora.config.groups import LoraConfig, ModelConfig
from dschat_lora.config.options import parse_config
from dschat_lora.lora.model import adapter_parameters, apply_lora
from dschat_lora.models.loading import load_tokenizer
from dschat_lora.models.source import find_model
from helpers.restaurants import save_base

IDS = torch.arange(5, 25)[None]


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    directory = tmp_path_factory.mktemp("checkpoints")
    save_base(directory / "base")
    (directory / "data.txt").write_text("name : A||A is here .\n")
    return directory


@pytest.fixture(scope="module")
def adapted(home):
    """A model with trained factors, as the original saves it, and its logits."""
    model = AutoModelForCausalLM.from_pretrained(home / "base").eval()
    lora = LoraConfig(lora_dim=4, target_modules=("c_attn",), enable_lora=("q", "v"))
    apply_lora(model, lora, seed=0)
    with torch.no_grad():
        for parameter in adapter_parameters(model).values():
            parameter.normal_(std=0.2)
        for parameter in model.transformer.ln_f.parameters():
            parameter.add_(0.1)  # another base than that of the directory
    state = {name: value for name, value in model.state_dict().items() if name != "lm_head.weight"}
    full = {f"module.{name}": value for name, value in state.items()}
    full["module.lm_head.decoder.weight"] = model.transformer.wte.weight.detach()
    full["module.transformer.h.0.attn.bias"] = torch.ones(1, 1, 4, 4)  # a mask of old GPT-2s
    torch.save({"model_state_dict": full}, home / "model.5.pt")
    factors = {name: value for name, value in full.items() if "lora_" in name}
    torch.save({"model_state_dict": factors}, home / "lora.pt")
    plain = {n.removeprefix("transformer."): v for n, v in state.items() if "lora_" not in n}
    torch.save(plain, home / "plain.bin")
    old = {n.replace(".weight", ".w").replace(".bias", ".b"): v for n, v in plain.items()}
    torch.save(old, home / "openai.bin")
    return model


def loaded(home, *argv):
    where = ["--data_path", str(home / "data.txt"), "--model_name_or_path", str(home / "base")]
    config = check_decode(parse_config(DecodeConfig, [*where, *argv]))
    source = find_model(config.model_name_or_path)
    tokenizer = AutoTokenizer.from_pretrained(home / "base")
    return load_model(config, source, tokenizer)


def logits(model):
    with torch.no_grad():
        return model(IDS).logits


def test_a_full_checkpoint_is_its_own_base_with_its_factors(home, adapted):
    rank = ["--lora_dim", "4", "--lora_alpha", "32"]
    model = loaded(home, "--init_checkpoint", str(home / "model.5.pt"), *rank)
    torch.testing.assert_close(logits(model), logits(adapted))


@pytest.mark.parametrize("name", ["plain.bin", "openai.bin"])
def test_weights_without_factors_are_a_base(home, adapted, name):
    model = loaded(home, "--init_checkpoint", str(home / name))
    state = adapted.state_dict()
    for key, value in model.state_dict().items():
        torch.testing.assert_close(value, state[key], rtol=0, atol=0)


def test_factors_alone_go_on_the_named_base(home, adapted):
    one = loaded(home, "--init_checkpoint", str(home / "lora.pt"), "--lora_alpha", "32")
    other = loaded(
        *(home, "--lora_path", str(home / "lora.pt"), "--lora_alpha", "32"),
        *("--enable_lora", "q", "v"),
    )
    torch.testing.assert_close(logits(one), logits(other), rtol=0, atol=0)
    assert not torch.allclose(logits(one), logits(adapted))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--lora_dim", "8", "--lora_alpha", "32"], "is 8, but .* holds factors of rank 4"),
        ([], "does not record its scaling; give --lora_alpha"),
        (["--lora_alpha", "32", "--enable_lora", "q"], "holds factors for 2 part"),
        (["--lora_alpha", "32", "--lora_path", "x"], "needs a base without LoRA weights, not"),
    ],
)
def test_options_that_do_not_fit_a_checkpoint_are_named(home, adapted, options, message):
    with pytest.raises(ValueError, match=message):
        loaded(home, "--init_checkpoint", str(home / "model.5.pt"), *options)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: state.pop("module.transformer.wpe.weight"), "lacks transformer.wpe.weight"),
        (
            lambda state: state.update({"module.lm_head.decoder.weight": torch.zeros(320, 32)}),
            "the output head is not the embedding",
        ),
        (
            lambda state: state.update({"module.transformer.ln_f.bias": torch.zeros(7)}),
            r"transformer.ln_f.bias is \(7,\), the model has \(32,\); it is of another size",
        ),
        (
            lambda state: state.update({"module.transformer.more.weight": torch.zeros(1)}),
            "holds transformer.more.weight, which the model does not have",
        ),
    ],
)
def test_weights_that_do_not_fit_are_named(home, adapted, change, message, tmp_path):
    state = torch.load(home / "model.5.pt", weights_only=True)
    change(state["model_state_dict"])
    torch.save(state, tmp_path / "other.pt")
    with pytest.raises(ValueError, match=message):
        loaded(home, "--init_checkpoint", str(tmp_path / "other.pt"), "--lora_alpha", "32")


def test_weights_of_gpt2_are_no_other_model(home, adapted):
    from dschat_lora.assets import BUNDLED_MODEL

    config = parse_config(DecodeConfig, ["--data_path", "x"])
    checkpoint = read_gpt2_checkpoint(home / "plain.bin")
    with pytest.raises(ValueError, match="is a file of GPT-2's weights; .* is a "):
        gpt2_with_weights(str(BUNDLED_MODEL), config.model, checkpoint, dtype=torch.float32)


def test_rows_of_token_ids_are_their_texts(home, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(home / "base")
    end = tokenizer.eos_token_id
    texts = {"context": "name : Green Garden", "completion": " Green Garden is a place ."}
    row = {name: [*tokenizer.encode(text), end] for name, text in texts.items()}
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(each) + "\n" for each in (row, row)))
    (meaning,) = read_meanings([str(path)], tokenizer)
    assert (meaning.text, meaning.references) == (
        texts["context"],
        [texts["completion"].strip()] * 2,
    )
    letters = tokenizer.convert_tokens_to_ids([*"name"])  # which the tokenizer joins
    path.write_text(json.dumps({**row, "context": letters}) + "\n")
    with pytest.raises(ValueError, match=r"rows.jsonl:1: `context` holds token ids that"):
        read_meanings([str(path)], tokenizer)


def test_a_meaning_longer_than_seq_len_is_named(home):
    tokenizer = load_tokenizer(str(home / "base"), ModelConfig())
    config = DecodeConfig(data_path=(str(home / "data.txt"),), seq_len=8, max_new_tokens=4)
    model = AutoModelForCausalLM.from_pretrained(home / "base")
    with pytest.raises(ValueError, match=re.escape("meaning 'name : A' exceed --seq_len 8")):
        decode.search_all(config, tokenizer, model, read_meanings(config.data_path))
