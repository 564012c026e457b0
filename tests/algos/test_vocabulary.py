"""The softmax over logits that processes hold parts of, against torch's over all of them."""

from dataclasses import replace

import pytest
import torch

from dschat_lora.algos.logprobs import (
    VocabularyPart,
    add_at_,
    linear_cross_entropy,
    linear_logprobs,
    linear_logprobs_entropy,
    log_softmax,
)
from helpers.tensor_parallel_layers import in_threads

ROWS, WIDTH = 11, 6
# Of the vocabulary: two processes, evenly and not; four, the last of which has less.
PARTS = {"4 4": (8, 4), "5 4": (9, 5), "16 16 16 13": (61, 16)}


def part_of(group, vocabulary, each):
    start, stop = group.rank * each, min((group.rank + 1) * each, vocabulary)
    return VocabularyPart(start, stop, each, group.sum, group.max)


def processes(vocabulary, each):
    return -(-vocabulary // each)


def inputs(vocabulary, offset):
    """Numbers whose logits are exact in fp32, so that all that differs is the softmax.

    Args:
        vocabulary: tokens.
        offset: "none", "all" logits near 1e4, "one" process's near it and the rest near 0,
            or "low", all near -1e4.
    """
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (
        torch.randint(-2, 3, shape, generator=generator) / 4.0
        for shape in ((ROWS, WIDTH), (vocabulary, WIDTH))
    )
    bias = torch.randint(-2, 3, (vocabulary,), generator=generator) / 2.0
    bias[: {"none": 0, "one": vocabulary // 2}.get(offset, vocabulary)] += (
        -1e4 if offset == "low" else 1e4
    )
    return hidden, weight, bias, torch.randint(0, vocabulary, (ROWS,), generator=generator)


def weights():
    """What a loss might make of each value: of either sign, and none alike."""
    return torch.linspace(-2.0, 3.0, ROWS)


def reference(hidden, weight, bias, tokens, factors):
    """Log-probabilities, entropies and the gradient of the weighted sum, in fp64."""
    leaf = hidden.double().requires_grad_()
    table = torch.log_softmax(leaf @ weight.double().T + bias.double(), -1)
    values = table[range(ROWS), tokens]
    (factors * values).sum().backward()
    return values.detach(), torch.special.entr(table.exp()).sum(-1).detach(), leaf.grad


def own_of(part, weight, bias):
    held = slice(part.start, part.stop)
    return weight[held], None if bias is None else bias[held]


def in_parts(function, vocabulary, each, values):
    """``(values, sum of the gradients of hidden)`` of a function over parts, on each process."""
    hidden, weight, bias, tokens = values

    def on(group):
        part = part_of(group, vocabulary, each)
        leaf = hidden.clone().requires_grad_()
        values_of_part = function(leaf, *own_of(part, weight, bias), tokens, part)
        values_of_part[0].backward(torch.ones(()) * 3 if values_of_part[0].ndim == 0 else weights())
        return values_of_part, group.sum(leaf.grad)

    return in_threads(processes(vocabulary, each), on)


@pytest.mark.parametrize("offset", ["none", "all", "one", "low"])
@pytest.mark.parametrize("rows", [1, 4, 100], ids="{} rows a chunk".format)
@pytest.mark.parametrize("parts", PARTS.values(), ids=PARTS)
def test_summed_loss_and_gradient_are_those_of_all_logits(parts, rows, offset):
    values = inputs(parts[0], offset)
    logprobs, _, gradient = reference(*values, torch.full((ROWS,), -3.0))

    def loss(*args):
        *rest, part = args
        return [linear_cross_entropy(*rest, max_chunk_logits=rows * part.most, part=part)]

    for (values_of_part,), grad in in_parts(loss, *parts, values):
        assert values_of_part.dtype == torch.float32
        torch.testing.assert_close(values_of_part.double(), -logprobs.sum(), rtol=1e-6, atol=0)
        torch.testing.assert_close(grad.double(), gradient, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("parts", PARTS.values(), ids=PARTS)
def test_smoothed_labels_spread_over_all_logits(parts):
    hidden, weight, bias, tokens = values = inputs(parts[0], "none")
    leaf = hidden.double().requires_grad_()
    logits = torch.nn.functional.linear(leaf, weight.double(), bias.double())
    expected = torch.nn.functional.cross_entropy(
        logits, tokens, reduction="sum", label_smoothing=0.1
    )
    (3 * expected).backward()

    def loss(*args):
        *rest, part = args
        return [linear_cross_entropy(*rest, label_smoothing=0.1, part=part)]

    for (values_of_part,), grad in in_parts(loss, *parts, values):
        torch.testing.assert_close(values_of_part.double(), expected, rtol=1e-6, atol=0)
        torch.testing.assert_close(grad.double(), leaf.grad, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("offset", ["none", "all", "one", "low"])
@pytest.mark.parametrize("rows", [1, 4, 100], ids="{} rows a chunk".format)
@pytest.mark.parametrize("parts", PARTS.values(), ids=PARTS)
def test_log_probabilities_entropies_and_gradient_are_those_of_all_logits(parts, rows, offset):
    values = inputs(parts[0], offset)
    logprobs, entropy, gradient = reference(*values, weights())

    def both(*args):
        *rest, part = args
        return linear_logprobs_entropy(*rest, max_chunk_logits=rows * part.most, part=part)

    def alone(*args):
        *rest, part = args
        return [linear_logprobs(*rest, max_chunk_logits=rows * part.most, part=part)]

    for function in (both, alone):
        for values_of_part, grad in in_parts(function, *parts, values):
            torch.testing.assert_close(values_of_part[0].double(), logprobs, rtol=1e-6, atol=1e-6)
            torch.testing.assert_close(grad.double(), gradient, rtol=1e-5, atol=1e-6)
            if function is both:
                torch.testing.assert_close(
                    values_of_part[1].double(), entropy, rtol=1e-5, atol=1e-6
                )


def test_a_head_without_bias_that_trains_gets_the_gradient_of_its_own_rows():
    vocabulary, each = PARTS["5 4"]
    hidden, weight, _, tokens = inputs(vocabulary, "none")
    whole = weight.double().requires_grad_()
    table = torch.log_softmax(hidden.double() @ whole.T, -1)
    (-table[torch.arange(ROWS), tokens].sum()).backward()

    def on(group):
        part = part_of(group, vocabulary, each)
        own = weight[part.start : part.stop].clone().requires_grad_()
        linear_cross_entropy(hidden, own, None, tokens, max_chunk_logits=20, part=part).backward()
        return own.grad

    gradient = torch.cat(in_threads(2, on))
    torch.testing.assert_close(gradient.double(), whole.grad, rtol=1e-5, atol=1e-6)


def test_every_process_cuts_its_positions_alike_though_it_holds_fewer_tokens():
    # By its own 4 tokens the second process would take 5 positions at a time, the first 4.
    hidden, weight, bias, tokens = inputs(PARTS["5 4"][0], "none")

    def on(group):
        shapes = []

        def largest(x):
            shapes.append(tuple(x.shape))
            return group.max(x)

        part = replace(part_of(group, *PARTS["5 4"]), max=largest)
        own = own_of(part, weight, bias)
        linear_cross_entropy(hidden, *own, tokens, max_chunk_logits=20, part=part)
        return shapes

    assert in_threads(2, on) == [[(4,), (4,), (3,)]] * 2


def test_a_tokens_column_is_where_it_is_held():
    part = VocabularyPart(3, 6, 3, lambda x: x, lambda x: x)
    columns, inside = part.own(torch.tensor([0, 2, 3, 5, 6]))
    assert inside.tolist() == [False, False, True, True, False]
    assert columns.tolist() == [0, 0, 0, 2, 0]
    table = add_at_(torch.zeros(5, 3), torch.tensor([0, 2, 3, 5, 6]), 2.0, part)
    assert table.tolist() == [[0, 0, 0], [0, 0, 0], [2, 0, 0], [0, 0, 2], [0, 0, 0]]


def test_a_table_of_all_tokens_needs_no_exchange():
    logits = torch.tensor([[0.0, 1.0, 2.0]])
    table, picked = log_softmax(logits, torch.tensor([1]), None)
    torch.testing.assert_close(table, torch.tensor([[-2.4076059, -1.4076059, -0.4076059]]))
    torch.testing.assert_close(picked, torch.tensor([-1.4076059]))
