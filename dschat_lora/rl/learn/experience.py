"""Experience: responses with log-probabilities, values and scores, and their advantages."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
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
from dschat_lora.algos.importance import Mismatch, importance_weights, sampler_mismatch
from dschat_lora.algos.kl import KL_ESTIMATORS, kl_k1
from dschat_lora.algos.segments import to_device
from dschat_lora.engine.distributed import gather_over_ranks
from dschat_lora.rl.learn.engines import Engines
from dschat_lora.rl.options.algorithms import PpoConfig, RolloutCorrection
from dschat_lora.rl.response.batch import ResponseBatch, response_mask
from dschat_lora.rl.response.errors import UserFunctionError
from dschat_lora.rl.response.response import Response
from dschat_lora.rl.score.reward_functions import RewardFunctions, shortened
from dschat_lora.rl.score.user_functions import TrainerState


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
    logged_metrics: Mapping[str, float] = field(default_factory=dict)  # by reward functions
    logged_columns: Mapping[str, list[Any]] = field(default_factory=dict)  # N entries each, too

    @property
    def counts(self) -> Tensor:
        """(N,) bool, whether the response counts."""
        return ~self.scores.isnan()

    @property
    def ended(self) -> Tensor:
        """(N,) bool, whether the response ended by itself."""
        ended = torch.tensor([each.ended for each in self.responses])
        return to_device(ended, self.scores.device)

    @property
    def groups(self) -> Tensor:
        """(N,) int64 of the prompt responded to; a response that does not count is alone."""
        groups = torch.tensor([each.group for each in self.responses])
        groups = to_device(groups, self.scores.device)
        alone = len(groups) + torch.arange(len(groups), device=groups.device)
        return torch.where(self.counts, groups, alone)

    def kl(self, estimate: Callable[[Tensor, Tensor], Tensor] = kl_k1) -> Tensor:
        """(N, R) divergence of the actor from the reference at each token, in nats."""
        assert self.logprobs is not None
        return torch.where(self.mask, estimate(self.logprobs, self.ref_logprobs), 0)

    def scored_by_reference(self) -> "Experience":
        """With minus the divergence from the reference, in nats a response, for the scores."""
        return replace(self, scores=-response_sums(self.kl(), self.mask))

    def table(self, rows: Iterable[Sequence[float]]) -> Tensor:
        """(N, R) of a number for each token of the responses, 0 in the padding."""
        dtype = torch.float32 if self.logprobs is None else self.logprobs.dtype
        return padded(rows, self.mask, dtype)

    def importance(self, correction: RolloutCorrection) -> Tensor:
        """(N, R) :func:`importance_weights` of the old policy to what tokens were drawn from."""
        assert self.logprobs is not None
        return importance_weights(self.logprobs, self._drawn(), self.mask, **vars(correction))

    def mismatch(self, correction: RolloutCorrection | None) -> Mismatch:
        """:func:`sampler_mismatch` of the old policy and what tokens were drawn from."""
        assert self.logprobs is not None
        level = "token" if correction is None else correction.level
        return sampler_mismatch(self.logprobs, self._drawn(), self.mask, level=level)

    def _drawn(self) -> Tensor:
        """(N, R) log-probabilities of what was drawn from; of the data's answers the policy's."""
        assert self.logprobs is not None
        table = self.table(response.sampler_logprobs for response in self.responses)
        drawn = torch.tensor([response.origin.is_drawn for response in self.responses])
        return torch.where(to_device(drawn, table.device)[:, None], table, self.logprobs)


def padded(
    rows: Iterable[Sequence[float]], mask: Tensor, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Rows in a table of the mask's shape and device, 0 in the padding."""
    found = torch.zeros(mask.shape, dtype=dtype)
    for row, values in enumerate(rows):
        found[row, : len(values)] = torch.tensor(values, dtype=dtype)
    return to_device(found, mask.device)


@dataclass(frozen=True)
class AdvantagesAndReturns:
    """Advantages for the policy loss and returns for the value loss."""

    advantages: Tensor  # (N, R)
    returns: Tensor | None  # (N, R); None without a critic


@dataclass(frozen=True)
class Scores:
    """Scores of N responses, on every rank."""

    total: Tensor  # (N,); NaN: the response does not count
    by_name: Mapping[str, Tensor]  # (N,) of each function, and of the reward model beside them
    metrics: Mapping[str, float] = field(default_factory=dict)  # that functions logged
    columns: Mapping[str, list[Any]] = field(default_factory=dict)  # N entries, logged as well


