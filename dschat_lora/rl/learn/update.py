"""Optimizer steps of actor and critic on an iteration's experience."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dschat_lora.algos.kl import KL_ESTIMATORS
from dschat_lora.algos.ppo import PolicyLoss, loss_divisor, token_weights, value_loss
from dschat_lora.algos.segments import to_device
from dschat_lora.engine.build import StepOutcome
from dschat_lora.engine.distributed import max_tensor_, sum_tensor_
from dschat_lora.engine.results import read_later
from dschat_lora.rl.learn.engines import Engines
from dschat_lora.rl.learn.experience import (
    AdvantagesAndReturns,
    Experience,
    StepResult,
    Steps,
    add_old_outputs,
)
from dschat_lora.rl.options.algorithms import PpoConfig
from dschat_lora.rl.response.batch import ResponseBatch
from dschat_lora.runtime.loop import broken_unless_finite

if TYPE_CHECKING:
    from dschat_lora.rl.learn.pretraining import Pretraining, TextWindow

# Sums over tokens, of this rank and later of all, in fp64.
_SUMS = ("loss", "policy", "clipped", "approx_kl", "entropy", "value", "value_clipped", "text")
Sums = dict[str, Tensor]


class Updater:
    """Makes the optimizer steps of one iteration. Call on every rank.

    Old log-probabilities and values that are not known before the update are those of the first
    step's own forward passes, which the policy makes before it has changed.
    """

    def __init__(
        self,
        engines: Engines,
        config: PpoConfig,
        experience: Experience,
        steps: Steps,
        *,
        estimate_advantages: Callable[[Experience], AdvantagesAndReturns],
        kl_coef: float,
        entropy_coef: float = 0.0,
        pretraining: "Pretraining | None" = None,
        rescale_values: Callable[[Tensor], Tensor] = lambda values: values,
        max_length: int = 1,
        learning: Collection[str] = ("actor", "critic"),
    ) -> None:
        """Prepare an iteration, whose advantages are estimated once the experience is complete.

        ``kl_coef`` weighs the KL penalty where the loss has it; ``rescale_values`` brings values of
        the critic to the units of rewards; a constant normalisation divides by ``max_length``.
        """
        self._steps, self._entropy_coef = steps, entropy_coef
        self._deferred = steps.deferred > 0 or experience.logprobs is None
        # Whether the first step's forward passes are yet to be kept.
        self._keeps_first = self._deferred or steps.from_sampler
        self._learning = learning
        self._engines, self._config = engines, config
        self._estimate_advantages, self._kl_coef = estimate_advantages, kl_coef
        self._pretraining = pretraining if "actor" in learning else None
        self._rescale_values = rescale_values
        # Of tokens that the losses count.
        self._mask, kind = experience.mask, config.loss_normalization
        if config.mask_truncated_completions:
            self._mask = self._mask & experience.ended[:, None]
        dtype = experience.scores.dtype
        self._weights = token_weights(self._mask, kind, max_length=max_length, dtype=dtype)
        self.importance: Tensor | None = None  # (N, R) weights of tokens; None: all are 1
        self.experience = experience  # complete from the first step on
        self.computed = experience  # with old log-probabilities of forward passes alone
        self.targets: AdvantagesAndReturns | None = None  # None before the first step
        self._totals: Sums | None = None  # of the step, of all ranks; None before they are

    def queue_steps(
        self, rate_factor: Callable[[int], float], *, most: int | None = None
    ) -> Iterator[Callable[[], StepResult]]:
        """Take up to ``most`` steps that have a token that counts.

        What is yielded after each waits for its result, once it is called. ``rate_factor``
        multiplies the peak learning rates at each step.
        """
        ready, sizes = list(self._steps.first_batches), self._mask.sum(1).tolist()
        make = self._steps.make_batch
        for index, minibatch in enumerate(self._steps.minibatches[:most]):
            made = [ready.pop(0) if ready else make(rows) for rows in minibatch.micro_batches]
            batches = [batch.to(self._engines.actor.device) for batch in made]
            lengths = [sizes[number] for number in minibatch.numbers]
            if sum(lengths) == 0:
                if self._deferred and self._keeps_first and self.experience.logprobs is not None:
                    self._engines.eval()
                    with torch.no_grad():
                        width = self.experience.mask.shape[1]
                        own = [self._engines.policy(each, width)[0] for each in batches]
                        self._keep_first(batches, own, None)
                continue
            divisors = {
                "actor": loss_divisor(lengths, self._config.loss_normalization),
                "critic": sum(lengths),
            }
            self._engines.train(self._learning)
            rates = self._engines.set_rates(rate_factor(index))
            texts = self._pretraining.window() if self._pretraining is not None else None
            first, self._totals = self.targets is None, None
            with self._engines.casts.in_use():
                sums, largest = self._engines.retry(
                    partial(self._backward, batches, divisors, texts), backward=True
                )
            ratio_error = [max_tensor_(largest.double())] if first else []
            if texts is not None:
                sums["text"] = sum_tensor_(sums["text"]) / texts.num_targets
            outcomes = self._engines.queue_step(self._learning)
            numbers = read_later(torch.stack([*sums.values(), *ratio_error]))
            yield partial(self._result, numbers, divisors, outcomes, rates)

    def _backward(
        self,
        batches: Sequence[ResponseBatch],
        divisors: Mapping[str, int],
        texts: "TextWindow | None",
    ) -> tuple[Sums, Tensor]:
        """Sums of all ranks and this rank's largest |ratio - 1|, by the passes of a step.

        They may be made again: what ranks have told each other is not asked for again.
        """
        engines, width = self._engines, self.experience.mask.shape[1]
        zeros = torch.zeros(len(_SUMS), dtype=torch.float64, device=engines.actor.device)
        sums = dict(zip(_SUMS, zeros, strict=True))
        actor_learns = "actor" in self._learning
        largest, own = torch.zeros((), device=engines.actor.device), list[Tensor]()
        for batch in batches:
            last = batch is batches[-1]
            with torch.set_grad_enabled(actor_learns):
                logprobs, entropy, *of_head = engines.outputs(batch, width)
            values = None
            if engines.critic is not None:
                values = self._rescale_values(engines.values(batch, width))
            own.append(logprobs.detach())
            if last and self._keeps_first:
                with engines.retry.collective():
                    self._keep_first(batches, own, values)
            if self.targets is None:
                self._find_targets()
            rows = to_device(torch.tensor(batch.numbers, dtype=torch.int64), logprobs.device)
            policy, ratio_error = self._policy_loss(rows, logprobs, entropy, sums, *of_head)
            losses = {"actor": policy} if actor_learns else {}
            if values is not None:
                losses["critic"] = self._value_loss(rows, values, sums)
            largest = torch.maximum(largest, ratio_error)
            if last:
                with engines.retry.collective():
                    sums = self._totals = self._totals or _over_ranks(sums)
            for role, loss in losses.items():
                if last:
                    loss = broken_unless_finite(loss, sums["loss"] + sums["value"])
                ends = last and (texts is None or role == "critic")
                engines.trained[role].backward(loss / divisors[role], last=ends)
        if texts is not None:
            sums["text"] = self._backward_texts(texts)
        return sums, largest

    def _keep_first(
        self, batches: Sequence[ResponseBatch], logprobs: Sequence[Tensor], values: Tensor | None
    ) -> None:
        """Keep what the first step's forward passes give; call on every rank."""
        self._keeps_first, own = False, torch.cat(list(logprobs))
        numbers = [number for batch in batches for number in batch.numbers]
        if not self._steps.from_sampler:
            self.experience = self.computed = add_old_outputs(self.experience, numbers, own, values)
            return
        known = add_old_outputs(replace(self.experience, logprobs=None), numbers, own, None)
        assert known.logprobs is not None
        self.computed = replace(known, mask=known.mask & ~known.logprobs.isnan())

    def _find_targets(self) -> None:
        """Advantages, returns and importance weights; where they need none, before old outputs."""
        known = self.experience
        if self._deferred and self._keeps_first:
            known = replace(known, logprobs=None)
        self.targets = self._estimate_advantages(known)
        if (correction := self._config.correction) is not None:
            self.importance = self.experience.importance(correction)

    def _policy_loss(
        self,
        rows: Tensor,
        logprobs: Tensor,
        entropy: Tensor,
        sums: Sums,
        of_head: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The actor's loss summed over the tokens of ``rows``, and the largest |ratio - 1|."""
        config, mask, weights = self._config, self._mask[rows], self._weights[rows]
        assert self.targets is not None
        known = self.experience.logprobs
        is_new = self._deferred and self._keeps_first  # as the policy is in this very pass
        old = logprobs if known is None or is_new else known[rows]
        # The losses are linear in the size of advantages: there stand the weights of tokens.
        advantages = self.targets.advantages[rows] * weights
        if self.importance is not None:
            advantages = advantages * self.importance[rows]
        parts: PolicyLoss = config.surrogate(logprobs, old, advantages, mask)
        entropy = torch.where(mask, entropy, 0)
        own = None if of_head is None else (weights * torch.where(mask, of_head, 0)).sum()
        loss = parts.total if own is None else own
        loss = policy = loss - self._entropy_coef * (weights * entropy).sum()
        if config.kl_in == "loss" and self._kl_coef and config.rules.learns_from_rewards:
            kl = KL_ESTIMATORS[config.kl_estimator](logprobs, self.experience.ref_logprobs[rows])
            loss = loss + self._kl_coef * (weights * torch.where(mask, kl, 0)).sum()
        _add(sums, loss=loss, policy=policy, entropy=entropy.sum())
        _add(sums, clipped=parts.clipped, approx_kl=parts.approx_kl)
        return loss, parts.ratio_error

    def _value_loss(self, rows: Tensor, values: Tensor, sums: Sums) -> Tensor:
        """The critic's loss summed over the tokens of ``rows``."""
        experience, targets = self.experience, self.targets
        assert experience.values is not None
        assert targets is not None
        assert targets.returns is not None
        parts = value_loss(
            values,
            experience.values[rows],
            targets.returns[rows],
            self._mask[rows],
            cliprange_value=self._config.cliprange_value,
        )
        _add(sums, value=parts.total, value_clipped=parts.clipped)
        return parts.total

    def _backward_texts(self, texts: "TextWindow") -> Tensor:
        """Backward passes of pretraining text; its summed loss on this rank."""
        assert self._pretraining is not None
        engine, total = self._engines.actor, torch.zeros((), device=self._engines.actor.device)
        for number, batch in enumerate(texts.batches):
            loss = self._engines.text_loss(batch.to(engine.device))
            total = total + loss.detach()
            weight = self._pretraining.coefficient / texts.num_targets
            engine.backward(weight * loss, last=number == len(texts.batches) - 1)
        return total.double()

    def _result(
        self,
        numbers: Callable[[], Tensor],
        divisors: Mapping[str, int],
        outcomes: Callable[[], dict[str, StepOutcome]],
        learning_rates: dict[str, dict[str, float]],
    ) -> StepResult:
        """What a step gave, for which the host waits."""
        has_critic = self._engines.critic is not None
        sums, ratio_error = numbers().tolist(), None
        if len(sums) > len(_SUMS):
            ratio_error = sums.pop()
        total = dict(zip(_SUMS, sums, strict=True))
        tokens = divisors["critic"]
        return StepResult(
            loss=total["loss"] / divisors["actor"],
            policy_loss=total["policy"] / divisors["actor"],
            value_loss=total["value"] / tokens if has_critic else None,
            text_loss=total["text"] if self._pretraining is not None else None,
            entropy=total["entropy"] / tokens,
            clip_fraction=total["clipped"] / tokens,
            value_clip_fraction=total["value_clipped"] / tokens if has_critic else None,
            approx_kl=total["approx_kl"] / tokens,
            ratio_error=ratio_error,
            outcomes=outcomes(),
            learning_rates=learning_rates,
            num_tokens=tokens,
        )


def _over_ranks(sums: Sums) -> Sums:
    return dict(zip(sums, sum_tensor_(torch.stack([*sums.values()])), strict=True))


def _add(sums: Sums, **parts: Tensor) -> None:
    for name, part in parts.items():
        sums[name] = sums[name] + part.detach().double()
