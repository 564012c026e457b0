"""Responses of an iteration, assigned to minibatches and ranks, and laid out as batches."""

import pytest
import torch

from dschat_lora.rl.response.batch import collate, make_minibatches
from dschat_lora.rl.response.response import Response
from helpers.iterations import ragged_responses

LENGTHS = [7, 3, 9, 9, 2, 5, 11, 4, 4, 6, 8, 1, 12]


def dealt(world_size, *, per_rank=None, key=("k", 1), tokens_per_device=0):
    options = {"rows_per_step": 6, "micro_batch_size": per_rank or 6 // world_size, "key": key}
    options |= {"world_size": world_size, "tokens_per_device": tokens_per_device}
    return [make_minibatches(LENGTHS, rank=rank, **options) for rank in range(world_size)]


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("per_rank", [1, 2, None])
def test_every_response_is_on_one_rank_in_one_micro_batch_of_a_pass(world_size, per_rank):
    ranks, limit, taken = dealt(world_size, per_rank=per_rank), per_rank or 6 // world_size, []
    for steps in zip(*ranks, strict=True):
        assert len({len(step.micro_batches) for step in steps}) == 1
        batches = [batch for step in steps for batch in step.micro_batches]
        assert max(map(len, batches)) <= limit
        own = sorted(n for batch in batches for n in batch)
        assert own == sorted(steps[0].numbers)
        assert len(steps[0].micro_batches) == -(-len(own) // (limit * world_size))
        taken += own
    assert sorted(taken) == list(range(len(LENGTHS)))


def test_steps_have_the_same_responses_for_any_number_of_ranks():
    numbers = [
        [sorted(step.numbers) for step in steps]
        for world_size in (1, 2, 3)
        for steps in dealt(world_size)
    ]
    assert all(each == numbers[0] for each in numbers)
    assert [len(each) for each in numbers[0]] == [6, 6, 1]


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("tokens", [12, 20, 200])
def test_a_budget_of_tokens_cuts_the_same_steps_otherwise(world_size, tokens):
    budget = dealt(world_size, tokens_per_device=tokens)
    for steps, by_rows in zip(budget, dealt(world_size), strict=True):
        assert [step.numbers for step in steps] == [step.numbers for step in by_rows]
    for steps in zip(*budget, strict=True):
        assert len({len(step.micro_batches) for step in steps}) == 1
        batches = [batch for step in steps for batch in step.micro_batches]
        assert sorted(n for batch in batches for n in batch) == sorted(steps[0].numbers)
        sizes = [len(batch) * max((LENGTHS[n] for n in batch), default=0) for batch in batches]
        assert max(sizes) <= tokens
        # As few as can be: the responses by length, each batch as full as it gets.
        fewest, room, longest = 0, 0, 0
        for length in sorted((LENGTHS[n] for n in steps[0].numbers), reverse=True):
            if (room + 1) * longest > tokens or not longest:
                fewest, room, longest = fewest + 1, 0, length
            room += 1
        assert len(batches) == -(-fewest // world_size) * world_size


def test_a_rank_for_which_nothing_is_left_has_an_empty_micro_batch():
    first, second = dealt(2)
    assert [len(batch) for batch in first[-1].micro_batches] == [1]
    assert second[-1].micro_batches == [[]]


def test_responses_of_like_length_share_a_micro_batch_longest_first():
    for steps in dealt(1, per_rank=2):
        for step in steps:
            lengths = [LENGTHS[n] for batch in step.micro_batches for n in batch]
            assert lengths == sorted(lengths, reverse=True)


def test_the_order_is_random_and_that_of_the_key():
    orders = [
        [n for step in dealt(1, key=key)[0] for n in sorted(step.numbers)]
        for key in (("a", 1, 2), ("a", 1, 3), ("a", 1, 2))
    ]
    assert orders[0] == orders[2] != orders[1]
    assert orders[0] != list(range(len(LENGTHS)))


# ---------------------------------------------------------------------------- batches


def responses_of(count=5):
    return [Response(tuple(p), tuple(t), True, g) for p, t, g in ragged_responses(count, seed=6)]


def test_each_predicted_token_is_the_next_one_of_its_response():
    responses, numbers = responses_of(), [3, 0, 4]
    batch = collate(responses, numbers, pad_id=17)
    expected = []
    for row, number in enumerate(numbers):
        each = responses[number]
        for step, token in enumerate(each.tokens):
            place = row * batch.input_ids.shape[1] + len(each.prompt) + step - 1
            expected.append((place, token, row, step))
    predicted = zip(
        *(x.tolist() for x in (batch.logit_positions, batch.target_ids, batch.owner, batch.step)),
        strict=True,
    )
    assert sorted(predicted) == expected
    ids = batch.input_ids.flatten()
    assert ids[batch.ends].tolist() == [responses[n].tokens[-1] for n in numbers]
    assert ids[batch.logit_positions + 1].tolist() == batch.target_ids.tolist()
    assert batch.numbers == (3, 0, 4)


def test_rows_hold_their_sequence_and_padding():
    responses = responses_of()
    batch = collate(responses, [1, 2], pad_id=17)
    width = max(len(responses[n]) for n in (1, 2))
    assert batch.input_ids.shape == (2, width)
    for row, n in enumerate((1, 2)):
        size = len(responses[n])
        whole = [*responses[n].prompt, *responses[n].tokens]
        assert batch.input_ids[row].tolist() == whole + [17] * (width - size)
        assert batch.segment_ids[row].tolist() == [1] * size + [0] * (width - size)
        assert batch.position_ids[row, :size].tolist() == list(range(size))


def test_counts_are_of_tokens_and_of_what_padding_costs():
    responses = responses_of()
    batch = collate(responses, [1, 2], pad_id=0)
    sizes = [len(responses[n]) for n in (1, 2)]
    width = max(sizes)
    assert batch.counts.num_samples == 2
    assert batch.counts.num_tokens == sum(sizes)
    assert batch.counts.num_targets == sum(len(responses[n].tokens) for n in (1, 2))
    assert batch.counts.num_attended == sum(n * (n + 1) // 2 for n in sizes)
    assert batch.counts.num_positions == 2 * width
    assert batch.counts.num_scored_pairs == 2 * width * width


def test_a_table_has_each_value_at_its_step_and_gradient():
    responses, numbers = responses_of(), [2, 0]
    batch = collate(responses, numbers, pad_id=0)
    values = (torch.arange(len(batch.target_ids)) + 1.0).requires_grad_()
    table = batch.table(values, 9)
    assert table.shape == (2, 9)
    for row, n in enumerate(numbers):
        size = len(responses[n].tokens)
        own = values[batch.owner == row].tolist()
        assert table[row].tolist() == own + [0.0] * (9 - size)
    table.square().sum().backward()
    assert values.grad.tolist() == (2 * values).tolist()


def test_a_batch_of_nothing_has_a_row_of_padding_and_no_response():
    batch = collate(responses_of(), [], pad_id=17)
    assert batch.input_ids.tolist() == [[17]]
    assert batch.segment_ids.tolist() == [[0]]
    for each in (batch.logit_positions, batch.target_ids, batch.owner, batch.step, batch.ends):
        assert each.shape == (0,)
    assert batch.table(torch.zeros(0), 4).shape == (0, 4)
    assert batch.counts.num_tokens == batch.counts.num_samples == 0


def test_a_batch_moves_as_a_whole():
    batch = collate(responses_of(), [0, 1], pad_id=0).to("meta")
    tensors = [v for v in vars(batch).values() if isinstance(v, torch.Tensor)]
    assert len(tensors) == 8
    assert all(each.is_meta for each in tensors)
    assert batch.numbers == (0, 1)
