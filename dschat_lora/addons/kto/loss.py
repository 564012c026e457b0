"""Kahneman-Tversky optimisation (KTO): a loss of single answers that are good or bad."""

import torch
from torch import Tensor


def kto_loss(
    logratios: Tensor,
    labels: Tensor,
    kl: Tensor,
    *,
    beta: float,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> Tensor:
    """``w (1 - sigmoid(beta s (l - z)))`` of each answer (eq. 7 of arXiv:2402.01306).

    ``l = log pi(y|x) - log pi_ref(y|x)``, ``z`` is the divergence of the policy from the
    reference, and ``s`` is 1 for a desirable answer and -1 for an undesirable one.

    Args:
        logratios: (P,) in nats, summed over the tokens of each answer.
        labels: (P,) bool, True where the answer is desirable.
        kl: scalar >= 0 in nats; see :func:`clamped_kl`. It gets no gradient.
        beta: > 0, how strongly to stay with the reference.
        desirable_weight: ``w`` of desirable answers.
        undesirable_weight: ``w`` of undesirable ones.

    Returns:
        (P,) in [0, w], with gradient.

    Raises:
        ValueError: for unlike shapes.
    """
    if logratios.shape != labels.shape:
        raise ValueError(
            f"log-ratios have shape {tuple(logratios.shape)}, labels {tuple(labels.shape)}"
        )
    signs = torch.where(labels, 1.0, -1.0)
    weights = torch.where(labels, desirable_weight, undesirable_weight)
    # sigmoid(-x), for 1 - sigmoid(x) loses what is small
    return weights * torch.sigmoid(-beta * (signs * (logratios - kl.detach())))


def clamped_kl(total: Tensor, count: Tensor) -> Tensor:
    """``max(0, total / count)``: KTO's estimate of the divergence from the reference, in nats.

    ``total`` is the sum of ``log pi(y'|x) - log pi_ref(y'|x)`` over ``count`` prompts ``x``, each
    with an answer ``y'`` to another prompt (section 4 of arXiv:2402.01306): biased, but nothing
    has to be generated. Both are scalars; the result is one, without gradient.
    """
    return (total / count.clamp(min=1)).clamp(min=0).detach()
