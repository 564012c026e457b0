"""Cross-entropy, log-probabilities and entropies in chunks against torch's of all logits."""

import math
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dschat_lora.algos.logprobs import (
    GroupSums,
    linear_cross_entropy,
    linear_logprobs,
    linear_logprobs_entropy,
    sequence_sums,
    token_entropy,
    token_logprobs,
)
from helpers.watching import LargestTensor

ROWS, WIDTH, VOCAB = 11, 6, 9
# What a loss might make of each value: of either sign, and none alike.
WEIGHTS = torch.linspace(-2.0, 3.0, ROWS, dtype=torch.float64)


def logprobs_of_both(*args, **options):
    return linear_logprobs_entropy(*args, **options)[0]


# name: (function, weights of its values, these of torch's losses of tokens, slopes' tolerance)
FUNCTIONS = {
    "cross-entropy": (linear_cross_entropy, 3.0, torch.sum, 1e-5),
    "logprobs": (linear_logprobs, WEIGHTS, torch.neg, 1e-6),
    "logprobs beside entropies": (logprobs_of_both, WEIGHTS, torch.neg, 1e-6),
}
each_function = pytest.mark.parametrize("name", FUNCTIONS)
chunks = pytest.mark.parametrize("chunk", [1, 3, 7, ROWS, 100], ids="{} rows a chunk".format)


def inputs(dtype=torch.float32, *, bias=True, rows=ROWS, frozen=()):
    generator = torch.Generator().manual_seed(0)
    shapes = [(rows, WIDTH), (VOCAB, WIDTH), (VOCAB,)]
    leaves = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    for number, leaf in enumerate(leaves):
        leaf.requires_grad_(number not in frozen)
    tokens = torch.randint(0, VOCAB, (rows,), generator=generator)
    return leaves[0], leaves[1], leaves[2] if bias else None, tokens


def gradients_of(values, weights, leaves):
    """Of the weighted sum of values; None for a leaf that has none."""
    for leaf in leaves[:3]:
        if leaf is not None:
            leaf.grad = None
    (weights * values).sum().backward()
    return [None if leaf is None else leaf.grad for leaf in leaves[:3]]


def expected_of(name, leaves):
    """Values and gradients by torch, in fp64 from the same numbers."""
    _, weights, of_losses, _ = FUNCTIONS[name]
    whole = [None if t is None else t.detach().double().requires_grad_() for t in leaves[:3]]
    values = of_losses(F.cross_entropy(F.linear(*whole), leaves[3], reduction="none"))
    return values.detach(), gradients_of(values, weights, whole)


def assert_gradients(name, leaves, own, wanted, frozen, check):
    """Those of leaves that train; a head of log-probabilities has none whatever it says."""
    for number, (gradient, expected) in enumerate(zip(own, wanted, strict=True)):
        if leaves[number] is None:
            continue
        if number in frozen or (number and name != "cross-entropy"):
            assert gradient is None
        else:
            assert gradient.dtype == leaves[number].dtype
            check(gradient.double(), expected)


@each_function
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@chunks
def test_values_and_gradients_are_torchs_in_chunks_of_any_size(name, chunk, bias):
    function, weights, _, tolerance = FUNCTIONS[name]
    leaves = inputs(bias=bias)
    values = function(*leaves, max_chunk_logits=chunk * VOCAB)
    expected, gradients = expected_of(name, leaves)
    assert values.dtype == torch.float32
    torch.testing.assert_close(values.double(), expected, rtol=1e-6, atol=1e-6)
    assert_gradients(
        *(name, leaves, gradients_of(values, weights, leaves), gradients, ()),
        lambda own, wanted: torch.testing.assert_close(own, wanted, rtol=1e-5, atol=tolerance),
    )


# A 16-bit logit is off by up to 2^-9 (bf16) or 2^-12 (fp16) of its size, here up to 8.
@each_function
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 0.05), (torch.float16, 0.01)])
def test_16_bit_inputs_are_reduced_in_fp32(name, dtype, tolerance):
    function, weights, _, _ = FUNCTIONS[name]
    leaves = inputs(dtype)
    values = function(*leaves, max_chunk_logits=2 * VOCAB)
    expected, gradients = expected_of(name, leaves)
    assert values.dtype == torch.float32
    bounds = {"rtol": 0, "atol": tolerance * (expected.item() if expected.dim() == 0 else 1)}
    torch.testing.assert_close(values.double(), expected, **bounds)

    def check(own, wanted):
        scale = wanted.abs().max()
        torch.testing.assert_close(own / scale, wanted / scale, rtol=0, atol=tolerance)

    own = gradients_of(values, weights, leaves)
    assert_gradients(name, leaves, own, gradients, (), check)


