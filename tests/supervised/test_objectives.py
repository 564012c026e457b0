"""What stages report of pairs: columns, calibration, TRL's names; and sums of losses."""

import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from dschat_lora.config.stages import DpoConfig, RewardConfig
from dschat_lora.data.batch import PairCollator
from dschat_lora.supervised.objectives import mean_of
from dschat_lora.supervised.pair_objectives import (
    answer_logprobs,
    describe_scores,
    dpo_batch_loss,
    dpo_objective,
    reward_objective,
    score_ends,
)
from helpers.pairs import Answers

PAIRS = [
    Answers([3, 4], [5, 6, 7], [5, 8], 0.5, (-6.0, -2.0)),
    Answers([9], [10], [11, 12], -1.0, (-1.0, -4.0)),
]
BATCH = PairCollator(0, "shared")([[pair.sample() for pair in PAIRS]])


class Scripted:
    """A network that gives scores, or log-probabilities, by a rule of its own."""

    def __init__(self, forward):
        self.forward, self.asked = forward, []

    def __call__(self, *, input_ids, position_ids, segment_ids, branch_ids, spans=None, **rest):
        assert input_ids.shape == position_ids.shape == segment_ids.shape == branch_ids.shape
        self.asked.append(rest)
        tokens = input_ids.flatten()
        return self.forward(tokens, **rest)


def score_by_token(tokens, score_positions):
    """The score at a token is its number: 7 ends the first chosen answer, and so on."""
    return tokens[score_positions].float().requires_grad_()


def tenth_of_token(tokens, logit_positions, target_ids):
    return (-target_ids.float() / 10).requires_grad_()


def lists(columns):
    return {name: values.tolist() for name, values in columns.items()}


def test_scores_are_those_of_last_tokens_chosen_first():
    assert score_ends(Scripted(score_by_token), BATCH).tolist() == [7.0, 10.0, 8.0, 12.0]


def test_answer_logprobs_are_sums_over_the_answer_alone():
    sums = answer_logprobs(Scripted(tenth_of_token), BATCH)
    assert sums.tolist() == pytest.approx([-1.8, -1.0, -1.3, -2.3])


def test_columns_of_a_reward_batch_by_hand():
    result = reward_objective(RewardConfig()).loss(Scripted(score_by_token), BATCH)
    # 7 - 8 - 0.5 and 10 - 12 + 1
    expected = math.log1p(math.exp(1.5)) + math.log1p(math.exp(1.0))
    assert result.total.item() == pytest.approx(expected)
    assert result.total.requires_grad
    assert lists(result.columns) == {
        "accuracy": [0.0, 0.0],
        "margin": [-1.0, -2.0],
        "chosen_score": [7.0, 10.0],
        "rejected_score": [8.0, 12.0],
        "chosen_length": [3.0, 1.0],
        "rejected_length": [2.0, 2.0],
    }
    assert not any(values.requires_grad for values in result.columns.values())


def test_centring_is_of_the_scores_and_weighed():
    plain, centred = (
        reward_objective(RewardConfig(center_rewards_coefficient=k)).loss(
            Scripted(score_by_token), BATCH
        )
        for k in (0.0, 0.01)
    )
    assert (centred.total - plain.total).item() == pytest.approx(0.01 * (15**2 + 22**2), rel=1e-5)


def test_per_token_loss_reports_the_scores_at_the_ends_from_one_pass():
    network = Scripted(score_by_token)
    result = reward_objective(RewardConfig(reward_loss="per_token")).loss(network, BATCH)
    assert len(network.asked) == 1
    # step 3 of the first pair: 6 against 8; step 1 of the second: 10 against 11
    expected = math.log1p(math.exp(2.0)) + math.log1p(math.exp(1.0))
    assert result.total.item() == pytest.approx(expected)
    assert result.columns["chosen_score"].tolist() == [7.0, 10.0]
    assert result.columns["rejected_score"].tolist() == [8.0, 12.0]


# ------------------------------------------------------- ranks that divide the tokens of pairs


def part(rank, total):
    """What a rank of two has of ``BATCH``; ``total`` stands in for the sum over both."""
    context = SimpleNamespace(rank=rank, size=2, sum=total)
    return PairCollator(0, "shared", context=context)([[pair.sample() for pair in PAIRS]])


