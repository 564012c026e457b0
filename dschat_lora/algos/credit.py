"""Credit assignment: estimators of advantages, each from the outcome of an iteration's responses.

An estimator takes an :class:`Outcome`. It gives advantages, (N,) of responses or (N, R) of their
tokens, or a pair of (N, R) advantages and returns for a critic; without gradient.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from dschat_lora.algos.advantages import (
    discounted_returns,
    dr_grpo_advantages,
    gae,
    grpo_advantages,
    response_sums,
    rloo_advantages,
    to_tokens,
    token_rewards,
    whiten,
)
from dschat_lora.algos.kl import KL_ESTIMATORS


@dataclass(frozen=True)
class Outcome:
    """What an iteration's N responses of up to R tokens were worth, to the estimators."""

    rewards: Mapping[str, Tensor]  # (N,) by what scored, unweighted; NaN: it gave no score
    weights: Mapping[str, float]  # of the rewards that are summed
    shaped: Tensor  # (N,) the weighted sum, scaled, clipped and punished; 0 where none counts
    groups: Tensor  # (N,) int64 in [0, 2 N), the prompt; a response that does not count is alone
    counts: Tensor  # (N,) bool, whether the response counts
    mask: Tensor  # (N, R) bool, True on tokens of responses that count
    options: Any  # of the run, such as options.gamma
    kl_coef: float  # weight of the divergence from the reference in the reward; 0: it is not there
    values: Tensor | None  # (N, R) of the critic, if there is one
    logprobs: Tensor | None  # (N, R) old ones of the policy; None: not known yet
    ref_logprobs: Tensor  # (N, R) of the reference

    @cached_property
    def kl(self) -> Tensor:
        """(N, R) estimates by ``options.kl_estimator`` of the divergence from the reference.

        Raises:
            ValueError: where old log-probabilities are not known before the update begins.
        """
        return self.divergence(self.options.kl_estimator)

    @property
    def kl_of_responses(self) -> Tensor:
        """(N,) sums of ``kl`` over the tokens of each response."""
        return response_sums(self.kl, self.mask)

    @property
    def total(self) -> Tensor:
        """(N,) ``shaped``, less the divergence of the response where the reward pays for it."""
        if self.options.kl_in != "reward":
            return self.shaped
        return self.shaped - self.kl_coef * self.kl_of_responses

    def divergence(self, estimator: str) -> Tensor:
        """(N, R) estimates of the divergence, 0 where the mask is False; see ``kl``."""
        if self.logprobs is None:
            raise ValueError(
                "the divergence needs old log-probabilities before the update, which the "
                'algorithm must declare: Algorithm(..., needs={"old_logprobs"})'
            )
        estimates = KL_ESTIMATORS[estimator](self.logprobs, self.ref_logprobs)
        return torch.where(self.mask, estimates, 0)


def sums_differ(total: Sequence[float], rewards: Mapping[str, Sequence[float]]) -> bool:
    """Whether two responses to a prompt have different scores (section 3.2 of arXiv:2503.14476)."""
    return len(set(total)) > 1


def ppo(outcome: Outcome) -> tuple[Tensor, Tensor]:
    """:func:`gae` of :func:`token_rewards`, whitened, and its returns."""
    mask, options = outcome.mask, outcome.options
    rewards = token_rewards(outcome.shaped, outcome.kl, mask, kl_coef=outcome.kl_coef)
    assert outcome.values is not None
    advantages, returns = gae(rewards, outcome.values, mask, gamma=options.gamma, lam=options.lam)
    return whiten(advantages, mask) if options.whiten_advantages else advantages, returns


def reinforce_pp(outcome: Outcome) -> Tensor:
    """:func:`discounted_returns` of PPO's rewards of tokens, whitened."""
    mask = outcome.mask
    rewards = token_rewards(outcome.shaped, outcome.kl, mask, kl_coef=outcome.kl_coef)
    return whiten(discounted_returns(rewards, mask, gamma=outcome.options.gamma), mask)


def reinforce_pp_baseline(outcome: Outcome) -> Tensor:
    """:func:`dr_grpo_advantages` at each token, whitened."""
    compared = dr_grpo_advantages(outcome.total, outcome.groups)
    return whiten(to_tokens(compared, outcome.mask), outcome.mask)


def rloo(outcome: Outcome) -> Tensor:
    return rloo_advantages(outcome.total, outcome.groups)


def grpo(outcome: Outcome) -> Tensor:
    return grpo_advantages(outcome.total, outcome.groups)


def dr_grpo(outcome: Outcome) -> Tensor:
    return dr_grpo_advantages(outcome.total, outcome.groups)