@each_function
@pytest.mark.parametrize("frozen", [{1}, {1, 2}, {0}, {0, 1, 2}], ids=str)
def test_frozen_inputs_get_no_gradient(name, frozen):
    function, weights, _, tolerance = FUNCTIONS[name]
    leaves = inputs(frozen=frozen)
    values = function(*leaves, max_chunk_logits=4 * VOCAB)
    trains = {0, 1, 2} - frozen if name == "cross-entropy" else {0} - frozen
    assert values.requires_grad == bool(trains)
    if trains:
        assert_gradients(
            *(name, leaves, gradients_of(values, weights, leaves), expected_of(name, leaves)[1]),
            *(frozen, lambda a, b: torch.testing.assert_close(a, b, rtol=1e-5, atol=tolerance)),
        )


@each_function
def test_no_position_gives_no_value_and_no_slope(name):
    function, *_ = FUNCTIONS[name]
    leaves = inputs(rows=0)
    values = function(*leaves)
    values.sum().backward()
    assert values.sum() == 0
    assert leaves[0].grad.shape == (0, WIDTH)
    assert all(leaf.grad is None or not leaf.grad.any() for leaf in leaves[1:3])


@each_function
def test_extreme_logits_stay_finite(name):
    function, _, of_losses, _ = FUNCTIONS[name]
    weight, hidden = torch.tensor([[1.0], [-1.0]]), torch.tensor([[1e4]], requires_grad=True)
    value = function(hidden, weight, None, torch.tensor([1])).sum()
    value.backward()
    sign = of_losses(torch.ones(1)).sum()
    assert (value.item(), hidden.grad.item()) == (sign * 2e4, sign * 2.0)


@each_function
@pytest.mark.parametrize(("bound", "largest"), [(5000, 5000), (1, 50)], ids=["chunk", "row"])
@pytest.mark.parametrize("trains", [True, False], ids=["with gradient", "without"])
def test_no_tensor_is_larger_than_the_bound_on_the_logits_or_a_position(
    name, bound, largest, trains
):
    rows, vocab = (600 if bound > 1 else 5), 50
    hidden, weight = torch.randn(rows, 1, requires_grad=trains), torch.randn(vocab, 1)
    tokens = torch.randint(0, vocab, (rows,))
    with LargestTensor() as seen:
        values = FUNCTIONS[name][0](hidden, weight, None, tokens, max_chunk_logits=bound)
        if trains:
            values.sum().backward()
    assert seen.largest == largest


