import json
import re
from types import SimpleNamespace

import pytest
from tokenizers.processors import TemplateProcessing

from dschat_lora.addons.nlg.decode import (
    Meaning,
    clean_text,
    encode_prompts,
    prediction_lines,
    read_meanings,
)
from dschat_lora.assets import BUNDLED_MODEL
from dschat_lora.config.groups import ModelConfig
from dschat_lora.data.chat import Span
from dschat_lora.data.encoder import make_encoder
from dschat_lora.data.readers import RowError
from dschat_lora.data.records import TextRecord
from dschat_lora.data.tokenize import TokenRule, tokenize
from dschat_lora.models.loading import load_tokenizer


def test_every_meaning_comes_once_with_all_its_texts_in_order(tmp_path):
    path = tmp_path / "test.txt"
    path.write_text("name : B||b one . \nname : A||a one .\nname : B||b two .\n")
    assert read_meanings([str(path)]) == [
        Meaning("name : B", ["b one .", "b two ."]),
        Meaning("name : A", ["a one ."]),
    ]


def test_meanings_without_texts_and_with_categories(tmp_path):
    path = tmp_path / "rows.jsonl"
    rows = [{"prompt": "m", "category": "Food"}, {"prompt": "n"}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    meanings = read_meanings([str(path)])
    assert meanings == [Meaning("m", [], "Food"), Meaning("n")]
    lines = [json.loads(line) for line in prediction_lines(meanings, ["x", "y"], [[7], [8, 9]])]
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


def test_a_meaning_begins_and_ends_as_in_training():
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
