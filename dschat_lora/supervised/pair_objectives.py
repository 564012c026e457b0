"""What a reward model and a policy learn of pairs of answers, and what is told of it."""

from collections.abc import Callable
from dataclasses import asdict
from typing import Any, Literal, cast

import torch
from torch import Tensor

from dschat_lora.algos.dpo import dpo_loss
from dschat_lora.algos.logprobs import sequence_sums
from dschat_lora.algos.preference import accuracy, correlation, reliability
from dschat_lora.algos.reference_free import odds_ratio_loss, simpo_loss
from dschat_lora.algos.reward import bradley_terry_loss, per_token_loss
from dschat_lora.config.stages import DpoConfig, RewardConfig
from dschat_lora.data.batch import PairBatch
from dschat_lora.supervised.objectives import BatchLoss, Columns, Network, Objective, mean_of

# Log-ratios of the untrained policy differ by rounding alone.
SAME_NATS = 1e-4


def reward_objective(config: RewardConfig) -> Objective:
    """Learn which answer is better from scores; the engine is over a ``RewardModel``."""

    def loss(engine: Network, batch: PairBatch) -> BatchLoss:
        if config.reward_loss == "bradley_terry":
            scores = score_ends(engine, batch)
            chosen, rejected = scores.chunk(2)
            center = config.center_rewards_coefficient
            losses = bradley_terry_loss(chosen, rejected, batch.margins, center_coefficient=center)
        else:  # from one forward pass
            whole = _scores(engine, batch, torch.cat([batch.ends, *batch.compared]))
            sizes = [len(batch.ends), *map(len, batch.compared)]
            scores, chosen, rejected = torch.split(whole, sizes)
            losses = per_token_loss(chosen, rejected, batch.compared_pair, len(batch.margins))
        chosen, rejected = scores.detach().chunk(2)
        return BatchLoss(losses.sum(), score_columns(chosen, rejected, batch))

    return Objective(loss, "num_samples", describe_scores, "accuracy")


def score_ends(engine: Network, batch: PairBatch) -> Tensor:
    """(2 P,) scores of a batch's sequences, each at its last token."""
    return _scores(engine, batch, batch.ends)


def _scores(engine: Network, batch: PairBatch, score_positions: Tensor) -> Tensor:
    scores: Tensor = engine(
        input_ids=batch.input_ids,
        position_ids=batch.position_ids,
        segment_ids=batch.segment_ids,
        branch_ids=batch.branch_ids,
        score_positions=score_positions,
        spans=batch.spans,
    )
    if (context := batch.spans.context) is None:
        return scores
    total: Tensor = context.sum(scores.where(score_positions >= 0, 0.0))
    return total


def score_columns(
    chosen: Tensor, rejected: Tensor, batch: PairBatch, *, tolerance: float = 0.0
) -> dict[str, Tensor]:
    """What is reported of each pair, from its scores; closer ones than ``tolerance`` are equal."""
    chosen_length, rejected_length = batch.answer_lengths.float().chunk(2)
    return {
        "accuracy": accuracy(chosen, rejected, tolerance=tolerance),
        "margin": chosen - rejected,
        "chosen_score": chosen,
        "rejected_score": rejected,
        "chosen_length": chosen_length,
        "rejected_length": rejected_length,
    }


def describe_scores(loss: float, columns: Columns) -> dict[str, Any]:
    """Calibration of the predicted preferences, and how far they follow from length alone."""
    calibration = reliability(columns["margin"])
    return {
        "calibration_error": calibration.error,
        "reliability": asdict(calibration),
        **describe_lengths(loss, columns),
    }


def describe_lengths(loss: float, columns: Columns) -> dict[str, Any]:
    """How far margins follow from the lengths of the answers alone."""
    longer = columns["chosen_length"] - columns["rejected_length"]
    return {
        "length_correlation": correlation(columns["margin"], longer),
        "chosen_is_longer": mean_of(accuracy(longer, torch.zeros_like(longer))),
    }


def dpo_objective(
    config: DpoConfig, reference: Callable[[PairBatch], Tensor] | None = None
) -> Objective:
    """Learn which answer is better as a policy; the engine is over a ``CausalLMLogprobs``.

    ``reference`` gives the (2 P,) log-probabilities of a batch's answers under the reference,
    where the loss has one.
    """

    def loss(engine: Network, batch: PairBatch) -> BatchLoss:
        if reference is None:
            return reference_free_batch_loss(answer_logprobs(engine, batch), batch, config)
        with torch.no_grad():
            expected = reference(batch)
        return dpo_batch_loss(answer_logprobs(engine, batch), expected, batch, config)

    return Objective(loss, "num_samples", describe_lengths, "accuracy")