@pytest.mark.parametrize(
    ("read", "rule", "expected"),
    [
        (score_ends, score_by_token, [7.0, 10.0, 8.0, 12.0]),
        (answer_logprobs, tenth_of_token, [-1.8, -1.0, -1.3, -2.3]),
        (
            reward_objective(RewardConfig(reward_loss="per_token")).loss,
            score_by_token,
            [7.0, 10.0, 8.0, 12.0, 6.0, 10.0, 8.0, 11.0],
        ),
    ],
)
def test_values_of_ranks_add_up_to_those_of_the_answers(read, rule, expected):
    own = []

    def total(values):
        own.append(values)
        return values

    for rank in range(2):
        read(Scripted(rule), part(rank, total))
    assert sum(own).tolist() == pytest.approx(expected)
    assert all(values.requires_grad and values.any() for values in own)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("loss_type", ["sigmoid", "orpo"])
def test_what_every_rank_knows_of_pairs_is_counted_on_the_first(rank, loss_type):
    whole = answer_logprobs(Scripted(tenth_of_token), BATCH)
    config = DpoConfig(loss_type=loss_type)
    objective = dpo_objective(config, (lambda b: b.reference) if config.has_reference else None)
    expected = objective.loss(Scripted(tenth_of_token), BATCH)
    result = objective.loss_of(None, [])(Scripted(tenth_of_token), part(rank, lambda _: whole))
    assert all(value.requires_grad for value in result.sums)
    assert [value.item() for value in result.sums] == pytest.approx(
        [value.item() if rank == 0 else 0.0 for value in expected.sums]
    )
    assert lists(result.columns) == {
        name: values if rank == 0 else [] for name, values in lists(expected.columns).items()
    }


def dpo(config, reference=lambda batch: batch.reference):
    return dpo_objective(config, reference).loss(Scripted(tenth_of_token), BATCH)


# log-ratios: -1.8 + 6, -1 + 1; -1.3 + 2, -2.3 + 4
CHOSEN, REJECTED = (4.2, 0.0), (0.7, 1.7)


def test_columns_of_a_dpo_batch_have_trls_names_and_beta_times_the_log_ratio():
    result = dpo(DpoConfig(beta=0.5))
    columns = result.columns
    names = {"rewards/chosen", "rewards/rejected", "rewards/accuracies", "rewards/margins"}
    names |= {"logps/chosen", "logps/rejected"}
    ours = {"accuracy", "margin", "chosen_score", "rejected_score"}
    assert columns.keys() == names | ours | {"chosen_length", "rejected_length"}
    for name, values in {
        "rewards/chosen": [2.1, 0.0],
        "rewards/rejected": [0.35, 0.85],
        "rewards/accuracies": [1.0, 0.0],
        "rewards/margins": [1.75, -0.85],
        "logps/chosen": [-1.8, -1.0],
        "logps/rejected": [-1.3, -2.3],
        "chosen_score": [2.1, 0.0],
        "margin": [1.75, -0.85],
        "chosen_length": [3.0, 1.0],
        "rejected_length": [2.0, 2.0],
    }.items():
        assert columns[name].tolist() == pytest.approx(values, abs=1e-6), name
        assert not columns[name].requires_grad
    wins = [1 / (1 + math.exp(-1.75)), 1 / (1 + math.exp(0.85))]
    assert result.total.item() == pytest.approx(-math.log(wins[0]) - math.log(wins[1]))


def test_rewards_are_sums_over_the_answer_also_where_the_loss_is_by_length():
    for config in (DpoConfig(beta=0.5, length_normalization=True), DpoConfig(loss_type="ipo")):
        columns = dpo(config).columns
        expected = [config.beta * value for value in CHOSEN]
        assert columns["rewards/chosen"].tolist() == pytest.approx(expected, abs=1e-6)


