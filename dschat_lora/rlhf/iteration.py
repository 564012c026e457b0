"""An iteration of step 3: generate, score, update, report."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dschat_lora.algos.advantages import RunningMoments, response_sums
from dschat_lora.algos.kl import adapted_kl_coef
from dschat_lora.engine.distributed import (
    data_rank,
    data_world_size,
    device,
    sum_over_ranks,
)
from dschat_lora.generation.sampling import Sampling
from dschat_lora.perf.peak import device_peak
from dschat_lora.perf.throughput import StepCounts
from dschat_lora.report.log import rlhf_line
from dschat_lora.rlhf.batch import Minibatch, Response, ResponseBatch, collate, make_minibatches
from dschat_lora.rlhf.diagnostics import Diagnostics
from dschat_lora.rlhf.ema import MovingAverage
from dschat_lora.rlhf.engines import Engines
from dschat_lora.rlhf.experience import Experience, score_responses, step_counts, targets
from dschat_lora.rlhf.metrics import learning_rates_of, response_metrics, update_metrics
from dschat_lora.rlhf.pretraining import Pretraining
from dschat_lora.rlhf.rewards import rescale_values, scores_of_clip, shaped_rewards
from dschat_lora.rlhf.rollout import Generator, prompts_of, response_mask
from dschat_lora.rlhf.schedule import Progress, RlhfSchedule
from dschat_lora.rlhf.setup import Setup
from dschat_lora.rlhf.throughput import PHASES, Clock, throughput_metrics
from dschat_lora.rlhf.update import StepResult, Updater
from dschat_lora.runtime.lr_schedule import standard_schedule


@dataclass(frozen=True)
class Scored:
    """An iteration's experience and what is to be done with it."""

    experience: Experience
    scores: Tensor  # (N,) as they are to teach; 0 for what does not count
    steps: list[Minibatch]  # of all passes
    batches: list[ResponseBatch]  # this rank's of the first pass
    extra_forward: bool  # whether actor and critic were asked before the update too
    clipped: float  # share of the scores that the clip bounds