def answer_logprobs(engine: Network, batch: Any) -> Tensor:
    """Log-probabilities in nats of a batch's answers, (2 P,) of pairs, summed over their tokens.

    ``batch`` is a ``PairBatch``, or has its fields.
    """
    logprobs: Tensor = engine(
        input_ids=batch.input_ids,
        position_ids=batch.position_ids,
        segment_ids=batch.segment_ids,
        branch_ids=batch.branch_ids,
        logit_positions=batch.logit_positions,
        target_ids=batch.target_ids,
        spans=batch.spans,
    )
    sums = sequence_sums(logprobs, batch.owner, len(batch.answer_lengths))
    return sums if (context := batch.spans.context) is None else context.sum(sums)


def dpo_batch_loss(
    logprobs: Tensor, reference: Tensor, batch: PairBatch, config: DpoConfig
) -> BatchLoss:
    """DPO's loss summed over the pairs, with ``--rpo_alpha`` times that of the chosen answers.

    ``logprobs`` and ``reference`` are (2 P,), of the answers under the policy and the reference.
    """
    assert config.loss_type in ("sigmoid", "ipo", "hinge"), "a loss with a reference"
    lengths = batch.answer_lengths.clamp(min=1)
    logratios = logprobs - reference
    by_length = config.length_normalization or config.loss_type == "ipo"
    chosen, rejected = (logratios / lengths if by_length else logratios).chunk(2)
    losses = dpo_loss(
        chosen,
        rejected,
        beta=config.beta,
        loss_type=cast(Literal["sigmoid", "ipo", "hinge"], config.loss_type),
        label_smoothing=config.label_smoothing,
    )
    if config.rpo_alpha:
        # Of each chosen answer the mean over its tokens (eq. 2 of arXiv:2404.19733).
        losses = losses - config.rpo_alpha * (logprobs / lengths).chunk(2)[0]
    rewards = config.beta * logratios.detach()
    # Log-ratios of the untrained policy differ by rounding alone.
    return BatchLoss(
        losses.sum(), _policy_columns(rewards, logprobs, batch, tolerance=config.beta * SAME_NATS)
    )


def reference_free_batch_loss(logprobs: Tensor, batch: PairBatch, config: DpoConfig) -> BatchLoss:
    """ORPO's or SimPO's loss summed over the pairs.

    ``logprobs`` are (2 P,), of the answers; both losses are of their means over tokens. ORPO's
    cross-entropy is a sum of its own, over the tokens of the chosen answers; SimPO's is
    ``--rpo_alpha`` times a mean for each answer, as DPO's.
    """
    means = logprobs / batch.answer_lengths.clamp(min=1)
    chosen, rejected = means.chunk(2)
    columns = _policy_columns(config.beta * means.detach(), means, batch)
    if config.loss_type == "orpo":
        losses, log_odds = odds_ratio_loss(chosen, rejected)
        columns |= {
            "log_odds": log_odds.detach(),
            # TRL's names
            "log_odds_chosen": log_odds.detach(),
            "log_odds_ratio": -losses.detach(),
        }
        nll = -logprobs.chunk(2)[0].sum()
        return BatchLoss(config.beta * losses.sum(), columns, chosen_nll=nll)
    losses = simpo_loss(
        chosen,
        rejected,
        beta=config.beta,
        gamma=config.simpo_gamma,
        label_smoothing=config.label_smoothing,
    )
    if config.rpo_alpha:
        losses = losses - config.rpo_alpha * chosen
    return BatchLoss(losses.sum(), columns)


def _policy_columns(
    rewards: Tensor, logprobs: Tensor, batch: PairBatch, *, tolerance: float = 0.0
) -> dict[str, Tensor]:
    """What is reported of each pair, from (2 P,) rewards and log-probabilities of its answers."""
    chosen, rejected = rewards.chunk(2)
    columns = score_columns(chosen, rejected, batch, tolerance=tolerance)
    chosen_logprobs, rejected_logprobs = logprobs.detach().chunk(2)
    return columns | {
        # TRL's names
        "rewards/chosen": columns["chosen_score"],
        "rewards/rejected": columns["rejected_score"],
        "rewards/accuracies": (columns["margin"] > 0).float(),
        "rewards/margins": columns["margin"],
        "logps/chosen": chosen_logprobs,
        "logps/rejected": rejected_logprobs,
    }
