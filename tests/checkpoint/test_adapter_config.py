import subprocess
import sys

import pytest

from dschat_lora.checkpoint.adapter_config import (
    AdapterConfig,
    is_adapter_directory,
    peft_fields,
    read_adapter_config,
)
from dschat_lora.checkpoint.model_card import model_card

CONFIG = AdapterConfig(
    base_model_name_or_path="some/base",
    task_type="CAUSAL_LM",
    r=8,
    lora_alpha=16.0,
    lora_dropout=0.05,
    use_rslora=False,
    bias="none",
    target_modules=("q_proj", "v_proj"),
    modules_to_save=(),
    fan_in_fan_out=False,
)


def test_directory_without_config_is_no_adapter(tmp_path):
    assert not is_adapter_directory(tmp_path)
    assert not is_adapter_directory(tmp_path / "absent")
    with pytest.raises(ValueError, match=r"is no adapter: it has no adapter_config\.json"):
        read_adapter_config(tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        *(
            (text, r"adapter_config\.json is damaged")
            for text in (b"", b"{", b'{"r": 8', b"\xff\xfe")
        ),
        (b"[]", "must hold a JSON object, got list"),
    ],
)
def test_what_is_no_json_object_is_reported(text, message, tmp_path):
    (tmp_path / "adapter_config.json").write_bytes(text)
    assert is_adapter_directory(tmp_path)
    with pytest.raises(ValueError, match=message):
        read_adapter_config(tmp_path)


def test_minimal_config_has_pefts_defaults(tmp_path):
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 4, "lora_alpha": 8}')
    config = read_adapter_config(tmp_path)
    assert (config.base_model_name_or_path, config.bias, config.modules_to_save) == (
        None,
        "none",
        (),
    )


def test_whole_alpha_is_written_as_an_integer():
    fields = peft_fields(CONFIG)
    assert fields["lora_alpha"] == 16
    assert isinstance(fields["lora_alpha"], int)
    assert fields["modules_to_save"] is None


def test_reading_a_config_imports_nothing_heavy():
    code = (
        "import sys, dschat_lora.checkpoint.adapter_config\n"
        "assert not {'torch', 'safetensors', 'transformers', 'numpy'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_model_card_states_base_settings_data_metrics_and_versions():
    card = model_card(
        CONFIG,
        data={"source": "pairs.jsonl", "samples": 300},
        metrics={"perplexity": 3.14159265},
        versions={"torch": "2.13.0"},
    )
    assert card.startswith('---\nbase_model: "some/base"\nlibrary_name: peft\n')
    for row in (
        "| rank | 8 |",
        "| target modules | q_proj, v_proj |",
        "| source | pairs.jsonl |",
        "| perplexity | 3.14159 |",
        "| torch | 2.13.0 |",
    ):
        assert row in card.splitlines()


def test_model_card_says_so_where_nothing_was_recorded():
    card = model_card(CONFIG, data={}, metrics={}, versions={})
    assert card.count("Not recorded.") == 3