class Iterations:
    """Makes one iteration after another. Call on every rank."""

    def __init__(
        self,
        setup: Setup,
        engines: Engines,
        plan: RlhfSchedule,
        generator: Generator,
        progress: Progress,
        diagnostics: Diagnostics,
        *,
        pretraining: Pretraining | None,
        average: MovingAverage | None,
    ) -> None:
        """Prepare; ``progress`` and ``average`` are kept up to date."""
        self._setup, self._engines, self._plan = setup, engines, plan
        self._generator, self._progress, self._diagnostics = generator, progress, diagnostics
        self._pretraining, self._average = pretraining, average
        self._clock = Clock(device())
        self._config = setup.config
        self._sampling = Sampling(
            max_new_tokens=self._config.data.max_answer_seq_len,
            do_sample=self._config.batch.do_sample,
            temperature=self._config.batch.temperature,
            top_p=self._config.batch.top_p,
            top_k=self._config.batch.top_k,
        )
        self._factor = standard_schedule(self._config.optim)(plan.num_steps)
        self._peak = device_peak(device(), setup.settings["actor"].torch_dtype)

    def __call__(self) -> bool:
        """Roll out, score and update once; whether the last step was skipped."""
        with self._clock.phase("generation"):
            responses = self._roll_out()
        with self._clock.phase("scoring"):
            scored = self._score(responses)
        results: list[StepResult] = []
        with self._clock.phase("training"):
            experience, returns = self._update(scored, results)
        self._count(experience, results)
        if not results:
            self._say_nothing_counts(experience)
            return False
        # Every rank knows all, so all of them watch alike.
        scored = replace(scored, experience=experience)
        self._report(self._metrics(scored, returns, results), experience)
        return results[-1].skipped

    def _roll_out(self) -> list[Response]:
        numbers = self._plan.order(self._progress.iteration)
        return self._generator(
            prompts_of(self._setup.prompts.train, numbers),
            self._sampling,
            num_generations=self._plan.num_generations,
            key=(self._config.run.seed, self._progress.iteration),
            keep_logprobs=True,
        )

    def _score(self, responses: list[Response]) -> Scored:
        steps = self._steps(responses)
        first = steps[: len(steps) // self._config.ppo.ppo_epochs]
        batches = [self._collate(responses, rows) for s in first for rows in s.micro_batches]
        # Where there is but one batch, its own forward pass is the actor's and critic's word.
        looks = not (len(steps) == 1 and len(batches) == 1)
        mask = response_mask(responses, device())
        ref_logprobs, logprobs, values, scores = score_responses(
            self._engines, batches, mask.shape[1], with_old=looks
        )
        if self._setup.function is not None:
            scores = scores + self._setup.function(responses, device())
        mask = mask & ~scores.isnan()[:, None]
        moments = RunningMoments(**self._progress.moments)
        ended = torch.tensor([each.ended for each in responses], device=device())
        teaching, moments = shaped_rewards(scores, ended, moments, self._config.rewards)
        self._progress.moments = asdict(moments)
        values = None if values is None else self._value_units(values)
        experience = Experience(responses, mask, ref_logprobs, scores, logprobs, values)
        clipped = float(scores_of_clip(teaching, ended, self._config.rewards).double().mean())
        return Scored(
            experience, torch.where(scores.isnan(), 0, teaching), steps, batches, looks, clipped
        )

    def _steps(self, responses: Sequence[Response]) -> list[Minibatch]:
        lengths = [len(each) for each in responses]
        passes = [
            make_minibatches(
                lengths,
                rows_per_step=self._plan.rows_per_step,
                micro_batch_size=self._config.batch.per_device_training_batch_size,
                rank=data_rank(),
                world_size=data_world_size(),
                key=("minibatches", self._config.run.seed, self._progress.iteration, number),
                tokens_per_device=self._config.batch.tokens_per_device,
            )
            for number in range(self._config.ppo.ppo_epochs)
        ]
        return [step for each in passes for step in each]

    def _collate(self, responses: Sequence[Response], numbers: Sequence[int]) -> ResponseBatch:
        return collate(responses, numbers, int(self._setup.tokenizer.pad_token_id))

    def _update(
        self, scored: Scored, results: list[StepResult]
    ) -> tuple[Experience, Tensor | None]:
        """Take the steps; ``results`` receives what each did. The experience, and its returns."""
        config, progress, scores = self._config.ppo, self._progress, scored.scores
        updater = Updater(
            self._engines,
            config,
            find_targets=lambda known: targets(known, scores, config, kl_coef=progress.kl_coef),
            kl_coef=progress.kl_coef,
            pretraining=self._pretraining,
            value_units=self._value_units,
        )
        start = self._plan.steps_before(progress.iteration)
        allowed = self._plan.num_steps - start
        known = scored.experience
        for known, result in updater.steps(  # noqa: B007 - the last one is returned
            scored.experience,
            scored.steps[:allowed],
            partial(self._collate, scored.experience.responses),
            lambda index: self._factor(start + index),
            first_batches=scored.batches,
        ):
            results.append(result)
            progress.step += 1
            progress.skipped += result.skipped
            progress.skipped_in_a_row = progress.skipped_in_a_row + 1 if result.skipped else 0
            if self._average is not None and not result.outcomes["actor"].skipped:
                self._average.update()
            if config.target_kl and result.approx_kl > config.target_kl:
                break
        return known, None if updater.targets is None else updater.targets.returns

    def _value_units(self, values: Tensor) -> Tensor:
        """The critic's values in units of scaled rewards.

        It starts as the reward model, whose units these are the first scores' deviations from.
        """
        starts_as_reward = self._setup.roles.reward is not None
        if self._config.rewards.reward_scaling != "initial" or not starts_as_reward:
            return values
        return rescale_values(RunningMoments(**self._progress.moments), values)

    def _count(self, experience: Experience, results: list[StepResult]) -> None:
        progress, responses = self._progress, experience.responses
        progress.iteration += 1
        progress.responses += len(responses)
        progress.tokens += sum(map(len, responses))
        if not results:
            return
        kl = response_sums(experience.kl(), experience.mask)[experience.counts]
        progress.kl_spent = float(kl.double().mean())
        config = self._config.ppo
        if config.adaptive_kl_target and math.isfinite(progress.kl_spent):
            progress.kl_coef = adapted_kl_coef(
                progress.kl_coef,
                kl=progress.kl_spent,
                target=config.adaptive_kl_target,
                horizon=config.kl_horizon,
                num_samples=len(responses),
            )

    def _metrics(
        self, scored: Scored, returns: Tensor | None, results: list[StepResult]
    ) -> dict[str, Any]:
        update = update_metrics(results)
        return {
            "epoch": self._plan.epoch(self._progress.iteration),
            "iteration": self._progress.iteration,
            "loss": update["policy_loss"],
            **learning_rates_of(results[-1]),
            **update,
            **response_metrics(scored.experience, scored.scores, returns),
            "score_clip_fraction": scored.clipped,
            "kl_coef": self._progress.kl_coef,
            "updates": len(results),
            **self._throughput(scored, results),
        }

    def _throughput(self, scored: Scored, results: list[StepResult]) -> dict[str, Any]:
        seconds, responses = self._clock.take(), scored.experience.responses
        work = classic = None
        # The last pass may have been cut short.
        passes = len(results) * self._config.ppo.ppo_epochs / len(scored.steps)
        if self._setup.counter is not None:
            own = step_counts(scored.batches)
            positions, pairs = sum_over_ranks([own.num_positions, own.num_scored_pairs])
            work = self._setup.counter(
                responses,
                num_generations=self._plan.num_generations,
                batch_size=self._config.batch.per_device_generation_batch_size,
                passes=passes,
                extra_forward=scored.extra_forward,
                text=None if self._pretraining is None else self._pretraining.take_counts(),
                padded=None
                if self._skips_padding()
                else StepCounts(num_positions=round(positions), num_scored_pairs=round(pairs)),
            )
            classic = self._setup.counter.classic_flops(responses, passes)
        for name in PHASES:
            self._progress.seconds[name] += seconds[name]
            if work is not None:
                self._progress.flops[name] += work.flops[name].model
        return throughput_metrics(
            seconds,
            responses,
            work=work,
            classic=classic,
            peak_tflops=self._peak,
            device=device(),
        )

    def _skips_padding(self) -> bool:
        network: Any = self._engines.actor.module
        skips: bool = network.roles["actor"].backbone.skips_padding(device())
        return skips

    def _report(self, metrics: dict[str, Any], experience: Experience) -> None:
        log, progress, run = self._setup.run.log, self._progress, self._config.run
        log.write("train", progress.step, metrics)
        log.advance()
        total = self._plan.num_iterations
        if progress.iteration % run.logging_steps == 0 or progress.iteration == total:
            log.say(rlhf_line(progress.iteration, total, metrics))
        for message in self._diagnostics.iteration(metrics):
            self._warn(message)
        classic = self._config.classic
        interval = 1 if classic.print_answers else classic.print_answers_interval
        if interval and (progress.iteration - 1) % interval == 0:
            self._show(experience)

    def _warn(self, message: str) -> None:
        log = self._setup.run.log
        log.write("event", self._progress.step, {"event": "warning", "message": message})
        log.say(f"  warning      {message}")

    def _show(self, experience: Experience) -> None:
        tokenizer, response = self._setup.tokenizer, experience.responses[0]
        self._setup.run.log.say(
            f"  sample       {tokenizer.decode(response.prompt)!r} -> "
            f"{tokenizer.decode(response.tokens)!r} (score {float(experience.scores[0]):.3g})"
        )

    def _say_nothing_counts(self, experience: Experience) -> None:
        self._clock.take()
        message = (
            f"none of the {len(experience.responses)} responses of iteration "
            f"{self._progress.iteration} counts: no score came for any of them; nothing was learnt"
        )
        log = self._setup.run.log
        log.write("event", self._progress.step, {"event": "empty_batch", "message": message})
        log.say(f"  warning      {message}")
