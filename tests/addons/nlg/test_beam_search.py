from itertools import product

import pytest
import torch
from transformers import GenerationConfig

from dschat_lora.addons.nlg.beam_search import (
    BeamSearch,
    TextRules,
    beam_search,
    repeated_ngram_ends,
)
from generation.test_logits import check_logits_are_unrounded, fp32_products, random_model
from helpers import tiny

__all__ = ["fp32_products"]

CPU = torch.device("cpu")
PROMPTS = [[7, 3, 9], [4], [11, 2, 5, 8, 6], [3, 3]]


def toy(vocab, *, seed=0, spread=0.6):
    """A small GPT-2 whose next token depends on all before it."""
    size = {"vocab_size": vocab, "hidden_size": 16, "num_attention_heads": 2}
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    config = tiny.tiny_config("gpt2", initializer_range=spread, **size, **ends)
    return tiny.random_model(config, scale=0.0, seed=seed)


@torch.no_grad()
def logprobs(model, rows):
    """(N, V) of every token that may follow rows of one length."""
    return model(torch.tensor(rows)).logits[:, -1].double().log_softmax(-1)


def best_of_all(model, prompt, *, ends, length, penalty):
    """The best of every text there is, by the definition of its score."""
    tokens = range(model.config.vocab_size)
    told = {}
    for size in range(length):
        texts = list(product(tokens, repeat=size))
        told |= zip(texts, logprobs(model, [[*prompt, *text] for text in texts]), strict=True)

    def score_of(text):
        total = sum(float(told[text[:i]][token]) for i, token in enumerate(text))
        return total / len(text) ** penalty

    def is_whole(text):
        return (text[-1] in ends or len(text) == length) and ends.isdisjoint(text[:-1])

    texts = [text for size in range(1, length + 1) for text in product(tokens, repeat=size)]
    best = max(filter(is_whole, texts), key=score_of)
    return list(best[:-1] if best[-1] in ends else best)


@pytest.mark.parametrize("ends", [(0,), (0, 3)])
def test_a_wide_search_finds_the_best_of_all_texts(ends):
    lengths = set()
    for seed, penalty in product((4, 11, 13), (0.0, 0.8, 2.0)):
        model = toy(5, seed=seed, spread=0.4)
        # Wider than there are texts to go on from and tokens to add.
        search = BeamSearch(80, 3, ends, pad_id=0, length_penalty=penalty)
        (text,) = beam_search(model, [[1, 2, 4]], search, device=CPU)
        assert text == best_of_all(model, [1, 2, 4], ends={*ends}, length=3, penalty=penalty)
        lengths.add(len(text))
    assert len(lengths) > 1


def slow_search(model, prompt, *, beams, ends, length, penalty):
    """Beam search to the very end, one text after another."""
    live, done = [((), 0.0)], []
    for size in range(1, length + 1):
        after = logprobs(model, [[*prompt, *text] for text, _ in live])
        longer = sorted(
            (
                ((*text, token), score + float(row[token]))
                for (text, score), row in zip(live, after, strict=True)
                for token in range(model.config.vocab_size)
            ),
            key=lambda each: -each[1],
        )
        is_over = size == length
        done += [(s / size**penalty, t) for t, s in longer[:beams] if t[-1] in ends or is_over]
        live = [each for each in longer if each[0][-1] not in ends][:beams]
    best = max(done)[1]
    return list(best[:-1] if best[-1] in ends else best)


def test_the_search_goes_on_until_nothing_open_can_be_better():
    for seed in range(8):
        model = toy(6, seed=seed, spread=0.4)
        (text,) = beam_search(model, [[1, 2, 4]], BeamSearch(2, 7, (0, 3), 0, 2.0), device=CPU)
        options = {"beams": 2, "ends": (0, 3), "length": 7, "penalty": 2.0}
        assert text == slow_search(model, [1, 2, 4], **options), seed


@pytest.mark.smoke
def test_one_beam_is_greedy():
    model = toy(12)
    for prompt in PROMPTS:
        tokens = list(prompt)
        while len(tokens) < len(prompt) + 10:
            tokens.append(int(logprobs(model, [tokens])[0].argmax()))
            if tokens[-1] in (0, 6):
                break
        expected = [t for t in tokens[len(prompt) :] if t not in (0, 6)]
        assert beam_search(model, [prompt], BeamSearch(1, 10, (0, 6), 0), device=CPU) == [expected]


