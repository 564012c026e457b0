"""Whole decodes whose attention reads each row's own columns, by the kernels of a GPU."""

import pytest
import torch

from dschat_lora.generation import kv_cache
from dschat_lora.generation.generate import check_cache
from dschat_lora.generation.kv_cache import attend_by_kernel, takes_cache
from dschat_lora.generation.sampling import Sampling
from dschat_lora.kernels import support
from dschat_lora.kernels.attention import OwnColumns
from generation.test_generate import lively, sliding
from helpers.decoding import check_alike, decoder_of
from helpers.spread import ALL
from helpers.tape import Tape
from helpers.tiny import tiny_model

PROMPTS = [[5, 6, 7, 8, 9], [10, 11], list(range(3, 20))]


def windowed():
    """Qwen2 whose second layer has a window."""
    kinds = ["full_attention", "sliding_attention"]
    return tiny_model("qwen2", use_sliding_window=True, sliding_window=5, layer_types=kinds)


MODELS = {
    "llama": lambda: lively("llama"),
    "opt": lambda: lively("opt"),
    "qwen2": windowed,
    "mistral": lambda: sliding("mistral", "sdpa"),
    "gemma3": lambda: sliding("gemma3", "sdpa"),
    "qwen3_moe": lambda: lively("qwen3_moe"),
}


def drawn(model, copies, *, prompts=PROMPTS, new_tokens=14, **options):
    """Texts and log-probabilities; with ``calls`` by the operators, whose columns are noted."""
    decoder = decoder_of(model, range(3, 9), **options)
    seeds = [[10 * n + copy for copy in range(copies)] for n in range(len(prompts))]
    responses = decoder(prompts, Sampling(new_tokens), seeds=seeds, keep_logprobs=True)
    return responses


@pytest.fixture
def columns(monkeypatch):
    """Have steps run by the operators; of each call, ends of prompts that are shared, and tiles."""
    noted, attend = [], kv_cache.attend_own_columns

    def attend_noted(query, key, value, columns, *, scale):
        pairs = zip(columns.first.tolist(), columns.own.tolist(), strict=True)
        noted.append(({own for first, own in pairs if own > first}, columns.tiles))
        return attend(query, key, value, columns, scale=scale)

    def start(*, interpreted=False):
        if interpreted:
            pytest.importorskip("triton")
        monkeypatch.setattr(support, "ON_CPU" if interpreted else "PLAIN_ON_CPU", True)
        monkeypatch.setattr(kv_cache, "attend_own_columns", attend_noted)
        return noted

    return start


@pytest.mark.parametrize("record", [None, Tape])
@pytest.mark.parametrize("copies", [1, 3, 12] if ALL else [3])
@pytest.mark.parametrize("kind", MODELS)
def test_texts_and_logprobs_are_those_of_masked_attention(kind, copies, record, columns):
    model = MODELS[kind]()
    plain, noted = drawn(model, copies), columns()
    # Recorded steps have rows without sequences.
    check_alike(plain, drawn(model, copies, record=record), 2e-5)
    assert len({*map(len, plain.tokens())}) > 1, "they end one by one, and others take their rows"
    assert {tiles is None for _, tiles in noted} == {copies == 1}


@pytest.mark.parametrize("record", [None, Tape])
@pytest.mark.parametrize("kind", MODELS if ALL else ["llama", "qwen2"])
def test_rows_that_are_refilled_say_the_same(kind, record, columns, monkeypatch):
    monkeypatch.setattr("dschat_lora.generation.generate.CPU_POLL", 3)
    model = MODELS[kind]()
    plain, noted = drawn(model, 4), columns()
    check_alike(plain, drawn(model, 4, record=record, largest=(6, 0)), 2e-5)
    ends = {end for ends, _ in noted for end in ends}
    assert ends <= {*map(len, PROMPTS)}
    assert len(ends) > 1, "of prompts"