def score_responses(
    engines: Engines,
    responses: Sequence[Response],
    batches: Sequence[ResponseBatch],
    *,
    scorer: RewardFunctions | None,
    deferred: int = 0,
    from_sampler: bool = False,
    known: Scores | None = None,
    state: TrainerState | None = None,
) -> Experience:
    """The experience of all ranks' responses; call on every rank, with as many batches on each.

    The scores of ``scorer`` are added to those of the reward model, unless they are ``known``.
    Old log-probabilities and values of the first ``deferred`` batches are left to the update.
    ``from_sampler`` takes those log-probabilities from the decode loop, without a forward pass.
    """
    engines.eval()
    mask = response_mask(responses, engines.actor.device)
    with_old = deferred < len(batches)
    wait = None if engines.teacher is None else engines.teacher.begin(responses)
    table = _outputs(
        engines,
        batches,
        mask.shape[1],
        deferred=deferred,
        from_sampler=from_sampler,
        with_scores=known is None,
    )
    scores, tables = table[:, 0], list(torch.split(table[:, 1:], mask.shape[1], dim=1))
    if known is None:
        known = _added(engines, responses, scorer, scores, state)
    ref_logprobs = tables.pop(0) if wait is None else padded(wait(), mask)
    logprobs = None
    if with_old:
        drawn = (response.logprobs for response in responses)
        logprobs = padded(drawn, mask) if from_sampler else tables.pop(0)
    return Experience(
        responses,
        mask & ~known.total.isnan()[:, None],
        ref_logprobs=ref_logprobs,
        scores=known.total,
        logprobs=logprobs,
        values=tables.pop(0) if tables else None,
        rewards=known.by_name,
        logged_metrics=known.metrics,
        logged_columns=known.columns,
    )


class ScoreError(UserFunctionError):
    """A score is no number; the cause says which one. Raised on every rank."""

    what = "a score"


def check_scores(experience: Experience, decode: Callable[[Sequence[int]], str]) -> None:
    """Refuse scores of a reward model that are not finite, and sums that fp32 does not hold.

    A NaN of another origin is a function's None, or of a response that could not be drawn. Call on
    every rank.

    Raises:
        ScoreError: whose cause names the first response with such a score.
    """
    total, rewards = experience.scores, experience.rewards
    model = rewards.get("reward_model", torch.zeros_like(total) if rewards else total)
    scores = torch.stack([model, total], dim=1).tolist()  # read at once
    for response, (own, added) in zip(experience.responses, scores, strict=True):
        if response.is_left_out or (math.isfinite(own) and not math.isinf(added)):
            continue
        who, found = "the weighted sum of rewards", added
        if not math.isfinite(own):
            who, found = "the reward model", own
        raise ScoreError from ValueError(
            f"{who} gives {found} for {shortened(decode(response.tokens))!r} after the prompt "
            f"{shortened(decode(response.prompt))!r}; a score is a finite number"
        )


@torch.no_grad()
def scores_alone(
    engines: Engines,
    responses: Sequence[Response],
    batches: Sequence[ResponseBatch],
    *,
    scorer: RewardFunctions | None,
    state: TrainerState | None = None,
) -> Scores:
    """The scores of :func:`score_responses` without the rest; call on every rank."""
    engines.eval()
    device = engines.actor.device
    scores = torch.zeros(len(responses), device=device)
    if engines.reward is not None:
        rows = torch.cat([engines.scores(batch.to(device)) for batch in batches])
        numbers = [n for batch in batches for n in batch.numbers]
        scores = _gather_rows(numbers, rows[:, None])[:, 0]
    return _added(engines, responses, scorer, scores, state)


def _added(
    engines: Engines,
    responses: Sequence[Response],
    scorer: RewardFunctions | None,
    model: Tensor,
    state: TrainerState | None,
) -> Scores:
    """The scores of functions and of the reward model, and their sum; NaN for those left out."""
    left_out = to_device(torch.tensor([each.is_left_out for each in responses]), model.device)
    model = model.masked_fill(left_out, torch.nan)
    if scorer is None:
        return Scores(model, {})
    rewards = scorer(responses, model.device, state)
    if scorer.environment is not None:
        given = [each.episode.reward for each in responses]
        given = [math.nan if reward is None else reward for reward in given]
        rewards[scorer.environment] = to_device(torch.tensor(given), model.device)
    rewards = {name: scores.masked_fill(left_out, torch.nan) for name, scores in rewards.items()}
    total = scorer.total(rewards, None if engines.reward is None else model)
    total = total.masked_fill(left_out, torch.nan)
    by_name = rewards | ({} if engines.reward is None else {"reward_model": model})
    metrics, columns = scorer.log.take(responses) if scorer.logs else ({}, {})
    for name in sorted({name for each in responses for name in each.episode.logged}):
        values = [r.episode.logged[name] for r in responses if name in r.episode.logged]
        metrics[name] = sum(values) / len(values)
        columns[name] = [each.episode.logged.get(name) for each in responses]
    return Scores(total, by_name, metrics, columns)