@pytest.mark.parametrize("beams", [1, 3])
def test_what_the_model_came_with_has_no_say(beams):
    model, search = toy(12), BeamSearch(beams, 9, (0,), 0)
    plain = beam_search(model, PROMPTS, search, device=CPU)
    first = next(text[0] for text in plain if text)
    model.generation_config = GenerationConfig(
        do_sample=True, suppress_tokens=[first], num_return_sequences=2, repetition_penalty=9.0
    )
    assert beam_search(model, PROMPTS, search, device=CPU) == plain


@pytest.mark.parametrize("beams", [1, 4])
def test_many_at_a_time_and_no_cache_change_nothing(beams):
    model = toy(12, seed=1)
    search = BeamSearch(beams, 9, (0,), 0, 0.8, no_repeat_ngram_size=3)
    raise_together = beam_search(model, PROMPTS, search, device=CPU)
    assert raise_together == [beam_search(model, [p], search, device=CPU)[0] for p in PROMPTS]
    assert raise_together == beam_search(model, PROMPTS, search, device=CPU, use_cache=False)
    assert any(raise_together)


def test_no_ngram_occurs_twice():
    model = toy(12, seed=2, spread=0.3)

    def repeats(n):
        search = BeamSearch(3, 30, (0,), 0, 1.0, n)
        texts = beam_search(model, PROMPTS, search, device=CPU)
        grams = [[tuple(text[i : i + 4]) for i in range(len(text) - 3)] for text in texts]
        return sum(len(each) - len(set(each)) for each in grams)

    assert repeats(0) > 0 == repeats(4)


def test_ngrams_of_the_prompt_may_be_said():
    rules = TextRules(BeamSearch(1, 9, (0,), 0, no_repeat_ngram_size=3), start=3)
    rows = torch.tensor([[1, 2, 3, 1, 2], [1, 2, 3, 4, 5]])
    assert torch.isfinite(rules(rows, torch.zeros(2, 6))).all()
    said = torch.tensor([[1, 2, 3, 1, 2, 5, 1, 2]])
    assert torch.isinf(rules(said, torch.zeros(1, 6)))[0].tolist() == [False] * 5 + [True]


@pytest.mark.parametrize(
    ("tokens", "n", "expected"),
    [
        *(([1, 2, 3, 1, 2], 3, [3]), ([1, 2, 3, 1, 2, 4, 1, 2], 3, [3, 4]), ([1, 2, 3, 1], 3, [])),
        *(([1, 1], 2, [1]), ([1], 3, []), ([], 3, []), ([5, 6], 1, [5, 6])),
    ],
)
def test_completing(tokens, n, expected):
    assert repeated_ngram_ends(tokens, n) == expected


def test_the_repetition_penalty_is_of_tokens_of_the_text():
    rules = TextRules(BeamSearch(1, 9, (0,), 0, repetition_penalty=2.0), start=2)
    scores = torch.tensor([[0.1, 0.2, 0.3, 0.4]]).log()
    after = rules(torch.tensor([[3, 0, 1, 1]]), scores)
    torch.testing.assert_close(after.exp(), torch.tensor([[0.1, 0.04, 0.3, 0.4]]))
    assert rules(torch.tensor([[3, 0]]), scores).equal(scores.log_softmax(-1))


def test_a_text_ends_at_any_of_its_ends_and_not_before_its_least_length():
    model = toy(12, seed=1)
    ends = (0, 6, 9)
    for least in (0, 5):
        search = BeamSearch(4, 12, ends, 0, 0.8, min_length=least)
        texts = beam_search(model, PROMPTS, search, device=CPU)
        assert not any(token in ends for text in texts for token in text)
        assert all(len(text) >= least for text in texts)
    shorter = [len(t) for t in beam_search(model, PROMPTS, BeamSearch(4, 12, ends, 0), device=CPU)]
    assert min(shorter) < 5


def test_the_logits_of_beams_are_unrounded(fp32_products):
    check_logits_are_unrounded(
        random_model("opt"),
        lambda model: beam_search(model, PROMPTS, BeamSearch(2, 2, (2,), 0), device=CPU),
    )


@pytest.mark.parametrize(
    "bad", [[torch.nan, 0.0, 0.0], [torch.inf, 0.0, 0.0], [-torch.inf, -torch.inf, -torch.inf]]
)
def test_beam_search_does_not_go_on_where_no_token_has_a_probability(bad):
    rules = TextRules(BeamSearch(2, 8, (2,), 0), start=1)
    fine = [0.0, 1.0, -torch.inf]
    rows = torch.tensor([[1, 0], [1, 2]])
    assert rules(rows, torch.tensor([fine, fine])).exp().sum(-1).tolist() == [1.0, 1.0]
    with pytest.raises(
        ValueError, match="token 2 of a text has no finite probability, because the model"
    ):
        rules(rows, torch.tensor([fine, bad]))
