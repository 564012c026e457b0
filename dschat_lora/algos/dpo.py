"""Direct preference optimisation (DPO): sigmoid, IPO and hinge losses."""

from typing import Literal

import torch.nn.functional as F
from torch import Tensor

from dschat_lora.algos.tensors import check_pairs


def dpo_loss(
    chosen_logratios: Tensor,
    rejected_logratios: Tensor,
    *,
    beta: float,
    loss_type: Literal["sigmoid", "ipo", "hinge"] = "sigmoid",
    label_smoothing: float = 0.0,
) -> Tensor:
    """Loss of each pair, from ``d = log-ratio chosen - log-ratio rejected``.

    A log-ratio is ``log pi(y|x) - log pi_ref(y|x)``.

    ====================  =======================================================================
    ``sigmoid``           ``-(1 - e) log sigmoid(beta d) - e log sigmoid(-beta d)`` (eq. 7 of
                          arXiv:2305.18290; with ``e > 0`` conservative DPO, its label noise)
    ``hinge``             ``max(0, 1 - beta d)`` (SLiC, arXiv:2309.06657)
    ``ipo``               ``(d - 1 / (2 beta))^2`` (eq. 17 of arXiv:2310.12036); its log-ratios
                          are means over tokens
    ====================  =======================================================================

    Log-ratios are (P,), of the better and the worse answers, in nats: sums over their tokens, or
    means where the loss is to be normalised by length. ``beta`` > 0 is how strongly to stay with
    the reference; ``label_smoothing`` e in [0, 0.5), the probability that a label is wrong. The
    result is (P,), with gradient.

    Raises:
        ValueError: for label smoothing with another loss, or unlike shapes.
    """
    check_pairs("log-ratios", chosen_logratios, rejected_logratios)
    if label_smoothing and loss_type != "sigmoid":
        raise ValueError(f"label smoothing is for the sigmoid loss, not {loss_type}")
    difference = chosen_logratios - rejected_logratios
    if loss_type == "ipo":
        return (difference - 1 / (2 * beta)) ** 2
    if loss_type == "hinge":
        return F.relu(1 - beta * difference)
    likely, unlikely = F.logsigmoid(beta * difference), F.logsigmoid(-beta * difference)
    return -(1 - label_smoothing) * likely - label_smoothing * unlikely
