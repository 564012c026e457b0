"""Log-probabilities in chunks against torch's softmax of all logits."""

import pytest
import torch

from dschat_lora.algos.logprobs import linear_logprobs, sequence_sums, token_logprobs
from helpers.watching import LargestTensor

ROWS, WIDTH, VOCAB = 11, 6, 9


def inputs(dtype=torch.float32, bias=True, rows=ROWS):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(rows, WIDTH, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(VOCAB, WIDTH, generator=generator).to(dtype)
    shift = torch.randn(VOCAB, generator=generator).to(dtype) if bias else None
    return hidden, weight, shift, torch.randint(0, VOCAB, (rows,), generator=generator)


def weights(rows=ROWS):
    """What a loss might make of each value: of either sign, and none alike."""
    return torch.linspace(-2.0, 3.0, rows, dtype=torch.float64)


def reference(hidden, weight, bias, tokens):
    """Values, and gradient of their weighted sum, in fp64 from the same numbers."""
    leaf = hidden.detach().double().requires_grad_()
    logits = leaf @ weight.double().T + (0 if bias is None else bias.double())
    table = torch.log_softmax(logits, -1)
    values = torch.stack([table[i, token] for i, token in enumerate(tokens.tolist())])
    (weights(len(tokens)) * values).sum().backward()
    return values.detach(), leaf.grad


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("chunk", [1, 3, 7, ROWS, 100], ids="{} rows a chunk".format)
def test_values_and_gradient_are_torchs_in_chunks_of_any_size(chunk, bias):
    hidden, *rest = inputs(bias=bias)
    values = linear_logprobs(hidden, *rest, max_chunk_logits=chunk * VOCAB)
    expected, gradient = reference(hidden, *rest)
    assert values.dtype == torch.float32
    torch.testing.assert_close(values.double(), expected, rtol=1e-6, atol=1e-6)
    (weights() * values).sum().backward()
    torch.testing.assert_close(hidden.grad.double(), gradient, rtol=1e-5, atol=1e-6)


# A 16-bit logit is off by up to 2^-9 (bf16) or 2^-12 (fp16) of its size, here up to 8.
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 0.05), (torch.float16, 0.01)])
def test_16_bit_inputs_are_reduced_in_fp32(dtype, tolerance):
    hidden, *rest = inputs(dtype)
    values = linear_logprobs(hidden, *rest, max_chunk_logits=2 * VOCAB)
    expected, gradient = reference(hidden, *rest)
    assert values.dtype == torch.float32
    torch.testing.assert_close(values.double(), expected, rtol=0, atol=tolerance)
    (weights() * values).sum().backward()
    assert hidden.grad.dtype == dtype
    scale = gradient.abs().max()
    torch.testing.assert_close(
        hidden.grad.double() / scale, gradient / scale, rtol=0, atol=tolerance
    )


def test_a_likely_token_keeps_its_small_surprise_under_16_bit_inputs():
    # log(1 + e^-8) is 3.4e-4: a bf16 difference of logit and normaliser would be 0.
    hidden = torch.tensor([[1.0]], dtype=torch.bfloat16)
    weight = torch.tensor([[8.0], [0.0]], dtype=torch.bfloat16)
    value = linear_logprobs(hidden, weight, None, torch.tensor([0]))
    assert value.item() == pytest.approx(-3.3540637e-4, rel=1e-3)


def test_a_frozen_head_gets_no_gradient_and_frozen_states_cost_none():
    hidden, weight, bias, tokens = inputs()
    weight.requires_grad_()
    bias.requires_grad_()
    linear_logprobs(hidden, weight, bias, tokens).sum().backward()
    assert weight.grad is None
    assert bias.grad is None
    assert not linear_logprobs(hidden.detach(), weight, bias, tokens).requires_grad


def test_no_position_gives_no_value_and_a_zero_gradient():
    leaves = inputs(rows=0)
    values = linear_logprobs(*leaves)
    values.sum().backward()
    assert values.shape == (0,)
    assert leaves[0].grad.shape == (0, WIDTH)


def test_extreme_logits_stay_finite():
    weight, hidden = torch.tensor([[1.0], [-1.0]]), torch.tensor([[1e4]], requires_grad=True)
    value = linear_logprobs(hidden, weight, None, torch.tensor([1]))
    value.backward()
    assert value.item() == -2e4
    assert hidden.grad.item() == -2.0


def test_no_tensor_is_larger_than_the_bound_on_the_logits():
    rows, width, vocab, bound = 600, 4, 50, 5000
    hidden = torch.randn(rows, width, requires_grad=True)
    tokens = torch.randint(0, vocab, (rows,))
    with LargestTensor() as seen:
        values = linear_logprobs(
            hidden, torch.randn(vocab, width), None, tokens, max_chunk_logits=bound
        )
        values.sum().backward()
    assert seen.largest == bound


def test_a_vocabulary_beyond_the_bound_is_done_a_row_at_a_time():
    hidden, vocab = torch.randn(3, 1), 50
    weight, tokens = torch.randn(vocab, 1), torch.tensor([4, 0, 49])
    with LargestTensor() as seen:
        values = linear_logprobs(hidden, weight, None, tokens, max_chunk_logits=1)
    assert seen.largest == vocab
    expected = torch.log_softmax(hidden @ weight.T, -1)[range(3), tokens]
    torch.testing.assert_close(values, expected)


def test_the_heads_own_logits_give_the_same_values_by_hand():
    # odds of 1 : 3 and of 8 : 1 : 1
    third = torch.tensor([[0.0, 3.0]]).log()
    assert token_logprobs(third, torch.tensor([1])).item() == pytest.approx(0.0)
    logits = torch.tensor([[8.0, 1.0, 1.0], [1.0, 3.0, 4.0]]).log().to(torch.float64)
    values = token_logprobs(logits, torch.tensor([0, 1]))
    expected = torch.tensor([0.8, 0.375]).log()
    torch.testing.assert_close(values, expected)
    assert values.dtype == torch.float32


def test_values_are_summed_over_the_tokens_of_each_sequence():
    values = torch.tensor([1.0, 2.0, 4.0, 8.0], requires_grad=True)
    sums = sequence_sums(values, torch.tensor([2, 0, 2, 0]), 4)
    assert sums.tolist() == [10.0, 0.0, 5.0, 0.0]
    (sums * torch.tensor([1.0, 7.0, 3.0, 7.0])).sum().backward()
    assert values.grad.tolist() == [3.0, 1.0, 3.0, 1.0]
    assert sequence_sums(values[:0], torch.zeros(0, dtype=torch.int64), 0).shape == (0,)