@pytest.mark.parametrize("largest", [(0, 0), (3, 0)])
def test_a_later_call_shares_its_own_prompts(largest, columns):
    model, calls = MODELS["llama"](), [PROMPTS[:2], [[9, 8, 7, 6, 5], [11, 10]], PROMPTS[:2]]

    def said(decoder):
        for prompts in calls:
            responses = decoder(prompts, Sampling(9), seeds=[[0, 1], [2, 3]])
            yield [list(tokens) for tokens in responses.tokens()]

    plain, _ = [*said(decoder_of(model))], columns()
    assert [*said(decoder_of(model, record=Tape, largest=largest))] == plain
    assert plain[0] == plain[2] != plain[1]


@pytest.mark.parametrize("fault", ["wrong", "fails"])
def test_kernels_that_fail_are_left_alone_with_a_warning(fault, monkeypatch):
    def attend(query, *_, **__):
        if fault == "fails":
            raise OSError("there is no compiler")
        return torch.ones_like(query)

    monkeypatch.setattr(support, "PLAIN_ON_CPU", True)
    monkeypatch.setattr(support, "OFF", False)
    monkeypatch.setattr(kv_cache, "attend_own_columns", attend)
    told = {"wrong": r"relative error \d", "fails": "OSError: there is no compiler"}
    model = MODELS["llama"]()
    with pytest.warns(UserWarning, match=f"without kernels in Triton, .*{told[fault]}"):
        check_cache(model)
    assert (support.OFF, takes_cache(model)) == (True, True)


@pytest.mark.parametrize("kind", MODELS if ALL else ["qwen2"])
def test_kernels_say_the_same(kind, columns):
    model, options = MODELS[kind](), {"prompts": PROMPTS[:2], "new_tokens": 14 if ALL else 7}
    plain, noted = drawn(model, 3, **options), columns(interpreted=True)
    check_alike(plain, drawn(model, 3, **options), 2e-5)
    assert noted


def biased():
    return tiny_model("bloom", None)


def capped():
    return tiny_model("gemma2", None, sliding_window=4)


def with_sinks():
    return tiny_model("gpt_oss", None)


@pytest.mark.parametrize(
    ("make", "served"),
    [
        (lambda: tiny_model("neox"), True),
        (lambda: tiny_model("qwen3"), True),
        (capped, False),
        (with_sinks, False),
        (biased, False),
    ],
    ids=["neox", "qwen3", "gemma2", "gpt-oss", "bloom"],
)
def test_attention_is_served_where_a_mask_says_all_of_it(make, served, columns):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = make()
    plain, noted = drawn(model, 2, new_tokens=5), columns()
    check_alike(plain, drawn(model, 2, new_tokens=5), 2e-5)
    assert bool(noted) == served


@pytest.mark.parametrize(
    ("options", "served"),
    [
        ({}, True),
        ({"softcap": None, "s_aux": None, "sliding_window": 4, "dropout": 0.0}, True),
        ({"softcap": 30.0}, False),
        ({"s_aux": torch.zeros(2)}, False),
        ({"position_bias": torch.zeros(1, 2, 1, 9)}, False),
    ],
)
@pytest.mark.parametrize("case", ["alike", "two tokens", "values are narrower", "mask is another"])
def test_other_options_and_shapes_are_left_to_masked_attention(case, options, served):
    tokens, narrower = 1 + (case == "two tokens"), 4 * (case == "values are narrower")
    query, keys = torch.randn(3, 2, tokens, 8), torch.randn(3, 2, 9, 8)
    mask, told = torch.zeros(3, 1, tokens, 9), []
    first, last = torch.zeros(3, dtype=torch.int64), torch.full((3,), 8)
    vars(mask)["columns"] = OwnColumns(first, first, last)
    given = mask + 0 if case == "mask is another" else mask
    arguments = None, query, keys, keys[..., narrower:], given
    output, _ = attend_by_kernel(
        lambda *_, **given: (told.append(given), None), *arguments, **options
    )
    assert (not told) == (served and case == "alike")
    if not told:
        expected = torch.nn.functional.scaled_dot_product_attention(query, keys, keys)
        torch.testing.assert_close(output, expected.transpose(1, 2))
    else:
        assert told == [{"scaling": None, **options}]