def test_ipo_and_length_normalisation_take_means_over_each_answers_own_tokens():
    first = CHOSEN[0] / 3 - REJECTED[0] / 2
    second = CHOSEN[1] / 1 - REJECTED[1] / 2
    ipo = dpo(DpoConfig(beta=2.0, loss_type="ipo")).total.item()
    assert ipo == pytest.approx((first - 0.25) ** 2 + (second - 0.25) ** 2, rel=1e-5)
    normal = dpo(DpoConfig(beta=2.0, length_normalization=True)).total.item()
    expected = sum(math.log1p(math.exp(-2 * value)) for value in (first, second))
    assert normal == pytest.approx(expected, rel=1e-5)


def test_the_chosen_answers_own_loss_is_a_mean_over_its_tokens_without_reference():
    with_it, without = (dpo(DpoConfig(beta=0.5, rpo_alpha=a)).total.item() for a in (0.5, 0.0))
    assert with_it - without == pytest.approx(0.5 * (1.8 / 3 + 1.0 / 1), rel=1e-5)


# means over tokens: -1.8 / 3, -1.0 / 1; -1.3 / 2, -2.3 / 2
CHOSEN_MEANS, REJECTED_MEANS = (-0.6, -1.0), (-0.65, -1.15)


def test_orpo_is_beta_times_the_odds_ratio_beside_the_chosen_tokens_cross_entropy():
    network = Scripted(tenth_of_token)
    result = dpo_objective(DpoConfig(loss_type="orpo", beta=0.2)).loss(network, BATCH)
    assert len(network.asked) == 1
    odds = [[p / (1 - p) for p in map(math.exp, each)] for each in (CHOSEN_MEANS, REJECTED_MEANS)]
    ratios = [chosen / rejected for chosen, rejected in zip(*odds, strict=True)]
    losses = [math.log(1 + 1 / ratio) for ratio in ratios]
    assert result.total.item() == pytest.approx(0.2 * sum(losses), rel=1e-5)
    assert result.chosen_nll.item() == pytest.approx(1.8 + 1.0)
    for name, values in {
        "log_odds": [math.log(ratio) for ratio in ratios],
        "log_odds_chosen": [math.log(ratio) for ratio in ratios],
        "log_odds_ratio": [-loss for loss in losses],
        "rewards/chosen": [0.2 * value for value in CHOSEN_MEANS],
        "chosen_score": [0.2 * value for value in CHOSEN_MEANS],
        "rejected_score": [0.2 * value for value in REJECTED_MEANS],
        "logps/chosen": CHOSEN_MEANS,
        "logps/rejected": REJECTED_MEANS,
        "accuracy": [1.0, 1.0],
    }.items():
        assert result.columns[name].tolist() == pytest.approx(values, rel=1e-5), name
        assert not result.columns[name].requires_grad


def test_simpo_compares_means_over_tokens_and_may_add_the_chosen_answers_own():
    network = Scripted(tenth_of_token)
    config = DpoConfig(loss_type="simpo", beta=2.0, simpo_gamma=0.5)
    result = dpo_objective(config).loss(network, BATCH)
    assert len(network.asked) == 1
    assert result.chosen_nll is None
    leads = [2 * (c - r) - 0.5 for c, r in zip(CHOSEN_MEANS, REJECTED_MEANS, strict=True)]
    expected = sum(math.log1p(math.exp(-lead)) for lead in leads)
    assert result.total.item() == pytest.approx(expected, rel=1e-5)
    assert result.columns["margin"].tolist() == pytest.approx([0.1, 0.3], rel=1e-5)
    added = dpo_objective(replace(config, rpo_alpha=0.7)).loss(network, BATCH)
    assert (added.total - result.total).item() == pytest.approx(0.7 * (0.6 + 1.0), rel=1e-5)


def test_the_reference_gets_the_batch_and_no_gradient():
    seen = []

    def reference(batch):
        seen.append((batch, torch.is_grad_enabled()))
        return batch.reference.clone().requires_grad_()

    dpo(DpoConfig(), reference)
    assert seen == [(BATCH, False)]


