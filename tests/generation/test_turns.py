"""Later turns of an episode: what was computed is kept, and each sequence has its own limit."""

import random

import pytest

from dschat_lora.generation.sampling import Sampling
from helpers.decoding import PROMPTS, decoder_of, shapes_read
from helpers.tiny import tiny_model

LIMITS = [3, 12, 1, 5, 12]


def decoded(model, prompts, limits=None, *, copies=1, most=12):
    decoder = decoder_of(model, [2])
    seeds = [[10 * n + k for k in range(copies)] for n in range(len(prompts))]
    responses = decoder(prompts, Sampling(most), seeds=seeds, limits=limits, keep_logprobs=True)
    return responses.tokens(), responses.logprobs()


@pytest.mark.parametrize("kind", ["opt", "llama", "neox"])
def test_each_sequence_ends_at_its_limit_and_says_what_it_says_without(kind):
    model = tiny_model(kind)
    whole, logprobs = decoded(model, PROMPTS, copies=2)
    limits = [n for n in LIMITS for _ in range(2)]
    texts, drawn = decoded(model, PROMPTS, LIMITS, copies=2)
    assert texts == [tokens[:n] for tokens, n in zip(whole, limits, strict=True)]
    for mine, expected, n in zip(drawn, logprobs, limits, strict=True):
        assert mine == pytest.approx(expected[:n], abs=1e-5)


@pytest.mark.parametrize("kind", ["opt", "gpt2"])
def test_a_long_sequence_beside_a_short_one_needs_no_positions_that_the_model_lacks(kind):
    model = tiny_model(kind)  # 64 positions
    prompts, limits = [[7] * 60, *[[8, n] for n in range(20)]], [4, *[40] * 20]
    texts, _ = decoded(model, prompts, limits, most=40)
    alone, _ = decoded(model, prompts[:1], most=4)
    assert texts[0] == alone[0]
    with pytest.raises(AssertionError, match="60 tokens and 5 new ones exceed the model's 64"):
        decoded(model, prompts, [5, *[40] * 20], most=40)


def sliding_model(attention):
    return tiny_model("gemma3", attention, sliding_window=5)


MODELS = {
    "opt": lambda: tiny_model("opt"),
    "llama, eager": lambda: tiny_model("llama", "eager"),
    "neox": lambda: tiny_model("neox"),
    "sliding": lambda: sliding_model("sdpa"),
    "sliding, eager": lambda: sliding_model("eager"),
}


def play(model, *, keeps, ends=(2, 7, 11, 13), **options):
    """Three turns of ragged episodes: tokens and log-probabilities, and how many were computed.

    Rows end at different steps, leave, and come back in another order.
    """
    shapes = shapes_read(model)
    decoder = decoder_of(model, ends, retains=keeps, **options)
    sampling, rng, turns = Sampling(8), random.Random(0), []
    histories = [list(prompt) for prompt in PROMPTS for _ in range(2)]
    rows = list(range(len(histories)))
    seeds = [[10 * n, 10 * n + 1] for n in range(len(PROMPTS))]
    result = decoder(PROMPTS, sampling, seeds=seeds, keep_logprobs=True)
    for turn in range(3):
        tokens, logprobs = result.tokens(), result.logprobs()
        turns.append((rows, tokens, logprobs))
        known = {}
        for place, row in enumerate(rows):
            histories[row] += tokens[place]
            known[row] = (place, len(histories[row]) - 1)
        rows = [row for row in rng.sample(rows, len(rows)) if (row + turn) % 3]
        for row in rows:
            histories[row] += rng.choices(range(3, 61), k=rng.randint(1, 6))
        result = decoder(
            [histories[row] for row in rows],
            sampling,
            seeds=[[100 * turn + row] for row in rows],
            limits=[3 + row % 6 for row in rows],
            prefixes=[known[row] for row in rows],
            keep_logprobs=True,
        )
    return turns, sum(rows * tokens for rows, tokens in shapes)


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("options", [{}, {"record": lambda step: step}], ids=["plain", "in place"])
def test_turns_that_keep_keys_and_values_say_what_turns_read_anew_say(kind, options, monkeypatch):
    monkeypatch.setattr("dschat_lora.generation.batch_state.PROMPT_BUCKET", 4)
    kept, fewer = play(MODELS[kind](), keeps=True, **options)
    anew, more = play(MODELS[kind](), keeps=False, **options)
    assert len({len(tokens) for _, texts, _ in anew for tokens in texts}) > 3
    for (rows, tokens, logprobs), (same_rows, expected, wanted) in zip(kept, anew, strict=True):
        assert rows == same_rows
        assert tokens == expected
        for mine, other in zip(logprobs, wanted, strict=True):
            assert mine == pytest.approx(other, abs=2e-5)
    assert fewer < more


@pytest.mark.parametrize(
    ("known", "width"), [(14, 8), (1, 20)], ids=["rounded up", "no more than there are"]
)
@pytest.mark.parametrize("kind", MODELS)
def test_what_follows_kept_tokens_is_read_in_few_widths(kind, known, width, monkeypatch):
    monkeypatch.setattr("dschat_lora.generation.batch_state.COLUMN_BUCKET", 4)
    monkeypatch.setattr("dschat_lora.generation.batch_state.PROMPT_BUCKET", 8)
    model, prompt, sampling = MODELS[kind](), [5, 6, 7, 8], Sampling(12)
    decoder = decoder_of(model, largest=(1, 32), retains=True, record=lambda step: step)
    (answer,) = decoder([prompt], sampling, seeds=[[0]]).tokens()
    text = [*prompt, *answer[:-1], 9, 10, 11, 12]
    shapes = shapes_read(model)
    texts = decoder([text], sampling, seeds=[[1]], prefixes=[(0, known)]).tokens()
    # 32 columns, of which 12 are left to the answer.
    assert [tokens for _, tokens in shapes] == [width] + [1] * 11
    assert texts == decoder_of(model)([text], sampling, seeds=[[1]]).tokens()
