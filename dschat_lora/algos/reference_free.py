"""Preference losses without a reference model: ORPO's odds ratio and SimPO."""

import torch
import torch.nn.functional as F
from torch import Tensor

from dschat_lora.algos.tensors import check_pairs


def odds_ratio_loss(chosen_logprobs: Tensor, rejected_logprobs: Tensor) -> tuple[Tensor, Tensor]:
    """ORPO's loss of each pair, and the log of the odds ratio that it is of.

    ``-log sigmoid(o)`` with ``o = log(odds(y_w|x) / odds(y_l|x))`` (eq. 7 of arXiv:2403.07691),
    ``odds(y|x) = P(y|x) / (1 - P(y|x))`` (eq. 4) and ``log P(y|x)`` the mean over the tokens of
    ``y`` (eq. 3). ORPO adds a weight times this to the chosen answers' cross-entropy.

    Log-probabilities are (P,) means over tokens, of the better and the worse answers, in nats, at
    most 0. Both results are (P,), with gradient; it is 0 for an answer that is certain.

    Raises:
        ValueError: for unlike shapes.
    """
    check_pairs("log-probabilities", chosen_logprobs, rejected_logprobs)
    log_odds = _log_odds(chosen_logprobs) - _log_odds(rejected_logprobs)
    return -F.logsigmoid(log_odds), log_odds


def simpo_loss(
    chosen_logprobs: Tensor,
    rejected_logprobs: Tensor,
    *,
    beta: float,
    gamma: float,
    label_smoothing: float = 0.0,
) -> Tensor:
    """``-(1 - e) log sigmoid(m) - e log sigmoid(-m)`` with ``m = beta (l_w - l_l) - gamma``.

    ``l`` is the mean log-probability of an answer's tokens (eq. 6 of arXiv:2405.14734; ``e`` is
    not in the paper, but in its code).

    Args:
        chosen_logprobs: (P,) means over tokens of the better answers, in nats.
        rejected_logprobs: (P,) of the worse ones.
        beta: > 0, scale of the rewards ``beta l``.
        gamma: >= 0, by how much the better answer's reward is to be the larger one.
        label_smoothing: e in [0, 0.5), the probability that a label is wrong.

    Returns:
        (P,), with gradient.

    Raises:
        ValueError: for unlike shapes.
    """
    check_pairs("log-probabilities", chosen_logprobs, rejected_logprobs)
    lead = beta * (chosen_logprobs - rejected_logprobs) - gamma
    return -(1 - label_smoothing) * F.logsigmoid(lead) - label_smoothing * F.logsigmoid(-lead)


def _log_odds(logprobs: Tensor) -> Tensor:
    """``log(p / (1 - p))`` of probabilities ``p = exp(logprobs)``."""
    # The odds of a certain answer are infinite, and so would be their gradient.
    logprobs = logprobs.clamp(max=-torch.finfo(logprobs.dtype).eps)
    return logprobs - torch.log(-torch.expm1(logprobs))
