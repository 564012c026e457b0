"""Entropies against torch's own, and log-probabilities that do not mind being asked for both."""

import math
import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dschat_lora.algos.entropy import adapted_entropy_coef, applied_entropy_coef
from dschat_lora.algos.logprobs import linear_logprobs, linear_logprobs_entropy, token_entropy
from helpers.watching import LargestTensor

ROWS, WIDTH, VOCAB = 11, 6, 9


def inputs(dtype=torch.float32, bias=True, rows=ROWS):
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(rows, WIDTH, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(VOCAB, WIDTH, generator=generator).to(dtype)
    shift = torch.randn(VOCAB, generator=generator).to(dtype) if bias else None
    return hidden, weight, shift, torch.randint(0, VOCAB, (rows,), generator=generator)


def torchs_entropy(hidden, weight, bias):
    logits = hidden.detach().double() @ weight.double().T
    logits = logits if bias is None else logits + bias.double()
    return torch.distributions.Categorical(logits=logits).entropy()


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("chunk", [1, 3, 7, ROWS, 100], ids="{} rows a chunk".format)
@pytest.mark.parametrize("trains", [True, False], ids=["with gradient", "without"])
def test_entropy_is_torchs_in_chunks_of_any_size(chunk, bias, trains):
    hidden, *rest = inputs(bias=bias)
    hidden.requires_grad_(trains)
    _, entropy = linear_logprobs_entropy(hidden, *rest, max_chunk_logits=chunk * VOCAB)
    assert entropy.dtype == torch.float32
    expected = torchs_entropy(hidden, *rest[:2]).float()
    torch.testing.assert_close(entropy, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("chunk", [2, 100])
def test_logprobs_and_their_gradient_are_the_same_bits_as_without_the_entropy(dtype, chunk):
    found = []
    for both in (False, True):
        hidden, *rest = inputs(dtype)
        function = linear_logprobs_entropy if both else linear_logprobs
        result = function(hidden, *rest, max_chunk_logits=chunk * VOCAB)
        logprobs = result[0] if both else result
        (torch.linspace(-2.0, 3.0, ROWS) * logprobs).sum().backward()
        found.append((logprobs.detach(), hidden.grad))
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])


def test_16_bit_inputs_are_reduced_in_fp32():
    hidden, *rest = inputs(torch.bfloat16)
    _, entropy = linear_logprobs_entropy(hidden, *rest)
    assert entropy.dtype == torch.float32
    # a bf16 logit is off by up to 2^-9 of its size, here up to 8
    expected = torchs_entropy(hidden, *rest[:2]).float()
    torch.testing.assert_close(entropy, expected, rtol=0, atol=0.05)


def test_only_logprobs_of_hidden_states_that_train_have_a_gradient():
    hidden, weight, bias, tokens = inputs()
    weight.requires_grad_()
    bias.requires_grad_()
    logprobs, entropy = linear_logprobs_entropy(hidden, weight, bias, tokens)
    assert logprobs.requires_grad
    assert not entropy.requires_grad
    logprobs.sum().backward()
    assert weight.grad is None
    assert bias.grad is None
    frozen, _ = linear_logprobs_entropy(hidden.detach(), weight, bias, tokens)
    assert not frozen.requires_grad


def test_entropy_by_hand_from_none_to_that_of_a_fair_die():
    # odds of 1 : 1, 1 : 3 and, past fp32's exponent, of one token alone
    hidden = torch.tensor([[0.0], [1.0], [-300.0]])
    weight = torch.tensor([[0.0], [math.log(3)]])
    _, entropy = linear_logprobs_entropy(hidden, weight, None, torch.tensor([0, 1, 0]))
    quarter = math.log(4) - 0.75 * math.log(3)
    assert entropy.tolist() == pytest.approx([math.log(2), quarter, 0.0], abs=1e-6)
    die = token_entropy(torch.full((1, 6), 7.0))
    assert die.tolist() == pytest.approx([math.log(6)])


def test_no_position_has_no_entropy():
    hidden, *rest = inputs(rows=0)
    logprobs, entropy = linear_logprobs_entropy(hidden, *rest)
    assert logprobs.shape == entropy.shape == (0,)
    logprobs.sum().backward()
    assert hidden.grad.shape == (0, WIDTH)


