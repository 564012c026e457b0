"""Optimizer steps of actor and critic on an iteration's experience."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from dschat_lora.algos.devices import to_device
from dschat_lora.algos.kl import kl_k3
from dschat_lora.algos.ppo import policy_loss, value_loss
from dschat_lora.engine.build import StepOutcome
from dschat_lora.engine.collectives import max_over_ranks, sum_tensor_
from dschat_lora.lora.casts import FactorCasts
from dschat_lora.rlhf.batch import Minibatch, ResponseBatch
from dschat_lora.rlhf.config import PpoConfig
from dschat_lora.rlhf.engines import Engines
from dschat_lora.rlhf.experience import AdvantagesAndReturns, Experience, add_old_outputs
from dschat_lora.rlhf.pretraining import Pretraining, TextWindow
from dschat_lora.runtime.loop import broken_unless_finite


@dataclass(frozen=True)
class StepResult:
    """One optimizer step of actor and critic; figures are means over its tokens, of all ranks."""

    policy_loss: float
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


@dataclass
class _Sums:
    """Sums over tokens of this rank, later of all ranks."""

    policy: Tensor
    clipped: Tensor
    approx_kl: Tensor
    entropy: Tensor
    value: Tensor
    value_clipped: Tensor
    text: Tensor

    @classmethod
    def zero(cls, device: torch.device) -> "_Sums":
        return cls(*(torch.zeros((), dtype=torch.float64, device=device) for _ in fields(cls)))

    def add(self, **parts: Tensor) -> None:
        for name, part in parts.items():
            setattr(self, name, getattr(self, name) + part.detach().double())

    def numbers(self) -> dict[str, float]:
        """All of them, for which the host waits once."""
        names = [f.name for f in fields(self)]
        stacked = torch.stack([getattr(self, name) for name in names])
        return dict(zip(names, stacked.tolist(), strict=True))

    def over_ranks(self) -> "_Sums":
        return _Sums(*sum_tensor_(torch.stack([getattr(self, f.name) for f in fields(self)])))


class Updater:
    """Makes the optimizer steps of one iteration. Call on every rank.

    Where no batch was run before the update, the first forward pass, made before the policy has
    taken a step, gives the old log-probabilities and values.
    """

    def __init__(
        self,
        engines: Engines,
        config: PpoConfig,
        experience: Experience,
        *,
        estimate_advantages: Callable[[Experience], AdvantagesAndReturns],
        kl_coef: float,
        pretraining: Pretraining | None,
        rescale_values: Callable[[Tensor], Tensor] = lambda values: values,
    ) -> None:
        """Prepare an iteration.

        ``estimate_advantages`` takes a complete experience. ``kl_coef`` weighs the KL penalty where
        the loss has it; ``rescale_values`` brings the critic's values to the units of rewards.
        """
        self._engines, self._config = engines, config
        self._estimate_advantages, self._kl_coef = estimate_advantages, kl_coef
        self._pretraining, self._rescale_values = pretraining, rescale_values
        self._casts = FactorCasts(*(engine.module for engine in engines.trained.values()))
        self.experience = experience  # complete from the first step on
        self.targets: AdvantagesAndReturns | None = None  # None before the first step

    def steps(
        self,
        minibatches: Sequence[Minibatch],
        make_batch: Callable[[Sequence[int]], ResponseBatch],
        rate_factor: Callable[[int], float],
        *,
        first_batches: Sequence[ResponseBatch],
    ) -> Iterator[StepResult]:
        """Take the steps of all passes, one after another; yields the result of each.

        Steps without a token that counts are passed over. ``rate_factor`` multiplies the peak
        learning rates at each step. ``first_batches`` are those of the first pass, made already;
        ``make_batch`` makes the others from numbers of responses.
        """
        ready, sizes = list(first_batches), self.experience.mask.sum(1).tolist()
        for index, minibatch in enumerate(minibatches):
            own = [ready.pop(0) if ready else make_batch(rows) for rows in minibatch.micro_batches]
            batches = [batch.to(self._engines.actor.device) for batch in own]
            tokens = sum(sizes[number] for number in minibatch.numbers)
            if tokens == 0:
                continue
            self._engines.train()
            learning_rates = self._engines.set_rates(rate_factor(index))
            with self._casts.in_use():
                sums, ratio_error = self._backward(batches, tokens)
            outcomes = self._engines.step()
            yield self._result(sums, tokens, outcomes, learning_rates, ratio_error)

    def _backward(
        self, batches: Sequence[ResponseBatch], tokens: int
    ) -> tuple[_Sums, float | None]:
        """Backward passes of a step; the largest |ratio - 1| too at the first one."""
        engines, width = self._engines, self.experience.mask.shape[1]
        first = self.targets is None
        sums = _Sums.zero(engines.actor.device)
        texts = self._pretraining.window() if self._pretraining is not None else None
        largest = torch.zeros((), device=engines.actor.device)
        for batch in batches:
            last = batch is batches[-1]
            logprobs, entropy = engines.policy(batch, width)
            values = None
            if engines.critic is not None:
                values = self._rescale_values(engines.values(batch, width))
            if self.experience.logprobs is None:
                assert len(batches) == 1, "responses of other batches have to be known"
                self.experience = add_old_outputs(self.experience, batch.numbers, logprobs, values)
            if self.targets is None:
                self.targets = self._estimate_advantages(self.experience)
            rows = to_device(torch.tensor(batch.numbers, dtype=torch.int64), logprobs.device)
            policy, ratio_error = self._policy_loss(rows, logprobs, entropy, sums)
            losses = {"actor": policy}
            if values is not None:
                losses["critic"] = self._value_loss(rows, values, sums)
            largest = torch.maximum(largest, ratio_error)
            if last:
                sums = sums.over_ranks()
            for role, loss in losses.items():
                if last:
                    loss = broken_unless_finite(loss, sums.policy + sums.value)
                ends = last and (texts is None or role == "critic")
                engines.trained[role].backward(loss / tokens, last=ends)
        if texts is not None:
            sums.text = self._backward_texts(texts)
        return sums, max_over_ranks(float(largest)) if first else None

    def _policy_loss(
        self, rows: Tensor, logprobs: Tensor, entropy: Tensor, sums: _Sums
    ) -> tuple[Tensor, Tensor]:
        """The actor's loss summed over the tokens of ``rows``, and the largest |ratio - 1|."""
        config, experience, targets = self._config, self.experience, self.targets
        assert experience.logprobs is not None
        assert targets is not None
        mask = experience.mask[rows]
        parts = policy_loss(
            logprobs,
            experience.logprobs[rows],
            targets.advantages[rows],
            mask,
            cliprange=config.cliprange,
        )
        total_entropy = torch.where(mask, entropy, 0).sum()
        loss = parts.total - config.entropy_coef * total_entropy
        if config.algorithm == "grpo":
            kl = kl_k3(logprobs, experience.ref_logprobs[rows])
            loss = loss + self._kl_coef * torch.where(mask, kl, 0).sum()
        sums.add(
            policy=loss, clipped=parts.clipped, approx_kl=parts.approx_kl, entropy=total_entropy
        )
        return loss, parts.ratio_error

    def _value_loss(self, rows: Tensor, values: Tensor, sums: _Sums) -> Tensor:
        """The critic's loss summed over the tokens of ``rows``."""
        experience, targets = self.experience, self.targets
        assert experience.values is not None
        assert targets is not None
        assert targets.returns is not None
        parts = value_loss(
            values,
            experience.values[rows],
            targets.returns[rows],
            experience.mask[rows],
            cliprange_value=self._config.cliprange_value,
        )
        sums.add(value=parts.total, value_clipped=parts.clipped)
        return parts.total

    def _backward_texts(self, texts: TextWindow) -> Tensor:
        """Backward passes of pretraining text; its mean loss over all ranks."""
        assert self._pretraining is not None
        engine, total = self._engines.actor, torch.zeros((), device=self._engines.actor.device)
        for number, batch in enumerate(texts.batches):
            loss = self._engines.text_loss(batch.to(engine.device))
            total = total + loss.detach()
            weight = self._pretraining.coefficient / texts.num_targets
            engine.backward(weight * loss, last=number == len(texts.batches) - 1)
        return sum_tensor_(total.double()) / texts.num_targets

    def _result(
        self,
        sums: _Sums,
        tokens: int,
        outcomes: dict[str, StepOutcome],
        learning_rates: dict[str, dict[str, float]],
        ratio_error: float | None,
    ) -> StepResult:
        has_critic, found = self._engines.critic is not None, sums.numbers()
        return StepResult(
            policy_loss=found["policy"] / tokens,
            value_loss=found["value"] / tokens if has_critic else None,
            text_loss=found["text"] if self._pretraining is not None else None,
            entropy=found["entropy"] / tokens,
            clip_fraction=found["clipped"] / tokens,
            value_clip_fraction=found["value_clipped"] / tokens if has_critic else None,
            approx_kl=found["approx_kl"] / tokens,
            ratio_error=ratio_error,
            outcomes=outcomes,
            learning_rates=learning_rates,
            num_tokens=tokens,
        )
