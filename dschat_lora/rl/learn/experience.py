"""Experience: responses with log-probabilities, values and scores, and their advantages."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dschat_lora.algos.advantages import to_tokens
from dschat_lora.algos.credit import Outcome
from dschat_lora.algos.kl import kl_k1
from dschat_lora.algos.segments import to_device
from dschat_lora.engine.build import StepOutcome
from dschat_lora.rl.options.algorithms import Algorithm, PpoConfig, RolloutCorrection, is_users
from dschat_lora.rl.response.batch import Batching, Minibatch, ResponseBatch, gather_numbered
from dschat_lora.rl.response.response import Response

if TYPE_CHECKING:
    from dschat_lora.algos.importance import Mismatch


@dataclass(frozen=True)
class Experience:
    """An iteration's N responses of up to R tokens; every rank holds all of it.

    Tensors are fp32 on the engines' device, 0 where the mask is False. "Old" log-probabilities
    and values are those before the first optimizer step; NaN where they are not computed yet.
    """

    responses: Sequence[Response]
    mask: Tensor  # (N, R) bool, True on tokens of responses that count
    ref_logprobs: Tensor  # (N, R) of the reference, in nats
    scores: Tensor  # (N,) unscaled; NaN: the response does not count
    logprobs: Tensor | None  # (N, R) old ones of the actor; None: not computed yet
    values: Tensor | None  # (N, R) old ones of the critic; None: not computed yet, or no critic
    rewards: Mapping[str, Tensor] = field(default_factory=dict)  # (N,) by what scored, unweighted
    weights: Mapping[str, float] = field(default_factory=dict)  # of those in the scores
    logged_metrics: Mapping[str, float] = field(default_factory=dict)  # by reward functions
    logged_columns: Mapping[str, list[Any]] = field(default_factory=dict)  # N entries each, too
    # gives the (N,) scores once log-probabilities are known; None: they are
    scores_once_known: "Callable[[Experience], Tensor] | None" = None

    @property
    def counts(self) -> Tensor:
        """(N,) bool, whether the response counts."""
        return ~self.scores.isnan()

    @property
    def ended(self) -> Tensor:
        """(N,) bool, whether the response ended by itself."""
        return to_device(torch.tensor([r.ended for r in self.responses]), self.scores.device)

    @property
    def groups(self) -> Tensor:
        """(N,) int64 of the prompt responded to; a response that does not count is alone."""
        groups = to_device(torch.tensor([r.group for r in self.responses]), self.scores.device)
        alone = len(groups) + torch.arange(len(groups), device=groups.device)
        return torch.where(self.counts, groups, alone)

    def kl(self, estimate: Callable[[Tensor, Tensor], Tensor] = kl_k1) -> Tensor:
        """(N, R) divergence of the actor from the reference at each token, in nats."""
        assert self.logprobs is not None
        return torch.where(self.mask, estimate(self.logprobs, self.ref_logprobs), 0)

    def scored(self) -> "Experience":
        """With scores that log-probabilities are needed for."""
        if self.scores_once_known is None or self.logprobs is None:
            return self
        scores = self.scores_once_known(self).masked_fill(~self.counts, torch.nan)
        return replace(self, scores=scores)

    def table(self, rows: Iterable[Sequence[float]]) -> Tensor:
        """(N, R) of a number for each token of the responses, 0 in the padding."""
        dtype = torch.float32 if self.logprobs is None else self.logprobs.dtype
        return padded(rows, self.mask, dtype)

    def importance(self, correction: RolloutCorrection) -> Tensor:
        """(N, R) :func:`importance_weights` of the old policy to what tokens were drawn from."""
        from dschat_lora.algos.importance import importance_weights

        assert self.logprobs is not None
        return importance_weights(self.logprobs, self._drawn(), self.mask, **vars(correction))

    def mismatch(self, correction: RolloutCorrection | None) -> "Mismatch":
        """:func:`sampler_mismatch` of the old policy and what tokens were drawn from."""
        from dschat_lora.algos.importance import sampler_mismatch

        assert self.logprobs is not None
        level = "token" if correction is None else correction.level
        return sampler_mismatch(self.logprobs, self._drawn(), self.mask, level=level)

    def _drawn(self) -> Tensor:
        """(N, R) log-probabilities of what was drawn from; where nobody knows them the policy's."""
        assert self.logprobs is not None
        table = self.table(response.sampler_logprobs for response in self.responses)
        drawn = torch.tensor([response.origin.is_drawn for response in self.responses])
        known = to_device(drawn, table.device)[:, None] & ~table.isnan()
        return torch.where(known, table, self.logprobs)


