"""R-Drop (arXiv:2106.14448) and token cutoff: two passes over a batch that ought to agree."""

from collections.abc import Collection, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def with_second_pass(
    inputs: Mapping[str, Any], *, masking_prob: float, unknown: int, kept: Collection[int]
) -> dict[str, Any]:
    """The batch with each of its rows a second time, (2 B, ...); ``labels`` stay (B,).

    Of the second rows each token becomes ``unknown`` with probability ``masking_prob``, but for
    padding and the tokens ``kept``: that is token cutoff. Dropout tells the passes apart, too.
    """
    ids = inputs["input_ids"]
    doubled = {n: v if n == "labels" else torch.cat([v, v]) for n, v in inputs.items()}
    if masking_prob:
        masked = torch.rand(ids.shape, device=ids.device) < masking_prob
        masked &= inputs["attention_mask"].bool()
        for token in kept:
            masked &= ids != token
        doubled["input_ids"] = torch.cat([ids, ids.masked_fill(masked, unknown)])
    return doubled


def two_pass_loss(logits: Tensor, labels: Tensor, *, weight: float) -> Tensor:
    """The sum over rows of both passes' cross-entropies and of their divergence.

    ``CE_1 + CE_2 + weight / 2 * (D_1 + D_2)`` with ``D_i = KL(m || p_i) / classes`` and m the
    softmax of the passes' mean logits, as microsoft/LoRA's DeBERTa takes it.

    Args:
        logits: (2 B, classes), the second pass behind the first.
        labels: (B,) int64.
        weight: of the divergence, >= 0.
    """
    first, second = logits.float().chunk(2)
    mean = ((first + second) / 2).softmax(dim=-1)
    loss = logits.new_zeros((), dtype=torch.float32)
    for each in (first, second):
        divergence = F.kl_div(each.log_softmax(dim=-1), mean, reduction="sum") / logits.shape[1]
        loss = loss + F.cross_entropy(each, labels, reduction="sum") + 0.5 * weight * divergence
    return loss
