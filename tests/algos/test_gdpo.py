"""GDPO against numbers of TRL, and what of its rewards teaches."""

import math
from dataclasses import replace

import pytest
import torch

from dschat_lora.algos.credit import Outcome
from dschat_lora.algos.gdpo import gdpo
from dschat_lora.rl.learn.experience import idle_groups
from dschat_lora.rl.options.algorithms import ALGORITHMS, PpoConfig

NAN = math.nan
# Three functions' rewards of four responses to each of three prompts. A function gives none to some
# responses, to one alone of a prompt, or to none; prompts have equal rewards; no function scores
# responses 9 and 11 of the second case.
FIRST = [1.0, 0.0, 1.0, 0.5, 2.0, 2.0, 2.0, 2.0, 0.25, NAN, 0.75, NAN]
SECOND = [3.0, 1.0, -1.0, 0.5, 0.0, 4.0, NAN, 0.5, NAN, NAN, 1.5, NAN]
THIRD = [0.5, 0.5, 0.5, 0.5, 1.0, NAN, NAN, NAN, 2.0, NAN, 1.0, 3.0]
# Advantages as _generate_and_score_completions of a GRPOTrainer of TRL 1.16.0 returned them on a
# CPU, where reward functions gave these lists: multi_objective_aggregation="normalize_then_sum",
# num_generations=4, per_device_train_batch_size=12, and reward_weights.
TRL = {
    "three": (
        {"first": (FIRST, 1.0), "second": (SECOND, 0.5), "third": (THIRD, -2.0)},
        [
            *(1.1221543550491333, -0.9972014427185059, 0.16972976922988892, -0.29468274116516113),
            *(-0.2707301080226898, 0.45121681690216064, 1.0657844606853928e-09, -0.180486723780632),
            *(-0.5561656355857849, 0.0, 2.1295268535614014, -1.5733613967895508),
        ],
    ),
    "one": (
        {"second": (SECOND, 1.0)},
        [
            *(1.521787166595459, 0.08951689302921295, -1.3427534103393555, -0.26855066418647766),
            *(-0.8142558932304382, 1.357093095779419, 0.0, -0.5428372621536255),
            *(0.0, 0.0, -4.407541887019306e-09, 0.0),
        ],
    ),
}


def outcome_of(rewards, groups):
    """An outcome of responses of one token, from (rewards, weight) by name."""
    by_name = {name: torch.tensor(values) for name, (values, _) in rewards.items()}
    counts = ~torch.stack([*by_name.values()]).isnan().all(0)
    alone = len(groups) + torch.arange(len(groups))
    blank = torch.zeros(len(groups), 1)
    return Outcome(
        rewards=by_name,
        weights={name: weight for name, (_, weight) in rewards.items()},
        shaped=torch.full((len(groups),), 7.0),
        groups=torch.where(counts, torch.tensor(groups), alone),
        counts=counts,
        mask=counts[:, None],
        options=PpoConfig(algorithm="gdpo"),
        kl_coef=0.0,
        values=None,
        logprobs=None,
        ref_logprobs=blank,
    )


@pytest.mark.parametrize("name", TRL)
def test_advantages_are_those_of_trl(name):
    rewards, expected = TRL[name]
    advantages = gdpo(outcome_of(rewards, [0] * 4 + [1] * 4 + [2] * 4))
    torch.testing.assert_close(advantages, torch.tensor(expected), atol=1e-6, rtol=0)


def test_rewards_that_no_weight_counts_change_nothing_and_one_response_teaches_nothing():
    rewards, groups = TRL["three"][0], [0] * 4 + [1] * 4 + [2] * 4
    outcome = outcome_of(rewards, groups)
    gate = replace(outcome, rewards={**outcome.rewards, "gate": torch.arange(12.0)})
    assert torch.equal(gdpo(gate), gdpo(outcome))
    assert gdpo(outcome_of({"first": ([3.0, NAN], 1.0)}, [0, 0])).tolist() == [0.0, 0.0]


def test_a_group_teaches_where_one_reward_differs_though_the_sum_does_not():
    total = torch.tensor([1.0, 1.0, 2.0, 2.0, 0.0, NAN])
    rewards = {
        "right": torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0, NAN]),
        "short": torch.tensor([0.0, 1.0, 1.0, 1.0, 0.0, NAN]),
        "gate": torch.tensor([0.0, 1.0, 0.0, 1.0, 0.0, NAN]),
    }
    weights = {"right": 1.0, "short": 1.0}
    groups = [0, 0, 1, 1, 2, 2]
    assert idle_groups(ALGORITHMS["gdpo"], groups, total, rewards, weights) == [1, 2]
    assert idle_groups(ALGORITHMS["grpo"], groups, total, rewards, weights) == [0, 1, 2]
    weightless = {"right": 0.0, "short": 0.0}
    assert idle_groups(ALGORITHMS["gdpo"], groups, total, rewards, weightless) == [0, 1, 2]
