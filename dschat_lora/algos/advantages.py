"""Rewards, advantages and returns: GAE, RLOO, GRPO and Dr. GRPO, whitening, running moments.

N responses are right-padded to R tokens; their mask is (N, R) bool, True on the tokens of the
response up to and including the end of sequence. Padding may hold anything, NaN included.
Tensors whose shapes do not fit are a ValueError.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

WHITEN_EPS = 1e-8
GRPO_EPS = 1e-4


@torch.no_grad()
def token_rewards(scores: Tensor, kl: Tensor, mask: Tensor, *, kl_coef: float) -> Tensor:
    """``-kl_coef * kl`` at each token, plus the score of the response at its last.

    Equation 2 of arXiv:2203.02155 without its pre-training term.

    Args:
        scores: (N,) of the responses.
        kl: (N, R) divergence from the reference at each token, in nats.
        mask: (N, R) bool, True on response tokens.
        kl_coef: weight of the divergence, >= 0.

    Returns:
        (N, R) without gradient, 0 where the mask is False; the score of a response without
        tokens counts nowhere.
    """
    check_same_shape(kl=kl, mask=mask)
    tokens_left = mask.flip(1).cumsum(1).flip(1)
    return torch.where(mask, -kl_coef * kl, 0) + to_tokens(scores, tokens_left == 1)


@torch.no_grad()
def gae(
    rewards: Tensor, values: Tensor, mask: Tensor, *, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimates and the returns they imply.

    ``A_t = sum over l of (gamma * lam)^l delta_{t+l}`` with
    ``delta_t = r_t + gamma * V_{t+1} - V_t`` (eq. 16 of arXiv:1506.02438). The value after the
    last token is 0: the episode ends there, whether by end of sequence or by length.

    Args:
        rewards: (N, R) reward of each response token, KL penalty included.
        values: (N, R) value estimate before each response token.
        mask: (N, R) bool, True on response tokens.
        gamma: discount factor in [0, 1].
        lam: bias/variance trade-off in [0, 1]; 1 gives Monte-Carlo returns.

    Returns:
        ``(advantages, returns)``, (N, R) each, returns being advantages plus values; without
        gradient, 0 where the mask is False. Advantages are not whitened.
    """
    check_same_shape(rewards=rewards, values=values, mask=mask)
    # Padding of zeros is what ends the episode: every delta after the last token is 0.
    rewards, values = torch.where(mask, rewards, 0), torch.where(mask, values, 0)
    advantages = rewards - values
    advantages[:, :-1] += gamma * values[:, 1:]
    # With sums over the next `reach` deltas in place, those over twice as many take one step.
    reach = 1
    while reach < mask.shape[1]:
        advantages[:, :-reach] += (gamma * lam) ** reach * advantages[:, reach:]
        reach *= 2
    return advantages, advantages + values


@torch.no_grad()
def whiten(values: Tensor, mask: Tensor) -> Tensor:
    """``(x - mean) / sqrt(variance + 1e-8)`` over the response tokens of all rows together.

    The variance is that of the population (divided by the number of tokens), as in ``whiten`` of
    openai/lm-human-preferences, the code of arXiv:1909.08593. Moments are taken in fp64, so that
    what fp32 rounds off a constant is not blown up. The result is (N, R) like the values, of their
    dtype, without gradient; 0 where the mask is False, and everywhere if the values do not vary.
    """
    check_same_shape(values=values, mask=mask)
    count = mask.sum().clamp(min=1)
    mean = torch.where(mask, values.double(), 0).sum() / count
    centred = torch.where(mask, values.double() - mean, 0)
    variance = centred.square().sum() / count
    return (centred * torch.rsqrt(variance + WHITEN_EPS)).to(values.dtype)


def response_sums(values: Tensor, mask: Tensor) -> Tensor:
    """(N,) sums of (N, R) values over the tokens of each response, with gradient; 0 for none."""
    check_same_shape(values=values, mask=mask)
    return torch.where(mask, values, 0).sum(1)


@torch.no_grad()
def rloo_advantages(rewards: Tensor, groups: Tensor) -> Tensor:
    """Reward of each response minus the mean of the others to its prompt.

    REINFORCE leave-one-out (arXiv:2402.14740): the others are a baseline that does not depend on
    the response itself, so the gradient stays unbiased.

    ``groups``, (N,) int64 in [0, 2 N), say which prompt each of the (N,) rewards responds to, in
    any order; groups need not be of one size. The result is (N,) without gradient, 0 for a
    response that is alone in its group.
    """
    check_same_shape(rewards=rewards, groups=groups)
    exact = rewards.double()
    totals, sizes = _of_groups(exact, groups)
    advantages = exact - (totals - exact) / (sizes - 1)
    return torch.where(sizes > 1, advantages, 0).to(rewards.dtype)


