"""What names of layers and parameters tell."""

import pytest

from dschat_lora.lora.names import adapted_modules, is_of_expert


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("model.layers.0.mlp.experts.gate_up_proj", True),
        ("model.layers.0.mlp.experts.down_proj.lora_A", True),
        ("model.layers.0.mlp.experts.11.w1", True),
        ("model.layers.0.mlp.experts.11.w1.lora_B", True),
        ("experts.down_proj", True),
        # JetMoE's router stands among its experts.
        ("model.layers.0.self_attention.experts.router.layer", False),
        ("model.layers.0.mlp.shared_experts.down_proj.lora_A", False),
        ("model.layers.0.mlp.down_proj", False),
    ],
)
def test_layers_of_experts_are_told_by_their_names(name, expected):
    assert is_of_expert(name) == expected


def test_modules_with_factors_are_named_once():
    names = ("a.b.lora_A", "a.b.lora_B", "a.b.trained_bias", "c.lora_embedding_A", "d.trained.w")
    assert adapted_modules(names) == {"a.b", "c"}
