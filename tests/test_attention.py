"""The mask of packed rows, by hand."""

import pytest
import torch

from dschat_lora.attention import block_causal_mask


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_position_sees_itself_and_what_precedes_it_in_its_sample(dtype):
    mask = block_causal_mask(torch.tensor([[1, 1, 2, 2, 2, 0, 0], [1, 1, 1, 1, 1, 1, 1]]), dtype)
    assert mask.shape == (2, 1, 7, 7)
    assert mask.dtype == dtype
    assert set(mask.unique().tolist()) == {torch.finfo(dtype).min, 0.0}
    seen = (mask == 0).int()
    assert seen[0, 0].tolist() == [
        [1, 0, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0, 0],
        [0, 0, 1, 0, 0, 0, 0],
        [0, 0, 1, 1, 0, 0, 0],
        [0, 0, 1, 1, 1, 0, 0],
        [0, 0, 0, 0, 0, 1, 0],
        [0, 0, 0, 0, 0, 1, 1],
    ]
    assert seen[1, 0].tolist() == torch.ones(7, 7).tril().int().tolist()


def test_a_row_of_padding_is_not_empty():
    mask = block_causal_mask(torch.zeros(1, 3, dtype=torch.int64), torch.float16)
    assert mask.softmax(-1).isfinite().all()
    assert (mask == 0).sum(-1).tolist() == [[[1, 2, 3]]]
