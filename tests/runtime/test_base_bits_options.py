"""What --base_bits 4 is refused with, and which bits a base gets where it is not typed."""

import importlib.util
import json
from dataclasses import replace

import pytest

from dschat_lora.checkpoint.adapter_config import AdapterConfig
from dschat_lora.config.groups import LoraConfig
from dschat_lora.models.source import ModelSource, find_model
from dschat_lora.runtime.checks import settled_base_bits

PLAIN = find_model(None)
LORA = LoraConfig(lora_dim=2)


def adapter_on(bits):
    fields = {"r": 2, "lora_alpha": 4.0, "lora_dropout": 0.0, "use_rslora": False, "bias": "none"}
    config = AdapterConfig(
        base_model_name_or_path=PLAIN.base,
        task_type="CAUSAL_LM",
        target_modules=("q_proj",),
        modules_to_save=(),
        fan_in_fan_out=False,
        base_bits=bits,
        **fields,
    )
    return ModelSource(PLAIN.base, adapter_config=config)


@pytest.fixture
def packed(tmp_path):
    """A model whose files say that they hold NF4."""
    field = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": field}))
    return ModelSource(str(tmp_path))


REFUSED = {
    "every weight": ({"lora": LoraConfig(), "trains": True}, "--lora_dim 0 trains all weights"),
    "parts of the base": (
        {"lora": replace(LORA, only_optimize_lora=False), "trains": True},
        "--no-only_optimize_lora trains parts",
    ),
    "a divided model": (
        {"lora": LORA, "tensor_parallel_size": 2},
        "--tensor_parallel_size 2, which would split blocks of 64 weights with a common",
    ),
}


@pytest.mark.parametrize(("options", "reason"), REFUSED.values(), ids=REFUSED)
def test_what_four_bits_cannot_do_is_refused_in_one_line(options, reason):
    with pytest.raises(ValueError, match=f"^--base_bits 4 .*{reason}") as told:
        settled_base_bits(4, PLAIN, **options)
    assert "\n" not in str(told.value)
    assert settled_base_bits(16, PLAIN, **options) == 16


def test_four_bits_without_their_package_say_what_to_install(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install 'dschat_lora\[qlora\]'"):
        settled_base_bits(4, PLAIN, LORA)
    assert settled_base_bits(None, PLAIN, LORA) == 16


@pytest.mark.parametrize(
    ("asked", "trained_on", "bits"),
    [(None, 4, 4), (None, 16, 16), (None, None, 16), (16, 4, 16), (4, 16, 4), (4, None, 4)],
)
def test_an_adapter_settles_the_bits_of_its_base_unless_they_are_typed(asked, trained_on, bits):
    assert settled_base_bits(asked, adapter_on(trained_on), LORA) == bits


def test_packed_files_hold_four_bits_and_no_others(packed):
    assert settled_base_bits(None, packed, LORA) == 4
    with pytest.raises(ValueError, match="^--base_bits 16: the files of .* have 4 bits"):
        settled_base_bits(16, packed, LORA)
    with pytest.raises(ValueError, match="--lora_dim 0 trains all weights"):
        settled_base_bits(None, packed, LoraConfig(), trains=True)


def test_evaluation_alone_needs_no_adapter():
    assert settled_base_bits(4, PLAIN, LoraConfig(), trains=False) == 4
