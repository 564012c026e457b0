"""KL estimators k1, k2 and k3, and the adaptive KL coefficient."""

import torch
from torch import Tensor

# Bound on the relative error in one update of the coefficient.
MAX_KL_ERROR = 0.2


def kl_k1(logprobs: Tensor, reference: Tensor) -> Tensor:
    """``log p - log q`` at each token: unbiased for KL(p || q) over tokens drawn from p.

    Single values may be negative (k1 of http://joschu.net/blog/kl-approx.html). ``logprobs`` are
    log p and ``reference`` log q of the same tokens, in nats, of any shape, which the result has.
    """
    return logprobs - reference


def kl_k2(logprobs: Tensor, reference: Tensor) -> Tensor:
    """``(log p - log q)^2 / 2`` at each token: KL(p || q) to second order, and never negative.

    k2 of http://joschu.net/blog/kl-approx.html. Its gradient ``(log p - log q) grad log p`` has
    over tokens drawn from p the mean of KL(p || q)'s; that of k3 has the mean of KL(q || p)'s, and
    that of k1 the mean 0. Arguments and result are as for :func:`kl_k1`.
    """
    return (logprobs - reference).square() / 2


def kl_k3(logprobs: Tensor, reference: Tensor) -> Tensor:
    """``q/p - 1 - log(q/p)`` at each token: unbiased for KL(p || q) like k1, and never negative.

    k3 of http://joschu.net/blog/kl-approx.html; arguments and result are as for :func:`kl_k1`.
    Where padding may hold infinities and the gradient counts, mask the inputs: 0 times infinity
    is NaN.
    """
    log_ratio = reference - logprobs
    return torch.expm1(log_ratio) - log_ratio


KL_ESTIMATORS = {"k1": kl_k1, "k2": kl_k2, "k3": kl_k3}


def adapted_kl_coef(
    kl_coef: float, *, kl: float, target: float, horizon: float, num_samples: int
) -> float:
    """The coefficient after a batch whose KL was ``kl``, moved towards the one that gives target.

    ``b (1 + K e)`` with ``e = clip((kl - target) / target, -0.2, 0.2)`` (section 2.2 of
    arXiv:1909.08593). The gain is ``K = num_samples / horizon``, as in the code released with
    that paper (openai/lm-human-preferences), so that it does not depend on the batch size.

    ``kl_coef`` is b, of the batch of ``num_samples`` responses; ``kl`` and ``target`` > 0 are in
    nats a response. Over ``horizon`` samples a coefficient may roughly change by ``MAX_KL_ERROR``.

    Raises:
        ValueError: if the horizon is so short that the coefficient could change its sign.
    """
    if MAX_KL_ERROR * num_samples >= horizon:
        raise ValueError(
            f"a KL horizon of {horizon} samples is too short for batches of {num_samples}: it "
            f"must exceed {MAX_KL_ERROR * num_samples}"
        )
    # A NaN passes both in this order of arguments.
    error = min(max((kl - target) / target, -MAX_KL_ERROR), MAX_KL_ERROR)
    return kl_coef * (1 + error * num_samples / horizon)