@torch.no_grad()
def grpo_advantages(rewards: Tensor, groups: Tensor) -> Tensor:
    """``(r - mean) / (std + 1e-4)`` within the responses to each prompt.

    Section 4.1.2 of arXiv:2402.03300. The paper leaves open which standard deviation; it is the
    one with Bessel's correction here, and it gets the 1e-4, as in TRL's GRPOTrainer. Arguments
    and result are as for :func:`rloo_advantages`.
    """
    check_same_shape(rewards=rewards, groups=groups)
    exact = rewards.double()
    totals, sizes = _of_groups(exact, groups)
    deviations = exact - totals / sizes
    squares, _ = _of_groups(deviations.square(), groups)
    advantages = deviations / ((squares / (sizes - 1)).sqrt() + GRPO_EPS)
    return torch.where(sizes > 1, advantages, 0).to(rewards.dtype)


@torch.no_grad()
def dr_grpo_advantages(rewards: Tensor, groups: Tensor) -> Tensor:
    """``r - mean`` within the responses to each prompt: section 3.2 of arXiv:2503.20783.

    The mean counts the response itself, and no deviation divides. Arguments and result are as for
    :func:`rloo_advantages`.
    """
    check_same_shape(rewards=rewards, groups=groups)
    exact = rewards.double()
    totals, sizes = _of_groups(exact, groups)
    return torch.where(sizes > 1, exact - totals / sizes, 0).to(rewards.dtype)


@torch.no_grad()
def discounted_returns(rewards: Tensor, mask: Tensor, *, gamma: float) -> Tensor:
    """``sum over l of gamma^l r_{t+l}``: what REINFORCE++ standardises (arXiv:2501.03262).

    ``rewards`` are (N, R) of each response token, KL penalty included; the result is (N, R)
    without gradient, 0 where the mask is False.
    """
    return gae(rewards, torch.zeros_like(rewards), mask, gamma=gamma, lam=1.0)[0]


def soft_overlong_punishment(lengths: Tensor, *, max_length: int, cache: int) -> Tensor:
    """0 for short responses, falling to -1 over the last ``cache`` of ``max_length`` tokens.

    Eq. 13 of arXiv:2503.14476: ``((max_length - cache) - length) / cache`` between 0 and -1.
    ``lengths`` are (N,) numbers of tokens; ``cache`` is at least 1; the result is (N,) fp64.
    """
    return ((max_length - cache - lengths).double() / cache).clamp(-1, 0)


def to_tokens(advantages: Tensor, mask: Tensor) -> Tensor:
    """(N, R) holding each row's one of (N,) advantages on its tokens, 0 elsewhere."""
    check_same_shape(advantages=advantages, responses=mask.any(1))
    return torch.where(mask, advantages[:, None], 0)


@torch.no_grad()
def explained_variance(values: Tensor, returns: Tensor, mask: Tensor) -> Tensor:
    """``1 - Var(returns - values) / Var(returns)`` over the response tokens of all rows.

    A scalar without gradient, at most 1: 1 for (N, R) values that predict the returns up to a
    constant, 0 for constant ones, negative for worse. 0 where the returns do not vary.
    """
    check_same_shape(values=values, returns=returns, mask=mask)
    errors, observed = (returns - values)[mask].double(), returns[mask].double()
    if not (observed != observed[:1]).any():
        return returns.new_zeros(())
    return (1 - errors.var(correction=0) / observed.var(correction=0)).to(returns.dtype)


@dataclass(frozen=True)
class RunningMoments:
    """Running mean and variance of all values so far, to scale scores by."""

    count: float = 0.0
    mean: float = 0.0
    m2: float = 0.0  # sum of squared distances from the mean

    def updated(self, values: Tensor) -> "RunningMoments":
        """Moments that include the values of a tensor of any shape.

        Pairwise update of Chan, Golub and LeVeque, "Updating formulae and a pairwise algorithm for
        computing sample variances", 1979.
        """
        if values.numel() == 0:
            return self
        exact = values.detach().double().flatten()
        # Distances from one of the values: those of equal values are exactly 0.
        offsets = exact - exact[0]
        shift = float(exact[0] + offsets.mean()) - self.mean
        count = self.count + offsets.numel()
        weight = offsets.numel() / count
        within = float((offsets - offsets.mean()).square().sum())
        return RunningMoments(
            count=count,
            mean=self.mean + shift * weight,
            m2=self.m2 + within + shift**2 * self.count * weight,
        )

    @property
    def std(self) -> float:
        """Standard deviation with Bessel's correction; 1 until two values differ."""
        return (self.m2 / (self.count - 1)) ** 0.5 if self.m2 else 1.0


def check_same_shape(**tensors: Tensor) -> None:
    """Raise a ValueError for tensors of different shapes, which would broadcast silently."""
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if len(set(shapes.values())) > 1:
        shown = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
        raise ValueError(f"shapes differ: {shown}")


def _of_groups(values: Tensor, groups: Tensor) -> tuple[Tensor, Tensor]:
    """Sum and size of each value's group, (N,) each."""
    # Not by unique(), for which a GPU's host waits.
    counted = torch.stack([values, torch.ones_like(values)], dim=1)
    sums = values.new_zeros(2 * len(groups), 2).index_add(0, groups, counted)[groups]
    return sums[:, 0], sums[:, 1]