# ---------------------------------------------------------------------------- cross-entropy


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.5, 1.0])
@pytest.mark.parametrize("chunk", [2, ROWS], ids="{} rows a chunk".format)
def test_smoothed_labels_are_torchs_to_the_last_digits(chunk, smoothing):
    *leaves, targets = inputs()
    leaves = [leaf.detach().double().requires_grad_() for leaf in leaves]
    logits = F.linear(*leaves)
    expected = F.cross_entropy(logits, targets, reduction="sum", label_smoothing=smoothing)
    options = {"label_smoothing": smoothing, "max_chunk_logits": chunk * VOCAB}
    loss = linear_cross_entropy(*leaves, targets, **options)
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
    slopes = (torch.autograd.grad(3 * each, leaves) for each in (loss, expected))
    for mine, theirs in zip(*slopes, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("chunk", [2, ROWS], ids="{} rows a chunk".format)
def test_groups_of_targets_have_the_sums_of_their_own_losses_without_smoothing(chunk):
    *leaves, targets = inputs()
    groups = GroupSums(torch.arange(ROWS) % 3, torch.ones(4, dtype=torch.float64))
    options = {"label_smoothing": 0.3, "max_chunk_logits": chunk * VOCAB, "groups": groups}
    linear_cross_entropy(*leaves, targets, **options)
    losses = F.cross_entropy(F.linear(*leaves), targets, reduction="none").double()
    expected = [1 + losses[group::3].sum() for group in range(3)] + [losses.new_ones(())]
    torch.testing.assert_close(groups.sums, torch.stack(expected), rtol=1e-6, atol=0)


def test_weight_gradient_of_16_bit_inputs_is_summed_over_chunks_in_fp32():
    # 256 + 1/2 is 256 in bf16: a sum kept in it would never grow.
    rows = 4096
    hidden = torch.ones(rows, 1, dtype=torch.bfloat16)
    weight = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    targets = torch.zeros(rows, dtype=torch.int64)
    linear_cross_entropy(hidden, weight, None, targets, max_chunk_logits=2).backward()
    assert weight.grad.flatten().tolist() == [-rows / 2, rows / 2]


# ---------------------------------------------------------------------------- log-probabilities


def test_a_likely_token_keeps_its_small_surprise_under_16_bit_inputs():
    # log(1 + e^-8) is 3.4e-4: a bf16 difference of logit and normaliser would be 0.
    hidden = torch.tensor([[1.0]], dtype=torch.bfloat16)
    weight = torch.tensor([[8.0], [0.0]], dtype=torch.bfloat16)
    value = linear_logprobs(hidden, weight, None, torch.tensor([0]))
    assert value.item() == pytest.approx(-3.3540637e-4, rel=1e-3)


def test_the_heads_own_logits_give_the_same_values_by_hand():
    # odds of 8 : 1 : 1 and 1 : 3 : 4
    logits = torch.tensor([[8.0, 1.0, 1.0], [1.0, 3.0, 4.0]]).log().to(torch.float64)
    values = token_logprobs(logits, torch.tensor([0, 1]))
    torch.testing.assert_close(values, torch.tensor([0.8, 0.375]).log())


def test_values_are_summed_over_the_tokens_of_each_sequence():
    values = torch.tensor([1.0, 2.0, 4.0, 8.0], requires_grad=True)
    sums = sequence_sums(values, torch.tensor([2, 0, 2, 0]), 4)
    assert sums.tolist() == [10.0, 0.0, 5.0, 0.0]
    (sums * torch.tensor([1.0, 7.0, 3.0, 7.0])).sum().backward()
    assert values.grad.tolist() == [3.0, 1.0, 3.0, 1.0]
    assert sequence_sums(values[:0], torch.zeros(0, dtype=torch.int64), 0).shape == (0,)


# ---------------------------------------------------------------------------- entropies


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@chunks
@pytest.mark.parametrize("frozen", [(), (0,)], ids=["with gradient", "without"])
@pytest.mark.parametrize(
    # a bf16 logit is off by up to 2^-9 of its size, here up to 8
    ("dtype", "bounds"), [(torch.float32, {}), (torch.bfloat16, {"rtol": 0, "atol": 0.05})]
)  # fmt: skip
def test_entropy_is_torchs_in_chunks_of_any_size(chunk, bias, frozen, dtype, bounds):
    leaves = inputs(dtype, bias=bias, frozen=frozen)
    _, entropy = linear_logprobs_entropy(*leaves, max_chunk_logits=chunk * VOCAB)
    whole = F.linear(*(None if leaf is None else leaf.detach().double() for leaf in leaves[:3]))
    expected = torch.distributions.Categorical(logits=whole).entropy().float()
    torch.testing.assert_close(entropy, expected, **bounds)
    assert not entropy.requires_grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("chunk", [2, 100])
def test_logprobs_and_their_gradient_are_the_same_bits_as_without_the_entropy(dtype, chunk):
    results = []
    for function in (linear_logprobs, logprobs_of_both):
        leaves = inputs(dtype)
        values = function(*leaves, max_chunk_logits=chunk * VOCAB)
        results.append((values.detach(), gradients_of(values, WEIGHTS, leaves)[0]))
    assert all(map(torch.equal, *results))


def test_entropy_by_hand_from_none_to_that_of_a_fair_die():
    # odds of 1 : 1, 1 : 3 and, past fp32's exponent, of one token alone
    hidden, weight = torch.tensor([[0.0], [1.0], [-300.0]]), torch.tensor([[0.0], [math.log(3)]])
    _, entropy = linear_logprobs_entropy(hidden, weight, None, torch.tensor([0, 1, 0]))
    quarter = math.log(4) - 0.75 * math.log(3)
    assert entropy.tolist() == pytest.approx([math.log(2), quarter, 0.0], abs=1e-6)
    assert token_entropy(torch.full((1, 6), 7.0)).tolist() == pytest.approx([math.log(6)])


class Watched(TorchDispatchMode):
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
    hidden, weight, _, tokens = inputs(frozen=() if trains else (0,))
    with Watched(4 * VOCAB) as seen:
        function(hidden, weight, None, tokens, max_chunk_logits=4 * VOCAB)
    return seen


def test_only_what_is_asked_for_is_worked_out_and_the_entropy_takes_no_more_memory():
    assert not watched(linear_logprobs, False).names & {"exp_", "clamp"}
    assert "clamp" not in watched(linear_logprobs, True).names
    assert "scatter_add_" not in watched(linear_logprobs_entropy, False).names
    assert watched(linear_logprobs_entropy, True).names > {"clamp", "scatter_add_"}
    for trains in (True, False):
        assert watched(linear_logprobs_entropy, trains).most == watched(linear_logprobs, True).most


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_entropy_of_logits_and_its_gradient_are_torchs(dtype):
    generator = torch.Generator().manual_seed(5)
    logits = (3 * torch.randn(4, 7, generator=generator)).to(dtype).requires_grad_()
    plain = logits.detach().double().requires_grad_()
    expected, entropy = (
        torch.distributions.Categorical(logits=plain).entropy(),
        token_entropy(logits),
    )
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
    one = torch.ones(1, 1), barred.detach().T, None, torch.tensor([0])
    torch.testing.assert_close(linear_logprobs_entropy(*one)[1], entropy.detach())
