"""What becomes of scores before they teach, and prompts that dynamic sampling replaces."""

import math
import random
import statistics

import pytest
import torch

from dschat_lora.algos.advantages import RunningMoments
from dschat_lora.rl.learn.dynamic_sampling import resample
from dschat_lora.rl.learn.experience import idle_groups
from dschat_lora.rl.options.algorithms import ALGORITHMS
from dschat_lora.rl.options.config import RewardsConfig
from dschat_lora.rl.response.response import Response
from dschat_lora.rl.score.scores import Scores, rescale_values, shape


def taught(scores, ended=None, moments=None, **options):
    """(scores that teach, moments after) with everything off that is not named."""
    config = RewardsConfig(**{"clip_reward_value": 0.0, "reward_scaling": "none"} | options)
    ended = torch.ones(len(scores), dtype=torch.bool) if ended is None else torch.tensor(ended)
    scores, before = torch.tensor(scores), moments or RunningMoments()
    shaped = shape(scores, ended, [1] * len(scores), before, config, longest=9)
    return shaped.rewards, shaped.moments


def test_scores_teach_as_they_are_where_nothing_is_asked():
    rewards, moments = taught([3.0, math.nan, -70.0])
    assert rewards.tolist() == [3.0, 0.0, -70.0]  # 0 where no score is
    assert moments == RunningMoments()
    assert taught([3.0, 3.0], reward_scaling="running")[0].tolist() == [3.0, 3.0]  # of no spread


def test_clip_is_of_either_sign_and_comes_before_the_penalty():
    scores, ended = [9.0, -9.0, 1.0, 9.0], [True, True, False, False]
    rewards, _ = taught(scores, ended, clip_reward_value=2.0, missing_eos_penalty=3.0)
    assert rewards.tolist() == [2.0, -2.0, -2.0, -1.0]


def test_running_scale_divides_by_the_deviation_of_all_scores_so_far():
    first, second = [1.0, 4.0, math.nan, 2.0], [10.0, -6.0]
    rewards, moments = taught(first, reward_scaling="running")
    spread = statistics.stdev([1.0, 4.0, 2.0])
    expected = torch.tensor([x / spread for x in first]).nan_to_num(0.0)
    torch.testing.assert_close(rewards, expected)
    rewards, moments = taught(second, moments=moments, reward_scaling="running")
    every = [1.0, 4.0, 2.0, *second]
    torch.testing.assert_close(rewards, torch.tensor([x / statistics.stdev(every) for x in second]))
    assert moments.count == 5
    assert moments.mean == pytest.approx(statistics.mean(every))


def test_initial_scale_takes_in_iterations_until_it_has_64_scores():
    rng = random.Random(5)
    iterations = [[rng.gauss(3, 2) for _ in range(n)] for n in (63, 20, 30)]
    first, second, third = iterations
    seen, moments = [], RunningMoments()
    for scores in (first, second):
        seen += scores
        rewards, moments = taught([*scores, math.nan], moments=moments, reward_scaling="initial")
        mean, spread = statistics.mean(seen), statistics.stdev(seen)
        expected = torch.tensor([*((x - mean) / spread for x in scores), 0.0])
        torch.testing.assert_close(rewards, expected)
    assert moments.count == 83
    rewards, after = taught(third, moments=moments, reward_scaling="initial")
    torch.testing.assert_close(rewards, torch.tensor([(x - mean) / spread for x in third]))
    assert after == moments
    values = rescale_values(moments, torch.tensor([[7.0, mean]]))
    torch.testing.assert_close(values, torch.tensor([[(7.0 - mean) / spread, 0.0]]))


def test_initial_scale_waits_for_a_score():
    _, moments = taught([math.nan, math.nan], reward_scaling="initial")
    assert moments == RunningMoments()
    rewards, _ = taught([1.0, 3.0], moments=moments, reward_scaling="initial")
    torch.testing.assert_close(rewards, torch.tensor([-1.0, 1.0]) / 2**0.5)


