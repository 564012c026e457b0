import pytest

from dschat_lora.checkpoint.adapter_config import (
    AdapterConfig,
    is_adapter_directory,
    peft_fields,
    read_adapter_config,
)

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
    with pytest.raises(ValueError, match=r"is not an adapter: it has no adapter_config\.json"):
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
