"""Decoding of models whose attention is not plain, against stock `generate` on each prompt."""

import random
import warnings

import pytest
import torch

from dschat_lora.generation.generate import check_cache
from dschat_lora.generation.kv_cache import RecurrentStates, takes_cache
from dschat_lora.generation.sampling import Sampling
from dschat_lora.generation.slots import SlotRows
from dschat_lora.models.backbone import cache_argument
from dschat_lora.models.causal_lm import CausalLMLogprobs
from helpers.decoding import decoder_of, generated
from helpers.spread import ALL
from helpers.tiny import FEW, UNCACHED, UNUSUAL, VOCAB, unusual_model

PROMPTS = [[5, 9, 11], [7, 8, 9, 10, 11, 12, 13, 14, 15], [3], [17, 4, 20]]
KINDS = UNUSUAL if ALL else (*FEW, "diffllama")


def trainers_logprobs(model, prompt, answer):
    """Log-probabilities of an answer as the trainer computes them."""
    ids = torch.tensor([prompt + answer])
    positions = torch.arange(ids.shape[1])[None]
    ones, zeros = torch.ones_like(ids), torch.zeros_like(ids)
    places = torch.arange(len(prompt) - 1, ids.shape[1] - 1)
    network = CausalLMLogprobs(model)
    network.full_logits = True
    return network(ids, positions, ones, zeros, places, torch.tensor(answer)).tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_answers_are_those_of_generate_and_as_probable_as_in_training(kind):
    model = unusual_model(kind)
    check_cache(model)
    assert takes_cache(model) == (kind not in UNCACHED)
    seeds = [[10 * n, 10 * n + 1] for n in range(len(PROMPTS))]
    decoder = decoder_of(model)
    texts = decoder(PROMPTS, Sampling(6, do_sample=False), seeds=seeds).tokens()
    for number, prompt in enumerate(PROMPTS):
        expected = generated(model, prompt, 6, [VOCAB])
        assert texts[2 * number : 2 * number + 2] == [expected] * 2
    # They end one by one, and rows that are left take their places.
    decoder = decoder_of(model, range(2, 8))
    drawn = decoder(PROMPTS, Sampling(12), seeds=seeds, keep_logprobs=True)
    assert len({*map(len, drawn.tokens())}) > 2
    for number, (answer, own) in enumerate(zip(drawn.tokens(), drawn.logprobs(), strict=True)):
        expected = trainers_logprobs(model, PROMPTS[number // 2], answer)
        assert own == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize(
    ("forward", "name"),
    [
        (lambda self, ids, past_key_values=None, cache=None: ids, "cache"),
        (lambda self, ids, past_key_values=None: ids, "past_key_values"),
        (lambda self, ids, cache_params=None: ids, "cache_params"),
        (lambda self, ids, state=None: ids, None),
    ],
)
def test_a_cache_goes_by_the_name_that_the_version_of_transformers_has_for_it(forward, name):
    kind = type("Named", (torch.nn.Module,), {"forward": forward})
    assert cache_argument(kind()) == name


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in UNCACHED])
def test_rows_that_others_have_left_begin_anew(kind):
    model, rng, texts = unusual_model(kind), random.Random(0), []
    plain = unusual_model(kind)
    rows = SlotRows(model, pad_id=0)

    def check(logits):
        for text, own in zip(texts, logits, strict=True):
            expected = plain(input_ids=torch.tensor([text]), use_cache=False).logits[0, -1]
            torch.testing.assert_close(own, expected, rtol=0, atol=1e-4)

    def draw(length):
        return [rng.randrange(VOCAB) for _ in range(length)]

    with torch.no_grad(), rows.kernels():
        for lengths, leaves in ([(3, 9)], ()), ([], (0,)), ([(5, 1, 5)], (1, 0)), ([(2, 7)], ()):
            for group in lengths:
                new = [draw(length) for length in group]
                before, texts = texts, new
                check(rows.join(new, [0] * len(new))[0])
                texts = before + new
            tokens = draw(len(texts))
            texts = [[*text, token] for text, token in zip(texts, tokens, strict=True)]
            check(rows.step(tokens))
            for row in leaves:
                rows.leave(row)
                texts[row] = texts[-1]
                texts.pop()


@pytest.mark.parametrize("kind", ["qwen3_5_text", "lfm2"])
def test_what_a_state_has_passed_is_read_again_in_a_later_turn(kind):
    model = unusual_model(kind)
    decoder = decoder_of(model, retains=True)
    seeds = [[n] for n in range(len(PROMPTS))]
    first = decoder(PROMPTS, Sampling(5), seeds=seeds, limits=[5, 2, 3, 1]).tokens()
    longer = [p + answer + [30, 31] for p, answer in zip(PROMPTS, first, strict=True)]
    prefixes = [(n, len(PROMPTS[n]) + len(first[n]) - 1) for n in range(len(PROMPTS))]
    texts = decoder(longer, Sampling(5), seeds=seeds, prefixes=prefixes).tokens()
    assert texts == decoder_of(model)(longer, Sampling(5), seeds=seeds).tokens()


def test_ranks_that_gather_weights_read_prompts_by_as_many_passes():
    model = unusual_model("lfm2")
    assert takes_cache(model)
    for parameter in model.parameters():
        parameter.ds_numel = 2 * parameter.numel()  # as ZeRO 3 marks what is elsewhere too
    assert not takes_cache(model)  # each token is then one pass over all texts


@pytest.mark.parametrize("fault", ["state of the step before", "state of another row"])
def test_a_model_that_decodes_otherwise_with_our_cache_goes_without(fault, monkeypatch):
    plain = RecurrentStates.get_recurrent_state

    def wrong(cache, *place):
        state = plain(cache, *place)
        if state is None:
            return None
        return state.clone() if fault == "state of the step before" else state.roll(1, 0)

    monkeypatch.setattr(RecurrentStates, "get_recurrent_state", wrong)
    model = unusual_model("mamba2")
    with pytest.warns(UserWarning, match="decoding without a cache, more slowly: with it, Mamba2"):
        check_cache(model)
    assert not takes_cache(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_cache(model)  # once
    with pytest.raises(ValueError, match="states the KV cache does not support"):
        SlotRows(model, pad_id=0)
    seeds = [[0]] * len(PROMPTS)
    decoder = decoder_of(model)
    texts = decoder(PROMPTS, Sampling(4, do_sample=False), seeds=seeds).tokens()
    assert texts[0] == generated(model, PROMPTS[0], 4, [VOCAB])