@torch.no_grad()
def _outputs(
    engines: Engines,
    batches: Sequence[ResponseBatch],
    width: int,
    *,
    deferred: int,
    from_sampler: bool,
    with_scores: bool,
) -> Tensor:
    """(N, 1 + k R) score, and log-probabilities of the reference and the actor, and values.

    Those of the reference where it is here, the others where they are asked for.
    """
    rows, with_old = [], deferred < len(batches)
    for number, batch in enumerate(batches):
        batch = batch.to(engines.actor.device)
        parts = [engines.policy(batch, width, "reference")[0]] if engines.teacher is None else []
        if with_old and not from_sampler:
            shape = len(batch.numbers), width
            unknown = torch.full(shape, torch.nan, device=engines.actor.device)
            parts.append(unknown if number < deferred else engines.policy(batch, width)[0])
        if with_old and engines.critic is not None:
            parts.append(engines.values(batch, width))
        scores = torch.zeros(len(batch.numbers), device=engines.actor.device)
        if with_scores and engines.reward is not None:
            scores = engines.scores(batch)
        rows.append(torch.cat([scores[:, None], *parts], dim=1))
    return _gather_rows([n for batch in batches for n in batch.numbers], torch.cat(rows))


def _gather_rows(numbers: Sequence[int], rows: Tensor) -> Tensor:
    """(N, C) fp32 rows of all ranks in the order of their numbers; call on every rank."""
    # Numbers of responses are exact in fp64, fp32 values too.
    table = _gather_numbered(numbers, rows)
    return table[table[:, 0].argsort()][:, 1:].float()


def _gather_numbered(numbers: Sequence[int], rows: Tensor) -> Tensor:
    """(n, 1 + C) fp64 of all ranks: numbers of responses, and their rows; call on every rank."""
    own = to_device(torch.tensor(numbers, dtype=torch.float64), rows.device)
    return gather_over_ranks(torch.cat([own[:, None], rows.detach().double()], dim=1))


def add_old_outputs(
    experience: Experience, numbers: Sequence[int], logprobs: Tensor, values: Tensor | None
) -> Experience:
    """The experience completed by old log-probabilities and values; call on every rank.

    ``logprobs`` and ``values``, (n, R), are of this rank's n responses with these ``numbers``.
    """
    rows = logprobs if values is None else torch.cat([logprobs, values], dim=1)
    found = _gather_numbered(numbers, rows)
    places = found[:, 0].long()
    tables = torch.split(found[:, 1:].float(), experience.mask.shape[1], dim=1)
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
    """Advantages and returns of an iteration, without gradient.

    The KL penalty, unless the loss has it, is taken from each token's reward, or from the
    response's where responses are compared. The experience has old log-probabilities where
    :attr:`~dschat_lora.rl.algorithms.PpoConfig.weighs_by_policy` says so, and values for PPO.
    ``rewards`` are (N,) shaped scores, 0 for responses that do not count.
    """
    mask, rules = experience.mask, config.rules
    if rules.distills:
        # The sampled reverse KL at each token, and nothing of later ones: a discount of 0.
        return AdvantagesAndReturns(-experience.kl(), None)
    kl = partial(experience.kl, KL_ESTIMATORS[config.kl_estimator])
    if config.kl_in == "loss":
        kl_coef = 0.0
    if rules.compares:
        if config.kl_in == "reward":
            rewards = rewards - kl_coef * response_sums(kl(), mask)
        advantages = to_tokens(_COMPARED[rules.advantage](rewards, experience.groups), mask)
        if rules.advantage == "reinforce_pp_baseline":
            advantages = whiten(advantages, mask)
        return AdvantagesAndReturns(advantages, None)
    per_token = token_rewards(rewards, kl(), mask, kl_coef=kl_coef)
    if rules.advantage == "returns":
        returns = discounted_returns(per_token, mask, gamma=config.gamma)
        return AdvantagesAndReturns(whiten(returns, mask), None)
    assert experience.values is not None
    advantages, returns = gae(
        per_token, experience.values, mask, gamma=config.gamma, lam=config.lam
    )
    if config.whiten_advantages:
        advantages = whiten(advantages, mask)
    return AdvantagesAndReturns(advantages, returns)


_COMPARED = {
    "rloo": rloo_advantages,
    "grpo": grpo_advantages,
    "dr_grpo": dr_grpo_advantages,
    "reinforce_pp_baseline": dr_grpo_advantages,
}
