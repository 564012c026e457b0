import json
import re
from types import SimpleNamespace

import pytest
from tokenizers.processors import TemplateProcessing

from dschat_lora.addons.nlg.config import DecodeConfig
from dschat_lora.addons.nlg.decode import (
    Meaning,
    clean_text,
    encode_prompts,
    prediction_lines,
    read_meanings,
)
from dschat_lora.addons.nlg.validation import check_decode
from dschat_lora.assets import BUNDLED_MODEL
from dschat_lora.config.groups import ModelConfig
from dschat_lora.config.options import parse_config
from dschat_lora.data.chat import Span
from dschat_lora.data.encoder import make_encoder
from dschat_lora.data.readers import RowError
from dschat_lora.data.records import TextRecord
from dschat_lora.data.tokenize import TokenRule, tokenize
from dschat_lora.models.loading import load_tokenizer


@pytest.fixture
def meanings(tmp_path):
    path = tmp_path / "test.txt"
    path.write_text("name : B||b one . \nname : A||a one .\nname : B||b two .\n")
    return str(path)


def test_every_meaning_comes_once_with_all_its_texts_in_order(meanings):
    assert read_meanings([meanings]) == [
        Meaning("name : B", ["b one .", "b two ."]),
        Meaning("name : A", ["a one ."]),
    ]


def test_meanings_without_texts_and_with_categories(tmp_path):
    path = tmp_path / "rows.jsonl"
    rows = [{"prompt": "m", "category": "Food"}, {"prompt": "n"}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = read_meanings([str(path)])
    assert found == [Meaning("m", [], "Food"), Meaning("n")]
    lines = [json.loads(line) for line in prediction_lines(found, ["x", "y"], [[7], [8, 9]])]
    assert lines == [
        *(
            {"meaning": "m", "prediction": "x", "references": [], "category": "Food"}
            | {"id": 0, "predict": [7]},
        ),
        {"meaning": "n", "prediction": "y", "references": [], "id": 1, "predict": [8, 9]},
    ]


def test_a_conversation_is_no_meaning(tmp_path):
    path = tmp_path / "rows.jsonl"
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]
    path.write_text(json.dumps({"messages": turns}) + "\n")
    with pytest.raises(RowError, match=re.escape("rows.jsonl:1: decode takes a `prompt` of text")):
        read_meanings([str(path)])


def test_a_text_is_cut_at_an_empty_line():
    assert clean_text(" a .\nb \n\n c") == "a .\nb"


def test_the_names_of_the_original_are_taken(meanings):
    original = ["--data", meanings, "--beam", "3", "--eval_len", "7", "--batch_size", "2"]
    config = parse_config(DecodeConfig, original)
    found = config.num_beams, config.max_new_tokens, config.per_device_eval_batch_size
    assert found == (3, 7, 2)
    assert config.data_path == (meanings,)


def test_a_meaning_begins_and_ends_as_in_training(meanings):
    tokenizer = load_tokenizer(str(BUNDLED_MODEL), ModelConfig())
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<pad> $A", special_tokens=[("<pad>", 1)]
    )
    (prompt,) = encode_prompts(
        [Meaning("name : Aromi")], tokenizer, 4, SimpleNamespace(config=None)
    )
    record = TextRecord(
        "f:1", "prompt-completion", (Span("name : Aromi", False), Span(" It .", True))
    )
    rule = TokenRule(int(tokenizer.eos_token_id), 99, "error", False, eos_after_prompt=True)
    (trained,) = tokenize([record], make_encoder(tokenizer), rule)
    assert prompt == trained.sample.prompt.tolist()
    assert (prompt[0], prompt[-1]) == (1, tokenizer.eos_token_id)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lora_path": "x.pt"}, "--lora_path x.pt holds LoRA factors alone; name their base"),
        (
            {"lora_path": "gone.pt", "model_name_or_path": "gpt2"},
            "--lora_path gone.pt is no file; give a .safetensors, .pt or .bin",
        ),
        ({"lora_alpha": 8.0}, "--lora_alpha describes a --lora_path, and there is none"),
        ({"enable_lora": ("q",)}, "--enable_lora describes a --lora_path, and there is none"),
        ({"output_path": "/"}, "--output_path / is a directory; name a file"),
        ({"num_beams": 0}, "--num_beams must be in [1, 1000], got 0"),
        ({"min_length": 65}, "--min_length must be at most --max_new_tokens 64, got 65"),
        ({"data_path": ()}, "--data_path must be a file or more of meanings, got 'nothing'"),
    ],
)
def test_a_wrong_option_is_one_clear_line(meanings, options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        check_decode(DecodeConfig(**{"data_path": (meanings,), **options}))


def test_an_adapter_whose_base_is_gone_is_refused(meanings, tmp_path):
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 32, "target_modules": ["c_attn"]}
    config["base_model_name_or_path"] = str(tmp_path / "base")
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    (adapter / "adapter_model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    with pytest.raises(ValueError, match="base of the adapter .* is missing"):
        check_decode(DecodeConfig(data_path=(meanings,), model_name_or_path=str(adapter)))
