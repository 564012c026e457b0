"""The update: steps of actor and critic on an iteration's experience."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from dschat_lora.algos.kl import kl_k3
from dschat_lora.algos.ppo import policy_loss, value_loss
from dschat_lora.engine.build import StepOutcome
from dschat_lora.engine.distributed import max_over_ranks, sum_tensor_
from dschat_lora.rlhf.batch import Minibatch, ResponseBatch
from dschat_lora.rlhf.config import PpoConfig
from dschat_lora.rlhf.engines import Engines
from dschat_lora.rlhf.experience import AdvantagesAndReturns, Experience, with_old
from dschat_lora.rlhf.pretraining import Pretraining, TextWindow
from dschat_lora.runtime.setup import broken_unless_finite


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
    ratio_error: float | None  # largest |ratio - 1|, at an iteration's first step
    outcomes: dict[str, StepOutcome]  # by role
    learning_rates: dict[str, dict[str, float]]  # by role and parameter group
    num_tokens: int  # response tokens

    @property
    def skipped(self) -> bool:
        """Whether a role did not learn because its gradient was not finite."""
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

    def over_ranks(self) -> "_Sums":
        return _Sums(*sum_tensor_(torch.stack([getattr(self, f.name) for f in fields(self)])))


class Updater:
    """Makes the steps of one iteration. Call on every rank.

    Where the policy has taken no step since it sampled, its own forward pass gives the old
    log-probabilities and values, and no pass is made for them alone.
    """

    def __init__(
        self,
        engines: Engines,
        config: PpoConfig,
        *,
        find_targets: Callable[[Experience], AdvantagesAndReturns],
        kl_coef: float,
        pretraining: Pretraining | None,
        value_units: Callable[[Tensor], Tensor] = lambda values: values,
    ) -> None:
        """Prepare an iteration.

        Args:
            engines: of the run.
            config: the algorithm's options.
            find_targets: advantages and returns of an experience with log-probabilities.
            kl_coef: weight of the divergence where the loss has it.
            pretraining: text to mix in.
            value_units: brings the critic's values to the units of rewards.
        """
        self._engines, self._config = engines, config
        self._find_targets, self._kl_coef = find_targets, kl_coef
        self._pretraining, self._value_units = pretraining, value_units
        self.targets: AdvantagesAndReturns | None = None

    def steps(
        self,
        experience: Experience,
        steps: Sequence[Minibatch],
        collate: Callable[[Sequence[int]], ResponseBatch],
        factor: Callable[[int], float],
        *,
        first_batches: Sequence[ResponseBatch],
    ) -> Iterator[tuple[Experience, StepResult]]:
        """Take the steps, one after another.

        Args:
            experience: of the iteration.
            steps: of all passes.
            collate: makes a batch of responses by number.
            factor: multiplier of the peak rates at each step.
            first_batches: of the first pass, whose log-probabilities are compared with these.

        Yields:
            The experience, complete from the first step on, and what the step did. Steps without
            a token that counts are passed over.
        """
        ready = list(first_batches)
        for index, step in enumerate(steps):
            own = [ready.pop(0) if ready else collate(rows) for rows in step.micro_batches]
            batches = [batch.to(self._engines.actor.device) for batch in own]
            tokens = int(experience.mask[step.numbers].sum())
            if tokens == 0:
                continue
            self._engines.train()
            learning_rates = self._engines.set_rates(factor(index))
            first = self.targets is None
            experience, sums, error = self._feed(experience, batches, tokens, first=first)
            outcomes = self._engines.step()
            yield experience, self._result(sums, tokens, outcomes, learning_rates, error)

    def _feed(
        self, experience: Experience, batches: list[ResponseBatch], tokens: int, *, first: bool
    ) -> tuple[Experience, _Sums, float | None]:
        """Backward passes of a step; the experience with what was missing."""
        engines, width = self._engines, experience.mask.shape[1]
        sums = _Sums.zero(engines.actor.device)
        texts = self._pretraining.window() if self._pretraining is not None else None
        error = torch.zeros((), device=engines.actor.device)
        for batch in batches:
            last = batch is batches[-1]
            logprobs, entropy = engines.policy(batch, width)
            values = None
            if engines.critic is not None:
                values = self._value_units(engines.values(batch, width))
            if experience.logprobs is None:
                assert len(batches) == 1, "responses of other batches have to be known"
                experience = with_old(experience, batch.numbers, logprobs, values)
            if self.targets is None:
                self.targets = self._find_targets(experience)
            rows = torch.tensor(batch.numbers, dtype=torch.int64, device=logprobs.device)
            loss, ratio_error = self._actor_loss(experience, rows, logprobs, entropy, sums)
            losses = {"actor": loss}
            if values is not None:
                losses["critic"] = self._critic_loss(experience, rows, values, sums)
            error = torch.maximum(error, ratio_error)
            if last:
                sums = sums.over_ranks()
            for role, loss in losses.items():
                if last:
                    loss = broken_unless_finite(loss, sums.policy + sums.value)
                ends = last and (texts is None or role == "critic")
                engines.trained[role].backward(loss / tokens, last=ends)
        if texts is not None:
            sums.text = self._feed_texts(texts)
        return experience, sums, max_over_ranks(float(error)) if first else None

    def _actor_loss(
        self,
        experience: Experience,
        rows: Tensor,
        logprobs: Tensor,
        entropy: Tensor,
        sums: _Sums,
    ) -> tuple[Tensor, Tensor]:
        """Summed over the tokens of some responses, and the largest |ratio - 1| there."""
        assert experience.logprobs is not None
        assert self.targets is not None
        config, mask = self._config, experience.mask[rows]
        found = policy_loss(
            logprobs,
            experience.logprobs[rows],
            self.targets.advantages[rows],
            mask,
            cliprange=config.cliprange,
        )
        total_entropy = torch.where(mask, entropy, 0).sum()
        loss = found.total - config.entropy_coef * total_entropy
        if config.algorithm == "grpo":
            divergence = kl_k3(logprobs, experience.ref_logprobs[rows])
            loss = loss + self._kl_coef * torch.where(mask, divergence, 0).sum()
        sums.add(
            policy=loss, clipped=found.clipped, approx_kl=found.approx_kl, entropy=total_entropy
        )
        return loss, found.ratio_error

    def _critic_loss(
        self, experience: Experience, rows: Tensor, values: Tensor, sums: _Sums
    ) -> Tensor:
        """Summed over the tokens of some responses."""
        assert experience.values is not None
        assert self.targets is not None
        assert self.targets.returns is not None
        found = value_loss(
            values,
            experience.values[rows],
            self.targets.returns[rows],
            experience.mask[rows],
            cliprange_value=self._config.cliprange_value,
        )
        sums.add(value=found.total, value_clipped=found.clipped)
        return found.total

    def _feed_texts(self, texts: TextWindow) -> Tensor:
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
        error: float | None,
    ) -> StepResult:
        has_critic = self._engines.critic is not None
        return StepResult(
            policy_loss=float(sums.policy) / tokens,
            value_loss=float(sums.value) / tokens if has_critic else None,
            text_loss=float(sums.text) if self._pretraining is not None else None,
            entropy=float(sums.entropy) / tokens,
            clip_fraction=float(sums.clipped) / tokens,
            value_clip_fraction=float(sums.value_clipped) / tokens if has_critic else None,
            approx_kl=float(sums.approx_kl) / tokens,
            ratio_error=error,
            outcomes=outcomes,
            learning_rates=learning_rates,
            num_tokens=tokens,
        )
