"""Attention of several responses to the prompt that they share."""

import pytest
import torch

from dschat_lora.generation import batch_state
from dschat_lora.generation.kv_cache import KVCache, SharedPrompts, attend_by_products
from dschat_lora.generation.sampling import Sampling
from generation.test_generate import lively, run, sliding
from helpers.decoding import PROMPTS

PROMPT_COUNT, COPIES, WIDTH, COLUMNS, SIZE = 3, 4, 5, 9, 6


@pytest.mark.parametrize("key_heads", [1, 2, 4])
@pytest.mark.parametrize(
    "sequences", [list(range(12)), [11, 0, 7, 5, 6, 1, 2], [8, 3, 9, 10, 11, 1], [4, 5]]
)
def test_each_row_attends_to_the_prompt_that_it_answers(key_heads, sequences):
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    rows = len(sequences)
    prompts = [draw(PROMPT_COUNT, key_heads, WIDTH, SIZE) for _ in range(2)]
    answers = [draw(rows, key_heads, COLUMNS - WIDTH, SIZE) for _ in range(2)]
    of_rows = torch.tensor(sequences) // COPIES
    key, value = (torch.cat([x[of_rows], y], 2) for x, y in zip(prompts, answers, strict=True))
    query = draw(rows, 4, 1, SIZE)
    hidden = torch.rand(rows, 1, 1, COLUMNS, generator=generator) < 0.3
    hidden[..., -1] = False
    mask = torch.zeros(hidden.shape, dtype=torch.float64).masked_fill(hidden, -1e30)
    expected = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, mask, scale=0.7, enable_gqa=True
    ).transpose(1, 2)
    # Only what is shared may be read of the prompts' columns, where there is enough of it.
    if rows >= 2 * PROMPT_COUNT:
        key[:, :, :WIDTH], value[:, :, :WIDTH] = torch.nan, torch.nan
    key.prompts = value.prompts = SharedPrompts(*prompts, torch.tensor(sequences), COPIES)
    output, _ = attend_by_products(None, query, key, value, mask, scaling=0.7)
    torch.testing.assert_close(output, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "make", [lambda: lively("opt"), lambda: lively("llama"), lambda: sliding("gemma3", "sdpa")]
)
def test_responses_are_those_of_rows_that_read_their_own_copy_of_the_prompt(make, monkeypatch):
    seeds = [[10 * i + j for j in range(4)] for i in range(len(PROMPTS))]
    shared = []

    def found():
        return run(make(), PROMPTS, Sampling(20), seeds=seeds, eos_ids=range(3, 8))

    def update(cache, *args, **others):
        keys, values = plain(cache, *args, **others)
        shared.append(hasattr(keys, "prompts"))
        return keys, values

    plain = KVCache.update
    monkeypatch.setattr(KVCache, "update", update)
    together = found()
    assert sum(shared) > 0.8 * len(shared)
    start = KVCache.start
    monkeypatch.setattr(
        batch_state.KVCache, "start", lambda cache, rows, copies, _: start(cache, rows, copies)
    )
    shared.clear()
    assert found() == together
    assert not any(shared)
    assert len({len(text) for each in together for text in each}) > 5, "they end one by one"
