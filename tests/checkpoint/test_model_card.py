"""Model cards: names without absolute paths, the licence of the base, how the run trained."""

from dataclasses import replace

import pytest

from dschat_lora.checkpoint.adapter_config import AdapterConfig
from dschat_lora.checkpoint.model_card import license_of, model_card, public_name

CONFIG = AdapterConfig(
    base_model_name_or_path="some/base",
    task_type="CAUSAL_LM",
    r=8,
    lora_alpha=16.0,
    lora_dropout=0.0,
    use_rslora=False,
    bias="none",
    target_modules=("q_proj",),
    modules_to_save=(),
    fan_in_fan_out=False,
)
EMPTY = {"data": {}, "metrics": {}, "versions": {}}


def test_directories_are_named_by_their_hub_name_or_a_relative_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cached = "/home/me/.cache/huggingface/hub/models--org--some-base/snapshots/0123abc"
    assert public_name(cached) == "org/some-base"
    assert public_name(str(tmp_path / "models" / "base")) == "models/base"
    assert public_name("/data/models/base") == "base"
    assert public_name("org/base") == "org/base"
    card = model_card(replace(CONFIG, base_model_name_or_path=str(tmp_path / "base")), **EMPTY)
    assert str(tmp_path) not in card
    assert 'base_model: "base"' in card
    assert 'AutoModelForCausalLM.from_pretrained("base")' in card


@pytest.mark.parametrize(
    ("card", "config", "expected"),
    [
        ("---\nlicense: apache-2.0\ntags: []\n---\n# Base\n", "{}", "apache-2.0"),
        ("# Base\nlicense: mit\n", '{"license": "other"}', "other"),
        (None, '{"license": "mit"}', "mit"),
        (None, "{}", None),
        ("---\nlicense:\n- mit\n---\n", None, None),
    ],
)
def test_licence_is_that_of_the_bases_card_or_configuration(tmp_path, card, config, expected):
    if card is not None:
        (tmp_path / "README.md").write_text(card)
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    assert license_of(str(tmp_path)) == expected
    text = model_card(replace(CONFIG, base_model_name_or_path=str(tmp_path)), **EMPTY)
    assert (f"license: {expected}\n" in text) == (expected is not None)


def test_card_states_how_the_run_trained_and_how_to_chat():
    text = model_card(
        CONFIG,
        data={"source": "pairs.jsonl", "samples": 300},
        metrics={"perplexity": 3.14159265},
        versions={"torch": "2.13.0"},
        training={"lora learning rate": 5e-4, "num train epochs": 2},
    )
    assert text.startswith('---\nbase_model: "some/base"\n')
    assert "## Training\n\n| | |\n|---|---|\n| lora learning rate | 0.0005 |\n" in text
    rows = ("rank | 8", "target modules | q_proj", "source | pairs.jsonl", "torch | 2.13.0")
    for row in (*rows, "perplexity | 3.14159"):
        assert f"| {row} |" in text.splitlines()
    assert model_card(CONFIG, **EMPTY).count("Not recorded.") == 3
    assert "pipeline_tag: text-generation" in text
    code = text.split("```python\n")[2].split("```")[0]
    compile(code, "card", "exec")
    assert "apply_chat_template" in code


def test_card_of_a_reward_model_shows_no_chat():
    text = model_card(replace(CONFIG, task_type="SEQ_CLS"), **EMPTY)
    assert "apply_chat_template" not in text
    assert "text-generation" not in text
