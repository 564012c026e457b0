"""The supervised loss against torch's own, and the targets by hand."""

import pytest
import torch
import torch.nn.functional as F

from dschat_lora.algos.logprobs import GroupSums, linear_cross_entropy
from helpers.watching import LargestTensor

ROWS, WIDTH, VOCAB = 11, 6, 9


def inputs(dtype=torch.float32, bias=True, rows=ROWS):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(rows, WIDTH, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(VOCAB, WIDTH, generator=generator).to(dtype).requires_grad_()
    shift = torch.randn(VOCAB, generator=generator).to(dtype).requires_grad_() if bias else None
    return hidden, weight, shift, torch.randint(0, VOCAB, (rows,), generator=generator)


def reference(hidden, weight, bias, targets, dtype=torch.float64):
    """Loss and gradients by torch, in fp64 from the same values."""
    leaves = [
        None if t is None else t.detach().to(dtype).requires_grad_() for t in (hidden, weight, bias)
    ]
    loss = F.cross_entropy(F.linear(*leaves), targets, reduction="sum")
    (3 * loss).backward()
    return loss.detach(), [None if leaf is None else leaf.grad for leaf in leaves]


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("chunk", [1, 3, 7, ROWS, 100], ids="{} rows a chunk".format)
def test_loss_and_gradients_are_torchs_in_chunks_of_any_size(chunk, bias):
    leaves = inputs(bias=bias)
    expected, gradients = reference(*leaves)
    loss = linear_cross_entropy(*leaves, max_chunk_logits=chunk * VOCAB)
    (3 * loss).backward()
    assert loss.dtype == torch.float32
    assert loss.shape == ()
    torch.testing.assert_close(loss, expected.float())
    for leaf, gradient in zip(leaves[:3], gradients, strict=True):
        if leaf is not None:
            torch.testing.assert_close(leaf.grad.double(), gradient, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.5, 1.0])
@pytest.mark.parametrize("chunk", [2, ROWS], ids="{} rows a chunk".format)
def test_smoothed_labels_are_torchs_to_the_last_digits(chunk, smoothing):
    values = [tensor.detach().double().requires_grad_() for tensor in inputs()[:3]]
    targets = inputs()[3]
    expected = F.cross_entropy(
        F.linear(*values), targets, reduction="sum", label_smoothing=smoothing
    )
    gradients = torch.autograd.grad(3 * expected, values)
    loss = linear_cross_entropy(
        *values, targets, label_smoothing=smoothing, max_chunk_logits=chunk * VOCAB
    )
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
    for mine, reference in zip(torch.autograd.grad(3 * loss, values), gradients, strict=True):
        torch.testing.assert_close(mine, reference, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("chunk", [2, ROWS], ids="{} rows a chunk".format)
def test_groups_of_targets_have_the_sums_of_their_own_losses_without_smoothing(chunk):
    *leaves, targets = inputs()
    groups = GroupSums(torch.arange(ROWS) % 3, torch.ones(4, dtype=torch.float64))
    linear_cross_entropy(
        *leaves, targets, label_smoothing=0.3, max_chunk_logits=chunk * VOCAB, groups=groups
    )
    losses = F.cross_entropy(F.linear(*leaves), targets, reduction="none").double()
    expected = [1 + losses[group::3].sum() for group in range(3)] + [losses.new_ones(())]
    torch.testing.assert_close(groups.sums, torch.stack(expected), rtol=1e-6, atol=0)


def test_smoothed_labels_by_hand():
    # logits 0 and log 3: probabilities 1/4 and 3/4; of the target's share 0.2 / 2 goes to each
    hidden, weight = torch.ones(1, 1), torch.tensor([[0.0], [1.0986122886681098]])
    loss = linear_cross_entropy(hidden, weight, None, torch.tensor([1]), label_smoothing=0.2)
    assert loss.item() == pytest.approx(0.9 * 0.2876820724517809 + 0.1 * 1.3862943611198906)


def test_a_vocabulary_beyond_the_bound_is_done_a_row_at_a_time():
    leaves = inputs()
    loss = linear_cross_entropy(*leaves, max_chunk_logits=1)
    torch.testing.assert_close(loss, reference(*leaves)[0].float())


# A 16-bit logit is off by up to 2^-9 (bf16) or 2^-12 (fp16) of its size, here up to 8.
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 0.05), (torch.float16, 0.01)])
def test_16_bit_inputs_are_reduced_in_fp32(dtype, tolerance):
    leaves = inputs(dtype)
    expected, gradients = reference(*leaves)
    loss = linear_cross_entropy(*leaves, max_chunk_logits=2 * VOCAB)
    (3 * loss).backward()
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(expected.item(), rel=tolerance)
    for leaf, gradient in zip(leaves[:3], gradients, strict=True):
        assert leaf.grad.dtype == dtype
        scale = gradient.abs().max()
        torch.testing.assert_close(
            leaf.grad.double() / scale, gradient / scale, rtol=0, atol=tolerance
        )


def test_weight_gradient_of_16_bit_inputs_is_summed_over_chunks_in_fp32():
    # 256 + 1/2 is 256 in bf16: a sum kept in it would never grow.
    rows = 4096
    hidden = torch.ones(rows, 1, dtype=torch.bfloat16)
    weight = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    targets = torch.zeros(rows, dtype=torch.int64)
    linear_cross_entropy(hidden, weight, None, targets, max_chunk_logits=2).backward()
    assert weight.grad.flatten().tolist() == [-rows / 2, rows / 2]


@pytest.mark.parametrize("frozen", [{1}, {1, 2}, {0}, {0, 1, 2}], ids=str)
def test_frozen_inputs_get_no_gradient(frozen):
    leaves = inputs()
    for index in frozen:
        leaves[index].requires_grad_(False)
    _, gradients = reference(*leaves)
    loss = linear_cross_entropy(*leaves, max_chunk_logits=4 * VOCAB)
    assert loss.requires_grad == (len(frozen) < 3)
    if loss.requires_grad:
        (3 * loss).backward()
    for index, leaf in enumerate(leaves[:3]):
        if index in frozen:
            assert leaf.grad is None
        else:
            torch.testing.assert_close(leaf.grad.double(), gradients[index], rtol=1e-5, atol=1e-5)


def test_no_position_gives_no_loss_and_zero_gradients():
    leaves = inputs(rows=0)
    loss = linear_cross_entropy(*leaves)
    loss.backward()
    assert loss.item() == 0.0
    assert [leaf.grad.abs().sum().item() for leaf in leaves[:3]] == [0.0, 0.0, 0.0]


def test_extreme_logits_stay_finite():
    weight = torch.tensor([[1.0], [-1.0]], requires_grad=True)
    hidden = torch.tensor([[1e4]], requires_grad=True)
    loss = linear_cross_entropy(hidden, weight, None, torch.tensor([1]))
    loss.backward()
    assert loss.item() == 2e4
    assert hidden.grad.item() == 2.0


def test_no_tensor_is_larger_than_the_bound_on_the_logits():
    rows, width, vocab, bound = 600, 4, 50, 5000
    hidden = torch.randn(rows, width, requires_grad=True)
    weight = torch.randn(vocab, width, requires_grad=True)
    targets = torch.randint(0, vocab, (rows,))
    with LargestTensor() as seen:
        linear_cross_entropy(hidden, weight, None, targets, max_chunk_logits=bound).backward()
    assert seen.largest == bound
    with LargestTensor() as all_at_once:
        F.cross_entropy(hidden @ weight.T, targets).backward()
    assert all_at_once.largest == rows * vocab