def padded(
    rows: Iterable[Sequence[float]], mask: Tensor, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Rows in a table of the mask's shape and device, 0 in the padding."""
    table = torch.zeros(mask.shape, dtype=dtype)
    for row, values in enumerate(rows):
        table[row, : len(values)] = torch.tensor(values, dtype=dtype)
    return to_device(table, mask.device)


def idle_groups(
    algorithm: Algorithm,
    groups: Sequence[int],
    total: Tensor,
    rewards: Mapping[str, Tensor],
    weights: Mapping[str, float],
) -> list[int]:
    """Groups of responses that teach the algorithm nothing, in ascending order.

    ``groups`` say which prompt each of the N responses belongs to. ``total`` are their (N,) scores,
    NaN for those that do not count, and ``rewards`` those by name, of which some have ``weights``.
    """
    columns = [total, *(weight * rewards[name] for name, weight in weights.items())]
    scores, *named = torch.stack(columns).tolist()  # read at once
    rows: dict[int, list[int]] = {group: [] for group in sorted(groups)}
    for row, group in enumerate(groups):
        if not math.isnan(scores[row]):
            rows[group].append(row)

    def teaches(own: list[int]) -> bool:
        by_name = {name: [c[row] for row in own] for name, c in zip(weights, named, strict=True)}
        return algorithm.teaches([scores[row] for row in own], by_name)

    return [group for group, own in rows.items() if not teaches(own)]


@dataclass(frozen=True)
class AdvantagesAndReturns:
    """Advantages for the policy loss and returns for the value loss."""

    advantages: Tensor  # (N, R)
    returns: Tensor | None  # (N, R); None without a critic


@dataclass(frozen=True)
class Steps:
    """The optimizer steps on an iteration's responses, and where old outputs come from."""

    minibatches: Sequence[Minibatch]  # of all passes
    make_batch: Callable[[Sequence[int]], ResponseBatch]  # from numbers of responses
    first_batches: Sequence[ResponseBatch] = ()  # those of the first pass that are made
    deferred: int = 0  # how many of those, from the first on, have old outputs of the update's
    from_sampler: bool = False  # old log-probabilities are the decode loop's
    per_pass: int = 1  # minibatches
    # of responses, by role, with a forward pass before the update
    shares_before: Mapping[str, float] = field(default_factory=dict)


def plan_steps(
    config: PpoConfig,
    batching: Batching,
    responses: Sequence[Response],
    *,
    rows_per_step: int,
    iteration: int,
) -> Steps:
    """The steps of ``config.ppo_epochs`` passes over the responses, in a random order."""
    minibatches = batching.minibatches(
        responses, rows_per_step=rows_per_step, iteration=iteration, passes=config.ppo_epochs
    )
    first_pass = minibatches[: len(minibatches) // config.ppo_epochs]
    make_batch = batching.collator(responses)
    deferred = count_deferred(config, minibatches)
    from_sampler = config.use_rollout_logprobs and not deferred
    left = 1 - bool(deferred) * len(minibatches[0].numbers) / len(responses)
    return Steps(
        minibatches,
        make_batch,
        [make_batch(rows) for each in first_pass for rows in each.micro_batches],
        deferred,
        from_sampler,
        len(first_pass),
        {"actor": left * (not from_sampler), "critic": left},
    )


def count_deferred(config: PpoConfig, minibatches: Sequence[Minibatch]) -> int:
    """How many batches, from the first on, have old outputs of the update's own forward passes.

    Those of the first minibatch do, or of a single batch where its loss needs all old outputs.
    """
    first = minibatches[0].micro_batches
    if config.weighs_by_policy or config.use_rollout_logprobs:
        return int(len(minibatches) == len(first) == 1)
    return len(first)


@dataclass(frozen=True)
class StepResult:
    """One optimizer step of actor and critic; figures are means over its tokens, of all ranks."""

    loss: float  # the actor's, as ``loss_normalization`` divides it
    policy_loss: float  # likewise, without the KL penalty that may be in it
    value_loss: float | None
    text_loss: float | None  # of pretraining text, nats per token
    entropy: float  # nats per token
    clip_fraction: float
    value_clip_fraction: float | None
    approx_kl: float  # policy that sampled to policy before this step, nats per token
    ratio_error: float | None  # largest |ratio - 1| at an iteration's first step, else None
    outcomes: dict[str, StepOutcome]  # by role
    learning_rates: dict[str, dict[str, float]]  # by role and parameter group
    num_tokens: int  # response tokens

    @property
    def skipped(self) -> bool:
        """Whether a role's gradient was not finite, so that its weights did not change."""
        return any(outcome.skipped for outcome in self.outcomes.values())


def add_old_outputs(
    experience: Experience, numbers: Sequence[int], logprobs: Tensor, values: Tensor | None
) -> Experience:
    """The experience completed by old log-probabilities and values; call on every rank.

    ``logprobs`` and ``values``, (n, R), are of this rank's n responses with these ``numbers``.
    """
    rows = logprobs if values is None else torch.cat([logprobs, values], dim=1)
    gathered = gather_numbered(numbers, rows)
    places = gathered[:, 0].long()
    tables = torch.split(gathered[:, 1:].float(), experience.mask.shape[1], dim=1)
    known = experience.logprobs
    if known is None:
        known = torch.full(experience.mask.shape, torch.nan, device=places.device)
    return replace(
        experience,
        logprobs=known.index_copy(0, places, tables[0]),
        values=None if values is None else torch.empty_like(known).index_copy(0, places, tables[1]),
    )


def advantages_and_returns(
    experience: Experience, rewards: Tensor, config: PpoConfig, *, kl_coef: float
) -> AdvantagesAndReturns:
    """Advantages and returns of an iteration, by the estimator of the algorithm.

    Old log-probabilities are there where ``config.weighs_by_policy``, values where there is a
    critic. ``rewards`` are (N,) shaped scores, 0 for responses that do not count.

    Raises:
        ValueError: if an estimator of the user's gives something else than advantages.
    """
    mask, by_name = experience.mask, experience.rewards or {"reward_model": experience.scores}
    outcome = Outcome(
        # An estimator of the user's may write to them.
        rewards={name: scores.clone() for name, scores in by_name.items()},
        weights=experience.weights or dict.fromkeys(by_name, 1.0),
        shaped=rewards,
        groups=experience.groups,
        counts=experience.counts,
        mask=mask,
        options=config,
        kl_coef=kl_coef if config.kl_in == "reward" else 0.0,
        values=experience.values,
        logprobs=experience.logprobs,
        ref_logprobs=experience.ref_logprobs,
    )
    where = f"--algorithm {config.algorithm}"
    try:
        estimated = config.rules.estimate(outcome)
    except Exception as error:
        raise RuntimeError(f"{where} failed: {error!r}") from error
    advantages, returns = estimated if isinstance(estimated, tuple) else (estimated, None)
    if not isinstance(advantages, Tensor) or advantages.shape not in (mask.shape, mask.shape[:1]):
        is_tensor = isinstance(estimated, Tensor)
        kind = tuple(estimated.shape) if is_tensor else type(estimated).__name__
        raise ValueError(
            f"{where} must return advantages of shape {tuple(mask.shape[:1])} (per response) or "
            f"{tuple(mask.shape)} (per token), got {kind}"
        )
    if (returns is None) == config.rules.has_critic:
        needs = "returns as well, for its critic" if returns is None else "no returns without one"
        raise ValueError(f'{where} must return {needs} (an algorithm with a critic needs "values")')
    advantages = advantages.detach().to(mask.device, rewards.dtype)
    if advantages.dim() == 1:
        advantages = to_tokens(advantages, mask)
    if is_users(config.algorithm) and not bool(advantages[mask].isfinite().all()):
        raise ValueError(f"{where} returned advantages that are not finite")
    return AdvantagesAndReturns(advantages, returns)