def test_gradient_reaches_the_policy_alone():
    logprobs = torch.tensor([-1.8, -1.0, -1.3, -2.3], requires_grad=True)
    reference = BATCH.reference.clone()
    dpo_batch_loss(logprobs, reference, BATCH, DpoConfig(beta=0.5)).total.backward()
    # 0.5 times the chance of being wrong, up for chosen and down for rejected
    wrong = [0.5 / (1 + math.exp(1.75)), 0.5 / (1 + math.exp(-0.85))]
    expected = [-wrong[0], -wrong[1], wrong[0], wrong[1]]
    assert logprobs.grad.tolist() == pytest.approx(expected, rel=1e-5)


def test_objectives_are_means_over_pairs_and_led_by_accuracy():
    for objective in (
        reward_objective(RewardConfig()),
        reward_objective(RewardConfig(reward_loss="per_token")),
        dpo_objective(DpoConfig(), lambda batch: batch.reference),
        dpo_objective(DpoConfig(loss_type="orpo")),
    ):
        assert (objective.mean_over, objective.headline) == ("num_samples", "accuracy")


def columns_of(margins, chosen_lengths, rejected_lengths):
    return {
        "margin": torch.tensor(margins),
        "chosen_length": torch.tensor(chosen_lengths),
        "rejected_length": torch.tensor(rejected_lengths),
    }


def test_an_evaluation_says_how_far_scores_follow_from_length():
    margins = [1.0, -2.0, 3.0, 0.5]
    chosen, rejected = [5.0, 2.0, 9.0, 4.0], [3.0, 4.0, 3.0, 4.0]
    described = describe_scores(0.0, columns_of(margins, chosen, rejected))
    expected = np.corrcoef(margins, np.subtract(chosen, rejected))[0, 1]
    assert described["length_correlation"] == pytest.approx(expected)
    assert described["chosen_is_longer"] == pytest.approx(2.5 / 4)
    assert described.keys() == {
        "calibration_error",
        "reliability",
        "length_correlation",
        "chosen_is_longer",
    }
    # all four in their own bins: |sigmoid - came true|, the second did not
    sure = [1 / (1 + math.exp(-abs(m))) for m in margins]
    error = (1 - sure[0]) + sure[1] + (1 - sure[2]) + (1 - sure[3])
    assert described["calibration_error"] == pytest.approx(error / 4)
    assert described["reliability"]["counts"] == [0, 0, 1, 0, 1, 0, 0, 1, 0, 1]
    assert described["reliability"]["error"] == described["calibration_error"]


def test_margins_of_a_policy_are_no_probabilities_to_be_calibrated():
    columns = columns_of([1.0, -2.0], [3.0, 4.0], [3.0, 5.0])
    described = dpo_objective(DpoConfig(), lambda batch: batch.reference).describe(0.0, columns)
    assert described.keys() == {"length_correlation", "chosen_is_longer"}
    scored = reward_objective(RewardConfig()).describe(0.0, columns)
    assert scored.keys() > described.keys()
    assert scored["length_correlation"] == described["length_correlation"]


def test_an_evaluation_of_nothing_or_of_equal_lengths_has_no_correlation():
    empty = describe_scores(0.0, columns_of([], [], []))
    assert empty["length_correlation"] is None
    assert empty["chosen_is_longer"] is None
    assert empty["calibration_error"] == 0.0
    equal = describe_scores(0.0, columns_of([1.0, 2.0], [3.0, 4.0], [3.0, 4.0]))
    assert equal["length_correlation"] is None
    assert equal["chosen_is_longer"] == 0.5


def test_mean_of_values_is_theirs_or_none():
    assert mean_of(torch.tensor([1.0, 2.0, 6.0])) == 3.0
    assert mean_of(torch.zeros(0)) is None


def test_log_ratios_that_differ_by_rounding_alone_are_ties():
    def shifted(nats):
        # the second pair's log-ratios are equal but for so much
        def reference(batch):
            known = batch.reference.clone()
            logratio = -1.0 - known[1]
            known[3] = -2.3 - logratio + nats
            return known

        columns = dpo(DpoConfig(beta=0.5), reference).columns
        return columns["accuracy"][1].item(), columns["rewards/accuracies"][1].item()

    assert shifted(2e-5) == (0.5, 1.0)
    assert shifted(-2e-5) == (0.5, 0.0)
    assert shifted(1e-3) == (1.0, 1.0)
    assert shifted(-1e-3) == (0.0, 0.0)
