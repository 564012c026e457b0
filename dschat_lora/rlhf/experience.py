"""Experience: responses with what every role thinks of them, and what the update makes of that."""

from collections.abc import Sequence
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
from dschat_lora.algos.kl import kl_k1
from dschat_lora.engine.distributed import gather_over_ranks
from dschat_lora.perf.throughput import StepCounts
from dschat_lora.rlhf.batch import Response, ResponseBatch
from dschat_lora.rlhf.config import PpoConfig
from dschat_lora.rlhf.engines import Engines


@dataclass(frozen=True)
class Experience:
    """An iteration's N responses of up to R tokens; every rank holds all of it.

    Tensors are fp32 on the engines' device, 0 where the mask is False.
    """

    responses: Sequence[Response]
    mask: Tensor  # (N, R) bool, True on tokens of responses that count
    ref_logprobs: Tensor  # (N, R) of the reference, in nats
    scores: Tensor  # (N,) as scored; NaN: does not count
    logprobs: Tensor | None  # (N, R) of the actor that sampled; None: not yet known
    values: (
        Tensor | None
    )  # (N, R) of the critic before it learns; None: not yet known, or no critic

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
    """What the update descends towards."""

    advantages: Tensor  # (N, R)
    returns: Tensor | None  # (N, R); None without a critic


@torch.no_grad()
def score_responses(
    engines: Engines, batches: Sequence[ResponseBatch], width: int, *, with_old: bool
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor]:
    """What the roles think of all ranks' responses, gathered; call on every rank.

    Args:
        engines: of the run.
        batches: of this rank, as many on every rank.
        width: R.
        with_old: ask actor and critic too.

    Returns:
        Reference log-probabilities (N, R), the actor's and the critic's (N, R) or None, and
        scores of the reward model (N,), 0 without one.
    """
    engines.eval()
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
        numbers = torch.tensor(batch.numbers, dtype=torch.float64, device=scores.device)
        rows.append(torch.cat([numbers[:, None], scores[:, None].double(), *parts], dim=1))
    # Numbers of responses are exact in fp64, fp32 values too.
    table = gather_over_ranks(torch.cat(rows))
    table = table[table[:, 0].argsort()].float()
    scores, tables = table[:, 1], list(torch.split(table[:, 2:], width, dim=1))
    ref_logprobs = tables.pop(0)
    logprobs = tables.pop(0) if with_old else None
    return ref_logprobs, logprobs, tables.pop(0) if tables else None, scores


def with_old(
    experience: Experience, numbers: Sequence[int], logprobs: Tensor, values: Tensor | None
) -> Experience:
    """The experience with what actor and critic thought of this rank's responses; on every rank.

    Args:
        experience: without.
        numbers: of this rank's responses.
        logprobs: (n, R) of them.
        values: (n, R) of them, or None without a critic.
    """
    width = experience.mask.shape[1]
    own = torch.tensor(list(numbers), dtype=torch.float64, device=logprobs.device)
    tables = [logprobs] if values is None else [logprobs, values]
    table = torch.cat([own[:, None], *(each.detach().double() for each in tables)], dim=1)
    table = gather_over_ranks(table)
    found = torch.split(table[table[:, 0].argsort()][:, 1:].float(), width, dim=1)
    return replace(experience, logprobs=found[0], values=None if values is None else found[1])


def targets(
    experience: Experience, scores: Tensor, config: PpoConfig, *, kl_coef: float
) -> AdvantagesAndReturns:
    """Advantages and returns of an iteration, without gradient.

    PPO takes the divergence from each token's reward, RLOO from the response's, GRPO leaves it
    to the loss.

    Args:
        experience: with log-probabilities, and with values for PPO.
        scores: (N,) as they are to teach.
        config: the algorithm's options.
        kl_coef: weight of the divergence now.
    """
    mask = experience.mask
    if config.algorithm == "ppo":
        assert experience.values is not None
        rewards = token_rewards(scores, experience.kl(), mask, kl_coef=kl_coef)
        advantages, returns = gae(
            rewards, experience.values, mask, gamma=config.gamma, lam=config.lam
        )
        if config.whiten_advantages:
            advantages = whiten(advantages, mask)
        return AdvantagesAndReturns(advantages, returns)
    counts = experience.counts
    groups = torch.tensor([each.group for each in experience.responses], device=mask.device)
    worth = scores
    if config.algorithm == "rloo":
        worth = scores - kl_coef * response_sums(experience.kl(), mask)
    compare = rloo_advantages if config.algorithm == "rloo" else grpo_advantages
    each = torch.zeros_like(scores)
    each[counts] = compare(worth[counts], groups[counts])
    return AdvantagesAndReturns(to_tokens(each, mask), None)


def step_counts(batches: Sequence[ResponseBatch]) -> StepCounts:
    """Sums over this rank's batches."""
    return sum((batch.counts for batch in batches), StepCounts())
