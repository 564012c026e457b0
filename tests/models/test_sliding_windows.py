"""Models that attend over a sliding window keep it, packed or not."""

import pytest
import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from dschat_lora.algos.segments import block_causal_mask
from dschat_lora.models.backbone import Backbone, attention_windows

SHAPE = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
}
WINDOW = 4


def tiny(name, attention="eager"):
    torch.manual_seed(0)
    extra = {"attn_implementation": attention, "pad_token_id": 0}
    if name == "mistral":
        config = MistralConfig(**SHAPE, sliding_window=WINDOW, **extra)
        return MistralForCausalLM(config).eval()
    if name == "qwen2":
        config = Qwen2Config(
            **SHAPE, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1, **extra
        )
        return Qwen2ForCausalLM(config).eval()
    kinds = ["sliding_attention", "full_attention"]
    config = Gemma3TextConfig(
        **SHAPE, head_dim=8, sliding_window=WINDOW, layer_types=kinds, **extra
    )
    return Gemma3ForCausalLM(config).eval()


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("name", ["mistral", "gemma3", "qwen2"])
def test_packed_samples_longer_than_the_window_equal_the_models_own_answer(name, attention):
    model = tiny(name, attention)
    generator = torch.Generator().manual_seed(1)
    samples = [torch.randint(1, 40, (n,), generator=generator) for n in (11, 7, 13)]
    packed = Backbone(model)(
        torch.cat(samples)[None],
        torch.cat([torch.arange(len(s)) for s in samples])[None],
        torch.cat([torch.full((len(s),), i + 1) for i, s in enumerate(samples)])[None],
    )
    alone = [model.model(input_ids=s[None], use_cache=False).last_hidden_state for s in samples]
    torch.testing.assert_close(packed, torch.cat(alone, 1), rtol=1e-5, atol=1e-5)


def test_window_of_two_sees_itself_and_its_neighbour():
    mask = block_causal_mask(torch.tensor([[1, 1, 1, 2, 2]]), torch.float32, window=2)
    assert (mask[0, 0] == 0).int().tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [0, 1, 1, 0, 0],
        [0, 0, 0, 1, 0],
        [0, 0, 0, 1, 1],
    ]


def test_layers_whose_mask_is_none_of_ours_are_told():
    config = tiny("mistral").config
    config.layer_types = ["chunked_attention", "full_attention"]
    assert attention_windows(config) is None
    assert Backbone(tiny("mistral")).own_mask is False
