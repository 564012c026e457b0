"""What a look at responses gives before the update, and the targets that are made of it."""

import math
from dataclasses import replace

import pytest
import torch

from dschat_lora.rl.learn.engines import RewardModelScorer, make_experience
from dschat_lora.rl.learn.experience import Experience, add_old_outputs, advantages_and_returns
from dschat_lora.rl.options.algorithms import PpoConfig
from dschat_lora.rl.response.batch import collate
from dschat_lora.rl.response.response import Response
from dschat_lora.rl.score.scores import Scores
from dschat_lora.rl.score.user_functions import TrainerState
from helpers.given_engines import MASK, RESPONSES, Roles, experience

pytestmark = pytest.mark.usefixtures("one_rank")


NO_SCORES = Scores(torch.zeros(6))


def model_scores(roles, batches):
    if roles.reward is None:
        return NO_SCORES
    return RewardModelScorer(roles, lambda _: batches)(RESPONSES, TrainerState())


@pytest.mark.parametrize("asks", [True, False])
@pytest.mark.parametrize("critic", [True, False])
def test_a_look_has_every_response_at_its_number(asks, critic):
    roles = Roles(critic=critic, logprob=-0.7, value=0.2)
    batches = [collate(RESPONSES, rows, 0) for rows in ([4, 2], [0, 5, 1], [3], [])]
    deferred = 0 if asks else len(batches)
    scores = model_scores(roles, batches)
    seen = make_experience(roles, RESPONSES, batches, scores, deferred=deferred)
    logprobs, values = seen.logprobs, seen.values
    assert set(roles.modes) == {"eval"}
    steps = torch.arange(MASK.shape[1]) + 1.0
    torch.testing.assert_close(seen.ref_logprobs, -2.0 * steps * MASK)
    # without a critic nothing has the reward model here
    expected = [10.0 * n if critic else 0.0 for n in range(6)]
    assert seen.scores.tolist() == expected
    assert torch.equal(seen.mask, MASK)
    assert (logprobs is not None) == asks
    assert (values is not None) == (asks and critic)
    if asks:
        torch.testing.assert_close(logprobs, -0.7 * MASK)
        assert not logprobs.requires_grad
    if asks and critic:
        torch.testing.assert_close(values, 0.2 * MASK)


def test_a_look_leaves_out_what_the_update_will_say():
    roles = Roles(critic=False, logprob=-0.7)
    batches = [collate(RESPONSES, rows, 0) for rows in ([4, 2], [0, 5, 1], [3])]
    seen = make_experience(roles, RESPONSES, batches, NO_SCORES, deferred=1)
    assert seen.logprobs.isnan().all(1).tolist() == [n in (2, 4) for n in range(6)]
    torch.testing.assert_close(seen.logprobs[[0, 1, 3, 5]], -0.7 * MASK[[0, 1, 3, 5]])
    assert roles.passes == [(0, 5, 1), (3,)]


def test_a_look_may_take_the_decode_loops_logprobs():
    roles = Roles(logprob=-0.7, value=0.2)
    drawn = [
        replace(each, logprobs=tuple(-n - k / 8 for k in range(len(each.tokens))))
        for n, each in enumerate(RESPONSES)
    ]
    batches = [collate(drawn, rows, 0) for rows in ([4, 2], [0, 5, 1, 3])]
    seen = make_experience(roles, drawn, batches, NO_SCORES, from_sampler=True)
    for row, each in zip(seen.logprobs.tolist(), drawn, strict=True):
        assert row[: len(each.logprobs)] == list(each.logprobs)
        assert not any(row[len(each.logprobs) :])
    assert roles.passes == []
    torch.testing.assert_close(seen.values, 0.2 * MASK)
    torch.testing.assert_close(seen.ref_logprobs, -2.0 * (torch.arange(MASK.shape[1]) + 1) * MASK)


# ---------------------------------------------------------------------------- targets


def by_hand(algorithm, scores, groups, *, kl=0.0, **options):
    """Advantages of single-token responses."""
    responses = [Response((5,), (6,), True, g) for g in groups]
    scores = torch.tensor(scores)
    mask = torch.ones(len(groups), 1, dtype=torch.bool) & ~scores.isnan()[:, None]
    kl = torch.as_tensor(kl, dtype=torch.float32).view(-1, 1).expand(len(groups), 1)
    zero = torch.zeros(len(groups), 1)
    known = Experience(responses, mask, zero - kl, scores, zero, zero)
    config = PpoConfig(algorithm=algorithm, **options)
    return advantages_and_returns(known, scores.nan_to_num(), config, kl_coef=0.5)


def test_rloo_compares_what_is_left_of_scores_after_the_divergence():
    targets = by_hand("rloo", [1.0, 4.0, math.nan, 9.0], [0, 0, 0, 1], kl=[2.0, 4.0, 8.0, 16.0])
    # worth 0 and 2 in the first group; the last is alone
    assert targets.advantages[:, 0].tolist() == [-2.0, 2.0, 0.0, 0.0]
    assert targets.returns is None


def test_ppo_takes_the_divergence_from_rewards():
    targets = by_hand("ppo", [1.0, 3.0, math.nan], [0, 0, 0], kl=[2.0, 4.0, 8.0])
    # rewards 0 and 1 of values 0: whitened to -1 and 1
    torch.testing.assert_close(targets.advantages[:, 0], torch.tensor([-1.0, 1.0, 0.0]))
    assert targets.returns[:, 0].tolist() == [0.0, 1.0, 0.0]
    plain = by_hand("ppo", [1.0, 3.0], [0, 0], kl=[2.0, 4.0], whiten_advantages=False)
    assert plain.advantages[:, 0].tolist() == [0.0, 1.0]


def test_what_ranks_know_is_put_in_the_order_of_responses():
    numbers = [4, 2, 0, 1, 3, 5]
    order = torch.tensor(numbers, dtype=torch.float32)[:, None] * MASK[numbers]
    known = add_old_outputs(experience(known=False), numbers, order, -order)
    expected = torch.arange(6.0)[:, None] * MASK
    assert torch.equal(known.logprobs, expected)
    assert torch.equal(known.values, -expected)
    assert add_old_outputs(experience(known=False), numbers, order, None).values is None