@pytest.mark.parametrize(("bound", "largest"), [(5000, 5000), (1, 50)], ids=["chunk", "row"])
@pytest.mark.parametrize("trains", [True, False], ids=["with gradient", "without"])
def test_no_tensor_is_larger_than_the_bound_on_the_logits_or_a_position(bound, largest, trains):
    rows, vocab = (600 if bound > 1 else 5), 50
    hidden = torch.randn(rows, 1, requires_grad=trains)
    weight, tokens = torch.randn(vocab, 1), torch.randint(0, vocab, (rows,))
    with LargestTensor() as seen:
        linear_logprobs_entropy(hidden, weight, None, tokens, max_chunk_logits=bound)
    assert seen.largest == largest


class Diagnostics(TorchDispatchMode):
    """Names of the operations, and the most tensors of one size alive at a time."""

    def __init__(self, size):
        super().__init__()
        self.size, self.alive, self.most, self.names = size, set(), 0, set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.names.add(func.overloadpacket.__name__)
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.numel() == self.size:
                memory = tensor.data_ptr()
                self.alive.add(memory)
                weakref.finalize(tensor.untyped_storage(), self.alive.discard, memory)
        self.most = max(self.most, len(self.alive))
        return result


def watched(function, trains):
    hidden, weight, _, tokens = inputs()
    hidden = hidden.detach().requires_grad_(trains)
    with Diagnostics(4 * VOCAB) as seen:
        function(hidden, weight, None, tokens, max_chunk_logits=4 * VOCAB)
    return seen


def test_only_what_is_asked_for_is_worked_out():
    assert not watched(linear_logprobs, False).names & {"exp_", "clamp"}
    assert "clamp" not in watched(linear_logprobs, True).names
    assert "scatter_add_" not in watched(linear_logprobs_entropy, False).names
    assert watched(linear_logprobs_entropy, True).names > {"clamp", "scatter_add_"}


@pytest.mark.parametrize("trains", [True, False], ids=["with gradient", "without"])
def test_the_entropy_takes_no_more_memory_than_the_gradient(trains):
    assert watched(linear_logprobs_entropy, trains).most == watched(linear_logprobs, True).most


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_entropy_of_logits_and_its_gradient_are_torchs(dtype):
    generator = torch.Generator().manual_seed(5)
    logits = (3 * torch.randn(4, 7, generator=generator)).to(dtype).requires_grad_()
    plain = logits.detach().double().requires_grad_()
    expected = torch.distributions.Categorical(logits=plain).entropy()
    entropy = token_entropy(logits)
    assert entropy.dtype == torch.float32
    torch.testing.assert_close(entropy, expected.float())
    weights = torch.tensor([1.0, -2.0, 0.5, 3.0])
    (weights * entropy).sum().backward()
    (weights * expected).sum().backward()
    torch.testing.assert_close(logits.grad, plain.grad.to(dtype))


def test_tokens_ruled_out_have_no_part_in_the_entropy_nor_a_gradient():
    allowed = torch.tensor([[0.3, -1.0, 2.0]], requires_grad=True)
    barred = torch.tensor([[0.3, -math.inf, -1.0, 2.0]], requires_grad=True)
    token_entropy(allowed).sum().backward()
    entropy = token_entropy(barred)
    entropy.sum().backward()
    torch.testing.assert_close(entropy, token_entropy(allowed))
    assert barred.grad[0, 1] == 0
    torch.testing.assert_close(barred.grad[:, [0, 2, 3]], allowed.grad)
    _, reported = linear_logprobs_entropy(
        torch.ones(1, 1), barred.detach().T, None, torch.tensor([0])
    )
    torch.testing.assert_close(reported, entropy.detach())


def test_the_coefficient_rises_below_the_target_and_falls_above_it_to_0():
    """By hand, with the paper's step of 0.005."""
    coef, applied = 0.0, []
    for entropy in (0.1, 0.1, 0.3, 0.2, math.nan, 0.25, 0.25, 0.25):
        coef = adapted_entropy_coef(coef, entropy=entropy, target=0.2)
        applied.append((coef, applied_entropy_coef(coef, entropy=entropy, target=0.2)))
    expected = [(0.005, 0.005), (0.01, 0.01), (0.005, 0.0), (0.005, 0.005), (0.005, 0.0)]
    expected += [(0.0, 0.0)] * 3
    for found, wanted in zip(applied, expected, strict=True):
        assert found == pytest.approx(wanted, abs=1e-12)
    assert coef == 0.0
