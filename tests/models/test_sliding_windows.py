"""Models that attend over a sliding window keep it, packed or not."""

import pytest
import torch

from dschat_lora.algos.segments import block_causal_mask
from dschat_lora.models.backbone import Backbone, attention_windows
from helpers.tiny import tiny_model

WINDOW = 4


def tiny(name, attention="eager"):
    changes = {"sliding_window": WINDOW}
    if name == "qwen2":
        kinds = ["full_attention", "sliding_attention"]
        changes |= {"use_sliding_window": True, "layer_types": kinds}
    return tiny_model(name, attention, **changes)


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
