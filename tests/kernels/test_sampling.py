"""Tokens drawn by kernels, in Triton's interpreter, against a plain loop over the vocabulary."""

import math

import pytest
import torch

from dschat_lora.generation.sampling import Sampling, sample_tokens
from dschat_lora.kernels import sampling, support
from helpers.spread import ALL

INF, NAN = math.inf, math.nan
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's, of NaN


@pytest.fixture(autouse=True)
def small_blocks_by_kernels(monkeypatch):
    monkeypatch.setattr(support, "ON_CPU", True)
    monkeypatch.setattr(sampling, "BLOCK", 16)


def drawn_by_loop(logits, uniform, temperature):
    """The first token up to which weights sum to the number, and its log-probability."""
    weights = [math.exp(x / temperature) for x in logits.tolist()]
    reached, total = 0.0, sum(weights)
    for token, weight in enumerate(weights):
        reached += weight
        if reached >= uniform * total:
            return token, math.log(weight / total)
    raise AssertionError("uniform is at most 1")


def draw(logits, uniforms, temperature=1.0, *, dtype=torch.float32):
    """Tokens and log-probabilities of rows, whose sequences stand in another order."""
    count, rows = 3, torch.randperm(len(logits), generator=torch.Generator().manual_seed(3))
    table = torch.full((len(logits) + 1, count), 0.5, dtype=torch.float64)
    table[rows, 1] = uniforms
    tokens = torch.full(table.shape, 77)
    logprobs = torch.full(table.shape, 7.0)
    number = torch.ones(1, dtype=torch.int64).expand(len(logits))
    arguments = (logits.to(dtype), temperature, table, rows, number, tokens, logprobs)
    chosen = sampling.draw_tokens(*arguments)
    written, tokens[rows, 1] = tokens[rows, 1].clone(), 77
    assert (tokens == 77).all(), "nothing else is written"
    return chosen, written, logprobs[rows, 1]


@pytest.mark.parametrize("temperature", [1.0, 0.3])
@pytest.mark.parametrize("vocabulary", [1, 15, 16, 53])
def test_tokens_and_logprobs_are_those_of_a_plain_loop(vocabulary, temperature):
    generator = torch.Generator().manual_seed(vocabulary)
    logits = 3 * torch.randn(20, vocabulary, generator=generator)
    uniforms = 1 - torch.rand(20, generator=generator, dtype=torch.float64)
    chosen, written, logprobs = draw(logits, uniforms, temperature)
    pairs = zip(logits, uniforms.tolist(), strict=True)
    expected = [drawn_by_loop(row, uniform, temperature) for row, uniform in pairs]
    assert chosen.tolist() == written.tolist() == [token for token, _ in expected]
    assert logprobs.tolist() == pytest.approx([value for _, value in expected], abs=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_boundary_belongs_to_the_token_that_reaches_it(dtype):
    # Four tokens of equal weight, one in each block but two; between them none has any.
    logits = torch.full((1, 64), -INF)
    logits[0, [3, 20, 21, 60]] = 2.0
    uniforms = torch.tensor([0.25, 0.2500001, 0.5, 0.5000001, 0.75, 0.7500001, 1.0, 1e-12])
    chosen, *_ = draw(logits.expand(8, -1), uniforms.double(), dtype=dtype)
    assert chosen.tolist() == [3, 20, 20, 21, 21, 60, 60, 3]


def test_a_token_without_weight_is_never_drawn():
    logits = torch.zeros(50, 40)
    logits[:, ::3], logits[:, 30:] = -INF, -1e4
    chosen, *_ = draw(logits, torch.linspace(0.001, 1, 50, dtype=torch.float64))
    assert {*chosen.tolist()} == {token for token in range(30) if token % 3}


def test_where_no_token_can_be_drawn_none_is():
    logits = torch.zeros(4, 40)
    logits[0, 5], logits[1, 35], logits[2] = NAN, INF, -INF
    chosen, written, _ = draw(logits, torch.full((4,), 0.5, dtype=torch.float64))
    assert written.tolist() == [-1, -1, -1, 19]
    assert chosen.tolist() == [0, 0, 0, 19]


def test_log_probabilities_need_not_be_kept():
    table, number = torch.full((2, 1), 0.9, dtype=torch.float64), torch.zeros(1, dtype=torch.int64)
    tokens = torch.zeros(2, 1, dtype=torch.int64)
    logits = torch.zeros(1, 40)
    sampling.draw_tokens(logits, 1.0, table, number + 1, number, tokens, None)
    assert tokens.tolist() == [[0], [35]]


@pytest.mark.parametrize("kernels", [True, False])
def test_thousands_of_draws_are_those_of_sums_over_the_whole_vocabulary(kernels, monkeypatch):
    monkeypatch.setattr(support, "ON_CPU", kernels)
    monkeypatch.setattr(sampling, "BLOCK", 128)
    generator = torch.Generator().manual_seed(0)
    count = 2000 if ALL and not kernels else 40
    logits = 2 * torch.randn(count, 1000, generator=generator)
    uniforms = 1 - torch.rand(count, generator=generator, dtype=torch.float64)
    chosen, written, _ = draw(logits, uniforms, 0.8)
    expected = sample_tokens(logits, uniforms, Sampling(1, temperature=0.8))
    assert chosen.tolist() == written.tolist() == expected.tolist()
