"""The fingerprint of a base: the same for the same weights, another for any other."""

import itertools
import json

import pytest
import torch
from torch import nn
from transformers import Gemma2Config

from dschat_lora.config.groups import LoraConfig
from dschat_lora.lora.model import adapter_parameters, apply_lora
from dschat_lora.models.fingerprint import (
    adapter_fingerprint,
    base_fingerprint,
    config_fingerprint,
    weights_fingerprint,
)
from helpers.tiny import tiny_model, trained


class Base(nn.Module):
    def __init__(self, **tensors):
        super().__init__()
        for name, tensor in tensors.items():
            self.register_parameter(name, nn.Parameter(tensor))


def tensors():
    return {"a": torch.arange(12.0).view(3, 4), "b": torch.ones(5, dtype=torch.bfloat16)}


def of(**changed):
    return base_fingerprint(Base(**{**tensors(), **changed}))


def test_same_weights_have_the_same_fingerprint_in_any_order():
    assert of() == of()
    assert len(of()) == 32
    assert int(of(), 16) >= 0
    assert base_fingerprint(Base(**dict(reversed(tensors().items())))) == of()


@pytest.mark.parametrize(
    "changed",
    [
        {"a": torch.arange(12.0).view(4, 3)},
        {"a": torch.arange(12.0).view(3, 4).double()},
        {"a": torch.arange(12.0).view(3, 4).bfloat16()},
        {"b": torch.ones(5, dtype=torch.float16)},
        {"b": torch.ones(6, dtype=torch.bfloat16)},
        {"c": torch.zeros(0)},
    ],
    ids=["shape", "type", "narrower type", "type of the same width", "length", "name"],
)
def test_shape_type_and_name_count(changed):
    assert of(**changed) != of()


def test_every_value_of_a_small_tensor_counts_to_the_last_bit():
    values = torch.arange(12.0).view(3, 4)
    larger = torch.nextafter(values, torch.tensor(99.0))
    for row, column in itertools.product(range(3), range(4)):
        other = values.clone()
        other[row, column] = larger[row, column]
        assert of(a=other) != of()


def test_values_all_over_a_large_tensor_count():
    large = torch.zeros(100_000)
    expected = of(a=large)
    for place in (0, 33_333, 66_666, 99_900):
        other = large.clone()
        other[place : place + 30] = 1.0  # wider than the places that are looked at lie apart
        assert of(a=other) != expected


def test_swapped_values_and_names_show():
    one, two = torch.zeros(3), torch.ones(3)
    assert base_fingerprint(Base(x=one, y=two)) != base_fingerprint(Base(x=two, y=one))


def test_adapters_do_not_count_whether_trained_or_not():
    def adapted(rank):
        return trained(tiny_model("opt"), LoraConfig(lora_dim=rank))

    before = {base_fingerprint(adapted(rank)) for rank in (2, 4)}
    assert before == {base_fingerprint(tiny_model("opt"))}
    model = adapted(2)
    with torch.no_grad():
        next(p for n, p in model.named_parameters() if "lora" not in n).flatten()[0] += 1.0
    assert base_fingerprint(model) not in before


def test_every_column_of_a_matrix_is_looked_at(monkeypatch):
    monkeypatch.setattr("dschat_lora.models.fingerprint.SAMPLED_VALUES", 4)
    model = torch.nn.Linear(8, 4, bias=False)
    before = base_fingerprint(model)
    with torch.no_grad():
        model.weight[:, 1:] += 1.0
    assert base_fingerprint(model) != before


def test_any_value_of_an_adapter_counts():
    model = tiny_model("llama")
    apply_lora(model, LoraConfig(lora_dim=256), seed=0)
    before = adapter_fingerprint(model)
    assert adapter_fingerprint(model) == before
    factor = max(adapter_parameters(model).values(), key=lambda p: p.numel())
    with torch.no_grad():
        for place in (1, factor.numel() // 2 + 1, factor.numel() - 2):
            factor.view(-1)[place] += 1.0
            changed = adapter_fingerprint(model)
            assert changed != before
            before = changed


@pytest.mark.parametrize(
    "changed",
    [
        {"final_logit_softcapping": 2.0},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
        {"query_pre_attn_scalar": 8},
        {"attn_implementation": "eager"},
    ],
    ids=str,
)
def test_a_configuration_that_computes_something_else_has_another_fingerprint(changed):
    assert config_fingerprint(Gemma2Config(**changed)) != config_fingerprint(Gemma2Config())


def test_a_fingerprint_of_a_configuration_knows_no_names_and_no_dropout():
    other = Gemma2Config(name_or_path="elsewhere", attention_dropout=0.1, architectures=["One"])
    other.transformers_version = "0"
    assert config_fingerprint(other) == config_fingerprint(Gemma2Config())


def write_base(home, files):
    home.mkdir()
    for name, content in {"config.json": "{}", **files}.items():
        (home / name).write_text(content)
    return str(home)


SHARDED = {
    "model.safetensors.index.json": json.dumps({"weight_map": {"w": "b.st", "v": "a.st"}}),
    "a.st": "first",
    "b.st": "second",
}


def test_weights_are_those_of_the_first_form_that_transformers_loads(tmp_path):
    both = {"model.safetensors": "one", "pytorch_model.bin": "two", "other.bin": "three"}
    single = weights_fingerprint(write_base(tmp_path / "both", both))
    assert single == weights_fingerprint(write_base(tmp_path / "one", {"model.safetensors": "one"}))
    changed = {**both, "model.safetensors": "new"}
    assert single != weights_fingerprint(write_base(tmp_path / "changed", changed))
    old = weights_fingerprint(write_base(tmp_path / "old", {"pytorch_model.bin": "two"}))
    assert old == weights_fingerprint(write_base(tmp_path / "bin", dict([*both.items()][1:])))
    parts = weights_fingerprint(write_base(tmp_path / "parts", SHARDED))
    kept = {**SHARDED, "pytorch_model.bin": "two"}
    assert parts == weights_fingerprint(write_base(tmp_path / "kept", kept))
    for name in ("a.st", "b.st"):
        other = write_base(tmp_path / name, {**SHARDED, name: "third"})
        assert parts != weights_fingerprint(other)
    assert len({single, old, parts, weights_fingerprint(write_base(tmp_path / "none", {}))}) == 4
