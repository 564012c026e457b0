"""Greedy answers, against a plain loop over one prompt at a time."""

from types import SimpleNamespace

import pytest
import torch

from dschat_lora.generation.greedy import greedy_decode
from helpers.tiny import tiny_model

PAD, EOS = 1, 2
TOKENIZER = SimpleNamespace(pad_token_id=PAD, eos_token_id=EOS)


def tiny(name):
    return tiny_model(name, pad_token_id=PAD, eos_token_id=EOS, bos_token_id=None)


def greedy(model, prompt, steps):
    ids = list(prompt)
    for _ in range(steps):
        ids.append(int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
        if ids[-1] == EOS:
            break
    return ids[len(prompt) :]


@pytest.mark.parametrize("name", ["opt", "llama"])
def test_answers_of_a_padded_batch_are_those_of_each_prompt_alone(name):
    model = tiny(name)
    prompts = [[5, 6, 7, 8, 9], [10, 11], [12, 13, 14]]
    raise_together = greedy_decode(
        model,
        TOKENIZER,
        prompts,
        eos_ids=[TOKENIZER.eos_token_id],
        max_new_tokens=8,
        device=torch.device("cpu"),
    )
    assert raise_together == [greedy(model, prompt, 8) for prompt in prompts]


@pytest.mark.parametrize(("ends", "expected"), [([EOS], [7] * 4), ([EOS, 7], [7])])
def test_any_end_token_ends_an_answer(ends, expected):
    model = tiny("llama")
    torch.nn.init.zeros_(model.lm_head.weight)
    model.lm_head.bias = torch.nn.Parameter(torch.eye(40)[7] * 9.0)
    device = torch.device("cpu")
    answers = greedy_decode(
        model, TOKENIZER, [[5, 6]], eos_ids=ends, max_new_tokens=4, device=device
    )
    assert answers == [expected]


def test_answer_ends_with_its_first_end_of_sequence():
    model = tiny("llama")
    # A head that says EOS always: the answer is EOS alone, whatever follows it in the batch.
    torch.nn.init.zeros_(model.lm_head.weight)
    model.lm_head.bias = torch.nn.Parameter(
        torch.nn.functional.one_hot(torch.tensor(EOS), 40) * 9.0
    )
    answers = greedy_decode(
        model,
        TOKENIZER,
        [[5, 6], [7]],
        eos_ids=[TOKENIZER.eos_token_id],
        max_new_tokens=4,
        device=torch.device("cpu"),
    )
    assert answers == [[EOS], [EOS]]


@pytest.mark.parametrize("name", ["opt", "llama"])
def test_prompt_without_room_for_an_answer_keeps_its_end(name):
    model = tiny(name)
    limit = model.config.max_position_embeddings = 16
    if name == "opt":
        table = model.model.decoder.embed_positions
        table.weight = torch.nn.Parameter(table.weight[: limit + 2])
    prompt = [3 + (7 * i) % 31 for i in range(40)]
    (answers,) = greedy_decode(
        model,
        TOKENIZER,
        [prompt],
        eos_ids=[TOKENIZER.eos_token_id],
        max_new_tokens=6,
        device=torch.device("cpu"),
    )
    assert answers == greedy(model, prompt[-10:], 6)
