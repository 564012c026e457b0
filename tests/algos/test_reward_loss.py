"""Losses of reward models by hand, by slow loops and by DeepSpeed-Chat's own formula."""

import math

import pytest
import torch

from dschat_lora.algos.reward import bradley_terry_loss, per_token_loss
from dschat_lora.data.batch import PairCollator
from helpers.pairs import Answers, classic_per_token

LOG2 = math.log(2)


def tensor(*values):
    return torch.tensor(values, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize(
    ("chosen", "rejected", "expected"),
    [
        (1.0, 1.0, LOG2),
        (math.log(3), 0.0, math.log(4 / 3)),  # odds of 3 to 1 for the better answer
        (0.0, math.log(3), math.log(4)),
        (-2.0, -2.0 - math.log(9), math.log(10 / 9)),
        (1000.0, 0.0, 0.0),
        (0.0, 1000.0, 1000.0),
    ],
    ids=["even", "right 3:1", "wrong 3:1", "right 9:1", "sure and right", "sure and wrong"],
)
def test_the_loss_is_the_surprise_at_the_better_answer_winning(chosen, rejected, expected):
    loss = bradley_terry_loss(tensor(chosen), tensor(rejected))
    assert loss.tolist() == pytest.approx([expected], abs=1e-12)


def test_a_margin_is_what_the_better_answer_must_lead_by():
    even = bradley_terry_loss(tensor(2.5, -1.0), tensor(1.0, 0.0), tensor(1.5, -1.0))
    assert even.tolist() == pytest.approx([LOG2, LOG2])
    short = bradley_terry_loss(tensor(1.0), tensor(1.0), tensor(math.log(3)))
    assert short.tolist() == pytest.approx([math.log(4)])


def test_centring_adds_the_squared_sum_and_not_the_squared_difference():
    losses = bradley_terry_loss(tensor(1.0, 2.0), tensor(1.0, -2.0), center_coefficient=0.1)
    assert losses[0].item() == pytest.approx(LOG2 + 0.4)
    assert losses[1].item() == pytest.approx(math.log1p(math.exp(-4.0)))
    margin = bradley_terry_loss(tensor(3.0), tensor(1.0), tensor(2.0), center_coefficient=0.25)
    assert margin.item() == pytest.approx(LOG2 + 4.0)


def test_the_gradient_pulls_scores_apart_by_the_chance_of_being_wrong():
    chosen, rejected = tensor(0.0, math.log(3)), tensor(math.log(3), 0.0)
    bradley_terry_loss(chosen, rejected).sum().backward()
    assert chosen.grad.tolist() == pytest.approx([-0.75, -0.25])
    assert rejected.grad.tolist() == pytest.approx([0.75, 0.25])


def test_pairs_without_a_partner_are_refused():
    with pytest.raises(ValueError, match=r"sides of pairs have shapes \(2,\) and \(1,\)"):
        bradley_terry_loss(torch.zeros(2), torch.zeros(1))
    with pytest.raises(ValueError, match=r"shapes \(2,\) and \(3,\)"):
        bradley_terry_loss(torch.zeros(2), torch.zeros(2), torch.zeros(3))
    with pytest.raises(ValueError, match=r"shapes \(2,\) and \(3,\)"):
        per_token_loss(torch.zeros(2), torch.zeros(3), torch.zeros(2, dtype=torch.int64), 1)


def test_the_mean_is_over_the_tokens_of_each_pair_and_zero_without_any():
    right, wrong = math.log(4 / 3), math.log(4)
    chosen = tensor(math.log(3), 0.0, 0.0, 5.0)
    rejected = tensor(0.0, math.log(3), math.log(3), 5.0)
    losses = per_token_loss(chosen, rejected, torch.tensor([0, 0, 2, 0]), 4)
    assert losses.tolist() == pytest.approx([(right + wrong + LOG2) / 3, 0.0, wrong, 0.0])
    losses.sum().backward()
    assert chosen.grad.tolist() == pytest.approx([-0.25 / 3, -0.75 / 3, -0.75, -0.5 / 3])


def test_no_pair_at_all_has_no_loss_and_a_graph():
    for losses in (
        bradley_terry_loss(tensor(), tensor()),
        per_token_loss(tensor(), tensor(), torch.zeros(0, dtype=torch.int64), 0),
    ):
        assert losses.shape == (0,)
        assert losses.sum().requires_grad


PAD = 0


def padded(pair, width):
    """Both sequences with their padding behind."""
    return [each + [PAD] * (width - len(each)) for each in pair.sequences]


def scored(pairs, width):
    """Random scores at every place of the padded sequences, and our losses from them."""
    generator = torch.Generator().manual_seed(len(pairs))
    table = torch.randn(2 * len(pairs), width, generator=generator, dtype=torch.float64)
    table.requires_grad_()
    batch = PairCollator(PAD, "alone", multiple_of=width)([[pair.sample()] for pair in pairs])
    assert batch.input_ids.shape == table.shape
    # Rows of that layout are chosen and rejected in turn.
    chosen, rejected = table.flatten()[batch.compared]
    return table, per_token_loss(chosen, rejected, batch.compared_pair, len(pairs))


def classic(pairs, table, width, leading=0):
    rows = [(*table[2 * i : 2 * i + 2], *padded(pair, width)) for i, pair in enumerate(pairs)]
    return torch.stack([classic_per_token(*row, pad=PAD, leading=leading) for row in rows])


def test_answers_of_one_length_have_deepspeed_chats_loss_and_gradient():
    pairs = [
        Answers([3, 4], [5, 6, 7], [5, 8, 7]),  # alike again after the difference
        Answers([3], [4, 4, 4, 4], [5, 5, 5, 5]),
        Answers([3, 4, 5], [6], [7]),
    ]
    table, losses = scored(pairs, 6)
    expected = classic(pairs, table, 6)
    torch.testing.assert_close(losses, expected)
    gradient = torch.autograd.grad(losses.sum(), table, retain_graph=True)[0]
    torch.testing.assert_close(gradient, torch.autograd.grad(expected.sum(), table)[0])


def test_a_row_filled_to_the_end_has_deepspeed_chats_loss():
    pairs = [Answers([3, 4], [5, 6, 7], [5, 8, 7])]
    table, losses = scored(pairs, 5)
    torch.testing.assert_close(losses, classic(pairs, table, 5))


def test_padding_that_begins_every_sequence_is_not_its_end():
    # OPT's tokenizer begins with </s>, which DeepSpeed-Chat's OPT has as its padding too.
    pairs = [Answers([PAD, 3], [4, 5], [6, 5])]
    table, losses = scored(pairs, 6)
    torch.testing.assert_close(losses, classic(pairs, table, 6, leading=1))


@pytest.mark.parametrize("shorter", ["chosen", "rejected"])
def test_answers_of_two_lengths_differ_from_deepspeed_chat_by_its_padding_alone(shorter):
    long, short = [5, 6, 7, 8, 9], [6, 6]
    answers = (short, long) if shorter == "chosen" else (long, short)
    pair, width = Answers([3, 4], *answers), 9
    table, losses = scored([pair], width)
    expected = classic([pair], table, width)
    # Steps 2 and 3 are of both answers, 4 to 6 of one and of padding.
    terms = -torch.nn.functional.logsigmoid(table[0] - table[1])
    torch.testing.assert_close(losses[0] * 2, terms[2] + terms[3])
    torch.testing.assert_close(expected[0] * 5 - losses[0] * 2, terms[4] + terms[5] + terms[6])
    gradient = torch.autograd.grad(expected.sum(), table, retain_graph=True)[0]
    ours = torch.autograd.grad(losses.sum(), table)[0]
    row = 0 if shorter == "chosen" else 1
    assert gradient[row, 4:7].abs().min() > 0
    assert ours[:, 4:].abs().max() == 0
    assert ours[:, 2:4].abs().min() > 0


def test_an_answer_that_the_other_goes_on_from_is_compared_nowhere():
    pair, width = Answers([3, 4], [5, 6], [5, 6, 7]), 6
    table, losses = scored([pair], width)
    assert losses.tolist() == [0.0]
    # DeepSpeed-Chat compares the one token more with padding.
    step = -torch.nn.functional.logsigmoid(table[0, 4] - table[1, 4])
    torch.testing.assert_close(classic([pair], table, width)[0], step)


def test_deepspeed_chat_takes_log_2_of_equal_answers_which_teaches_nothing():
    # Such pairs are left out here when they are tokenised.
    pair = Answers([3, 4], [5], [5])
    scores = torch.randn(5, generator=torch.Generator().manual_seed(0))
    loss = classic_per_token(scores, scores, *padded(pair, 5), pad=PAD)
    assert loss.item() == pytest.approx(LOG2)
