"""Pairwise losses of reward models: Bradley-Terry, and DeepSpeed-Chat's per-token loss.

Each is (P,) in nats, with gradient. Tensors that differ in shape are a ValueError.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from dschat_lora.algos.logprobs import sequence_sums
from dschat_lora.algos.tensors import check_pairs

SIDES = "the two sides of pairs"


def bradley_terry_loss(
    chosen_scores: Tensor,
    rejected_scores: Tensor,
    margins: Tensor | None = None,
    *,
    center_coefficient: float = 0.0,
) -> Tensor:
    """``-log sigmoid(s_c - s_r - m) + k (s_c + s_r)^2`` for each pair.

    The first term is the negative log-likelihood of the comparison under Bradley and Terry's
    model (eq. 1 of arXiv:2203.02155), the margin that of Llama 2 (eq. 2 of arXiv:2307.09288),
    the second term keeps scores around zero (arXiv:2312.09244).

    Scores are (P,), of the better and the worse answers, and ``margins`` m (P,), by how much the
    first should be above the second; ``center_coefficient`` is k >= 0.
    """
    check_pairs(SIDES, chosen_scores, rejected_scores)
    difference = chosen_scores - rejected_scores
    if margins is not None:
        check_pairs(SIDES, chosen_scores, margins)
        difference = difference - margins
    loss = -F.logsigmoid(difference)
    if center_coefficient:
        loss = loss + center_coefficient * (chosen_scores + rejected_scores) ** 2
    return loss


def per_token_loss(
    chosen_scores: Tensor, rejected_scores: Tensor, pair: Tensor, num_pairs: int
) -> Tensor:
    """``mean over t of -log sigmoid(s_c[t] - s_r[t])`` for each pair (DeepSpeed-Chat's loss).

    ``t`` runs from the first token at which the answers differ to the end of the shorter one.
    DeepSpeed-Chat goes on to the end of the longer one, comparing its tokens with padding; that
    part, which rewards length alone, is left out.

    Scores are (M,), at each compared token of the better answers and at the same steps of the
    worse ones; ``pair``, (M,) int64 in [0, P), is the pair that each token belongs to.
    """
    check_pairs(SIDES, chosen_scores, rejected_scores)
    losses = -F.logsigmoid(chosen_scores - rejected_scores)
    counts = sequence_sums(torch.ones_like(losses), pair, num_pairs)
    return sequence_sums(losses, pair, num_pairs) / counts.clamp(min=1)
