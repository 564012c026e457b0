"""Experience: responses with log-probabilities, values and scores, and their advantages."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dschat_lora.algos.advantages import (
    gae,
    grpo_advantages,
    response_sums,
    rloo_advantages,
    to_tokens,
    token_rewards,
    whiten,
)
from dschat_lora.algos.devices import to_device
from dschat_lora.algos.kl import kl_k1
from dschat_lora.engine.collectives import gather_over_ranks
from dschat_lora.rlhf.batch import Response, ResponseBatch, response_mask
from dschat_lora.rlhf.config import PpoConfig
from dschat_lora.rlhf.engines import Engines


@dataclass(frozen=True)
class Experience:
    """An iteration's N responses of up to R tokens; every rank holds all of it.

    Tensors are fp32 on the engines' device, 0 where the mask is False. "Old" log-probabilities
    and values are those before the first optimizer step.
    """

    responses: Sequence[Response]
    mask: Tensor  # (N, R) bool, True on tokens of responses that count
    ref_logprobs: Tensor  # (N, R) of the reference, in nats
    scores: Tensor  # (N,) unscaled; NaN: the response does not count
    logprobs: Tensor | None  # (N, R) old ones of the actor; None: not computed yet
    values: Tensor | None  # (N, R) old ones of the critic; None: not computed yet, or no critic

    @property
    def counts(self) -> Tensor:
        """(N,) bool, whether the response counts."""
        return ~self.scores.isnan()

    def kl(self) -> Tensor:
        """(N, R) log-ratio of actor to reference at each token (k1), in nats."""
        assert self.logprobs is not None
        return torch.where(self.mask, kl_k1(self.logprobs, self.ref_logprobs), 0)


@dataclass(frozen=True)
class AdvantagesAndReturns:
    """Advantages for the policy loss and returns for the value loss."""

    advantages: Tensor  # (N, R)
    returns: Tensor | None  # (N, R); None without a critic


def score_responses(
    engines: Engines,
    responses: Sequence[Response],
    batches: Sequence[ResponseBatch],
    *,
    reward_function: Callable[[Sequence[Response], torch.device], Tensor] | None,
    with_old: bool,
) -> Experience:
    """The experience of all ranks' responses; call on every rank, with as many batches on each.

    The scores of ``reward_function``, (N,), are added to those of the reward model. ``with_old``
    computes old log-probabilities and values too.
    """
    engines.eval()
    device = engines.actor.device
    mask = response_mask(responses, device)
    table = _outputs(engines, batches, mask.shape[1], with_old=with_old)
    scores, tables = table[:, 0], list(torch.split(table[:, 1:], mask.shape[1], dim=1))
    if reward_function is not None:
        scores = scores + reward_function(responses, device)
    return Experience(
        responses,
        mask & ~scores.isnan()[:, None],
        ref_logprobs=tables.pop(0),
        scores=scores,
        logprobs=tables.pop(0) if with_old else None,
        values=tables.pop(0) if tables else None,
    )


@torch.no_grad()
def _outputs(
    engines: Engines, batches: Sequence[ResponseBatch], width: int, *, with_old: bool
) -> Tensor:
    """(N, 1 + k R) score, reference log-probabilities and, with_old, the actor's and critic's."""
    rows = []
    for batch in batches:
        batch = batch.to(engines.actor.device)
        parts = [engines.reference(batch, width)]
        if with_old:
            parts.append(engines.policy(batch, width)[0])
            if engines.critic is not None:
                parts.append(engines.values(batch, width))
        scores = parts[0].new_zeros(len(batch.numbers))
        if engines.reward is not None:
            scores = engines.scores(batch)
        rows.append(torch.cat([scores[:, None], *parts], dim=1))
    return _gather_rows([n for batch in batches for n in batch.numbers], torch.cat(rows))


def _gather_rows(numbers: Sequence[int], rows: Tensor) -> Tensor:
    """(N, C) fp32 rows of all ranks in the order of their numbers; call on every rank."""
    # Numbers of responses are exact in fp64, fp32 values too.
    own = to_device(torch.tensor(numbers, dtype=torch.float64), rows.device)
    table = gather_over_ranks(torch.cat([own[:, None], rows.detach().double()], dim=1))
    return table[table[:, 0].argsort()][:, 1:].float()


def add_old_outputs(
    experience: Experience, numbers: Sequence[int], logprobs: Tensor, values: Tensor | None
) -> Experience:
    """The experience completed by old log-probabilities and values; call on every rank.

    ``logprobs`` and ``values``, (n, R), are of this rank's n responses with these ``numbers``.
    """
    rows = logprobs if values is None else torch.cat([logprobs, values], dim=1)
    tables = torch.split(_gather_rows(numbers, rows), experience.mask.shape[1], dim=1)
    return replace(experience, logprobs=tables[0], values=None if values is None else tables[1])


def advantages_and_returns(
    experience: Experience, rewards: Tensor, config: PpoConfig, *, kl_coef: float
) -> AdvantagesAndReturns:
    """Advantages and returns of an iteration, without gradient.

    PPO takes the KL penalty from each token's reward, RLOO from the response's, GRPO leaves it
    to the loss. The experience has old log-probabilities, and values for PPO. ``rewards`` are
    (N,) shaped scores, 0 for responses that do not count.
    """
    mask = experience.mask
    if config.algorithm == "ppo":
        assert experience.values is not None
        per_token = token_rewards(rewards, experience.kl(), mask, kl_coef=kl_coef)
        advantages, returns = gae(
            per_token, experience.values, mask, gamma=config.gamma, lam=config.lam
        )
        if config.whiten_advantages:
            advantages = whiten(advantages, mask)
        return AdvantagesAndReturns(advantages, returns)
    groups = to_device(torch.tensor([each.group for each in experience.responses]), mask.device)
    # A response that does not count is alone in a group of its own, and so has no advantage.
    alone = len(groups) + torch.arange(len(groups), device=mask.device)
    groups = torch.where(experience.counts, groups, alone)
    estimate = grpo_advantages
    if config.algorithm == "rloo":
        estimate = rloo_advantages
        rewards = rewards - kl_coef * response_sums(experience.kl(), mask)
    return AdvantagesAndReturns(to_tokens(estimate(rewards, groups), mask), None)
