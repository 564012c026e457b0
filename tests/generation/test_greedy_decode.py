"""Greedy answers, against a plain loop over one prompt at a time."""

from types import SimpleNamespace

import pytest
import torch

from dschat_lora.generation.greedy import greedy_decode
from helpers.decoding import greedy_loop
from helpers.tiny import tiny_model

PAD, EOS = 1, 2
TOKENIZER = SimpleNamespace(pad_token_id=PAD, eos_token_id=EOS)


def tiny(name):
    return tiny_model(name, pad_token_id=PAD, eos_token_id=EOS, bos_token_id=None)


def decoded(model, prompts, steps, ends=(EOS,)):
    return greedy_decode(
        model, TOKENIZER, prompts, eos_ids=ends, max_new_tokens=steps, device=torch.device("cpu")
    )


@pytest.mark.parametrize("name", ["opt", "llama"])
def test_answers_of_a_padded_batch_are_those_of_each_prompt_alone(name):
    model, prompts = tiny(name), [[5, 6, 7, 8, 9], [10, 11], [12, 13, 14]]
    expected = [greedy_loop(model, prompt, 8, [EOS]) for prompt in prompts]
    assert decoded(model, prompts, 8) == expected


@pytest.mark.parametrize(
    ("ends", "said", "expected"), [([EOS], 7, [7] * 4), ([EOS, 7], 7, [7]), ([EOS], EOS, [EOS])]
)
def test_an_answer_ends_with_its_first_end_token_whatever_follows_it(ends, said, expected):
    model = tiny("llama")
    # A head that says one token always.
    torch.nn.init.zeros_(model.lm_head.weight)
    model.lm_head.bias = torch.nn.Parameter(torch.eye(model.config.vocab_size)[said] * 9.0)
    assert decoded(model, [[5, 6], [7]], 4, ends) == [expected] * 2


@pytest.mark.parametrize("name", ["opt", "llama"])
def test_prompt_without_room_for_an_answer_keeps_its_end(name):
    model = tiny(name)
    limit = model.config.max_position_embeddings = 16
    if name == "opt":
        table = model.model.decoder.embed_positions
        table.weight = torch.nn.Parameter(table.weight[: limit + 2])
    prompt = [3 + (7 * i) % 31 for i in range(40)]
    assert decoded(model, [prompt], 6) == [greedy_loop(model, prompt[-10:], 6, [EOS])]