@pytest.mark.parametrize(
    ("scaling", "ended", "clip", "penalty", "expected"),
    [
        ("running", [False, True], 1.2, 0.5, [-0.5, 1.2]),
        ("initial", [False, False], 0.5, 0.25, [-0.75, 0.25]),
    ],
)
def test_scores_are_scaled_then_clipped_then_lowered(scaling, ended, clip, penalty, expected):
    # deviation 10 by hand: (0 - 10)^2 + (20 - 10)^2 = 200, over 2 - 1, is 14.14 squared
    options = {"clip_reward_value": clip, "missing_eos_penalty": penalty}
    rewards, _ = taught([0.0, 20.0], ended, reward_scaling=scaling, **options)
    torch.testing.assert_close(rewards, torch.tensor(expected))


# ---------------------------------------------------------------------------- dynamic sampling


def group_of(number, place):
    """Two responses to a prompt, which name it."""
    return [Response((number,), (number, k), True, place) for k in range(2)]


def after(prompts, further, rewards, *, tries=9):
    """The prompts of each place at the end, and what was done; ``rewards`` by prompt."""
    rounds = []

    def generate(numbers, number):
        rounds.append((number, list(numbers)))
        return [r for place, prompt in enumerate(numbers) for r in group_of(prompt, place)]

    def score(responses):
        values = torch.tensor([rewards[r.prompt[0]][r.tokens[1]] for r in responses])
        return Scores(values, {"f": 2 * values})

    first = [r for place, prompt in enumerate(prompts) for r in group_of(prompt, place)]
    resampled = resample(
        first,
        algorithm=ALGORITHMS["dapo"],
        further=iter(further),
        tries=tries,
        generate=generate,
        score=score,
    )
    assert [r.group for r in resampled.responses] == [n // 2 for n in range(len(first))]
    torch.testing.assert_close(
        resampled.scores.total, score(resampled.responses).total, equal_nan=True
    )
    torch.testing.assert_close(
        resampled.scores.by_name["f"], 2 * resampled.scores.total, equal_nan=True
    )
    return [r.prompt[0] for r in resampled.responses[::2]], resampled.metrics, rounds


REWARDS = {
    **dict.fromkeys((1, 2, 11, 13), (0.0, 1.0)),
    **dict.fromkeys((3, 4, 10, 12), (1.0, 1.0)),
    5: (math.nan, 1.0),
}


def test_a_group_is_idle_where_no_two_responses_that_count_differ():
    nan, dapo = math.nan, ALGORITHMS["dapo"]
    rewards = torch.tensor([1.0, 1.0, 0.0, 1.0, nan, nan, nan, 2.0, 3.0, 3.0, nan, 4.0])
    groups = [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 6]
    assert idle_groups(dapo, groups, rewards, {}, {}) == [0, 2, 3, 4, 5, 6]
    assert idle_groups(dapo, [4, 4, 4], torch.tensor([0.0, nan, 1.0]), {}, {}) == []


def test_equal_groups_are_replaced_by_further_prompts_until_none_is_left():
    prompts, metrics, rounds = after([1, 3, 2, 4], [10, 11, 12, 13], REWARDS)
    assert prompts == [1, 11, 2, 13]
    assert rounds == [(1, [10, 11]), (2, [12]), (3, [13])]
    assert metrics == {"resampling_tries": 3, "resampled_prompts": 2, "resampled_responses": 8}


def test_no_more_prompts_are_asked_than_tries_allow_or_there_are():
    assert after([3, 4], [10, 12, 11, 13], REWARDS, tries=1)[0] == [3, 4]
    prompts, metrics, _ = after([3, 5], [11], REWARDS)
    assert prompts == [11, 5]
    assert metrics["resampling_tries"] == 1
    prompts, metrics, rounds = after([1, 2], [11], REWARDS)  # these differ
    assert (prompts, rounds) == ([1, 2], [])
    assert set(metrics.values()) == {0}
