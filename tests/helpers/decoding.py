"""Decoding with tiny models: decoders, a slow loop, what a model is given, and responses alike."""

import pytest
import torch

from dschat_lora.generation.generate import Decoder

CPU = torch.device("cpu")
PROMPTS = [[5, 6, 7, 8, 9], [10, 11], [12, 13, 14], list(range(3, 20)), [21]]


def decoder_of(model, ends=(), **options):
    return Decoder(model, eos_ids=ends, pad_id=0, device=CPU, **options)


@torch.no_grad()
def greedy_loop(model, prompt, steps, ends=()):
    """The greedy answer of a loop that reads everything at each step."""
    answer = []
    while len(answer) < steps and not {*answer[-1:]} & {*ends}:
        ids = torch.tensor([[*prompt, *answer]])
        answer.append(int(model(input_ids=ids, use_cache=False).logits[0, -1].argmax()))
    return answer


def generated(model, prompt, steps, end=None):
    """transformers' greedy answer to one prompt."""
    ids = torch.tensor([prompt])
    options = {"max_new_tokens": steps, "do_sample": False, "pad_token_id": 0, "eos_token_id": end}
    output = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
    return output[0, len(prompt) :].tolist()


def shapes_read(model):
    """The (rows, tokens) of each forward pass from now on, a list that grows."""
    shapes = []
    model.register_forward_pre_hook(
        lambda module, args, given: shapes.append(tuple(given["input_ids"].shape)), with_kwargs=True
    )
    return shapes


def check_alike(plain, responses, within=5e-5):
    """That two calls gave the same tokens, and log-probabilities as near as rounding leaves them.

    Logits of about 10 are rounded otherwise, and divided by a temperature of 0.4.
    """
    assert responses.tokens() == plain.tokens()
    for name in ("logprobs", "sampler_logprobs"):
        pairs = zip(getattr(responses, name)(), getattr(plain, name)(), strict=True)
        for ours, expected in pairs:
            assert ours == pytest.approx(expected, abs=within)
