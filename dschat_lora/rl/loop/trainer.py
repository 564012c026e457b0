"""Iterations of PPO, RLOO, GRPO and their kin: generate responses, score them, update, report."""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dschat_lora.algos.advantages import RunningMoments, response_sums
from dschat_lora.algos.entropy import adapted_entropy_coef, applied_entropy_coef
from dschat_lora.algos.kl import adapted_kl_coef
from dschat_lora.engine.distributed import device, rank
from dschat_lora.perf.throughput import device_peak
from dschat_lora.report.log import rlhf_line
from dschat_lora.report.rollouts import RolloutLog
from dschat_lora.rl.learn.engines import Engines, Retry
from dschat_lora.rl.learn.experience import (
    AdvantagesAndReturns,
    Experience,
    advantages_and_returns,
    check_scores,
    score_responses,
    scores_alone,
)
from dschat_lora.rl.learn.update import StepResult, Updater, count_deferred
from dschat_lora.rl.loop.build import make_average, make_generator, make_pretraining
from dschat_lora.rl.loop.sampler import RolloutSampler
from dschat_lora.rl.loop.schedule import RlhfProgress, trainer_state
from dschat_lora.rl.loop.setup import RlhfSetup
from dschat_lora.rl.response.batch import Batching, Minibatch, ResponseBatch
from dschat_lora.rl.response.response import Response
from dschat_lora.rl.score.shaping import (
    clipped_rewards,
    punish_overlong,
    rescale_values,
    shaped_rewards,
)
from dschat_lora.rl.watch.diagnostics import Diagnostics, check_sampler
from dschat_lora.rl.watch.metrics import (
    importance_metrics,
    response_metrics,
    sampler_errors,
    source_metrics,
    update_metrics,
    version_metrics,
)
from dschat_lora.rl.watch.rows import rollout_rows
from dschat_lora.rl.watch.throughput import (
    PHASES,
    PhaseTimer,
    counts_over_ranks,
    throughput_metrics,
)
from dschat_lora.runtime.loop import standard_schedule
from dschat_lora.runtime.resume import goes_on_in_place, run_of


class RlhfTrainer:
    """Makes one iteration after another; call methods on every rank.

    ``progress``, ``sampler``, ``diagnostics``, ``pretraining`` and ``average`` (the actor's moving
    average) are kept up to date; the last two are None where the run has none.
    """

    def __init__(self, setup: RlhfSetup, engines: Engines) -> None:
        """Prepare the run.

        Raises:
            ValueError: if one of ``--stop_tokens`` is not one token.
        """
        self.setup, self.config = setup, setup.config
        config, run, earlier = self.config, setup.run, None
        self.timer = PhaseTimer(device())
        self.progress = RlhfProgress(
            kl_coef=config.ppo.kl_coef,
            kl_start=config.ppo.kl_coef,
            entropy_coef=config.ppo.entropy_coef,
            entropy_start=config.ppo.entropy_coef,
        )
        self._batching = Batching(
            int(setup.tokenizer.pad_token_id),
            config.batch.per_device_training_batch_size,
            config.batch.tokens_per_device,
            config.run.seed,
            shares_prompts=engines.shares_prompts and config.batch.num_generations > 1,
        )
        self.generator = make_generator(setup, engines)
        self.sampler = RolloutSampler(
            setup, self.generator, self.progress, self._batching, self.timer
        )
        self.schedule = self.sampler.schedule
        self.state = partial(trainer_state, self.schedule, self.progress)
        self.engines = replace(engines, retry=Retry(engines.trained.values(), self.generator))
        self.diagnostics = Diagnostics(
            setup.settings["actor"].dtype,
            samples_tokens=config.batch.draws_from_policy and setup.answers is None,
            own_engine=config.batch.rollout_engine == "own",
            samplers_logprobs=config.ppo.use_rollout_logprobs,
            learns_from_rewards=not config.ppo.rules.distills,
            guards=config.ppo.guard != "off",
            kl_budget=config.ppo.kl_budget,
        )
        self.pretraining, self.average = make_pretraining(setup), make_average(setup)
        assert run.directory is not None, "a dry run keeps nothing"
        if config.checkpoint and not goes_on_in_place(config):
            earlier = run_of(Path(config.checkpoint))
        self.rollouts = RolloutLog(run.directory, run.log, active=rank() == 0, source=earlier)
        self._rate_factor = standard_schedule(config.optim)(self.schedule.num_steps)

    @property
    def learning(self) -> tuple[str, ...]:
        """The roles that learn at this iteration: the critic alone while it warms up."""
        warms_up = self.progress.iteration < self.config.ppo.critic_warmup_iterations
        return ("critic",) if warms_up and self.config.has_critic else ("actor", "critic")

    @property
    def entropy_coef(self) -> float:
        """The weight of the entropy bonus at this iteration."""
        coef, target = self.progress.entropy_coef, self.config.ppo.target_entropy
        if not target:
            return coef
        return applied_entropy_coef(coef, entropy=self.progress.entropy, target=target)

    def iterate(self) -> bool:
        """Generate, score, update and report; whether the last optimizer step was skipped."""
        config, progress = self.config, self.progress
        with self.timer.phase("generation"):
            responses = self.sampler()
        scores_of = partial(
            scores_alone, self.engines, scorer=self.setup.scorer, state=self.state()
        )
        if resampled := self.sampler.resample(responses, scores_of):
            responses = resampled.responses
        self.generator.make_room()
        with self.timer.phase("scoring"):
            passes = config.ppo.ppo_epochs
            minibatches = self._batching.minibatches(
                responses,
                rows_per_step=self.schedule.rows_per_step,
                iteration=progress.iteration,
                passes=passes,
            )
            self._read_text(len(minibatches))
            first_pass = minibatches[: len(minibatches) // passes]
            make_batch = self._batching.collator(responses)
            batches = [make_batch(rows) for each in first_pass for rows in each.micro_batches]
            deferred = count_deferred(config.ppo, minibatches)
            from_sampler = config.ppo.use_rollout_logprobs and not deferred
            left = 1 - bool(deferred) * len(first_pass[0].numbers) / len(responses)
            experience = score_responses(
                self.engines,
                responses,
                batches,
                scorer=self.setup.scorer,
                deferred=deferred,
                from_sampler=from_sampler,
                known=None if resampled is None else resampled.scores,
                state=self.state(),
            )
            check_scores(experience, self.setup.tokenizer.decode)
            rewards, clip_fraction = self._shape_rewards(experience)
        learning = self.learning  # before the iteration is counted
        with self.timer.phase("training"):
            updater = self._updater(
                experience, rewards, deferred=deferred > 0, from_sampler=from_sampler
            )
            results = self._update(updater, minibatches, make_batch, batches)
        experience = updater.experience  # with the old outputs
        if self.setup.teacher_scores and results:
            experience = experience.scored_by_reference()
            rewards = experience.scores
        self._advance(experience, results)
        self._log_rollouts(experience, updater.targets)
        if not results:
            self.timer.take()
            self.setup.run.log.report_event(
                progress.step,
                "empty_batch",
                f"none of the {len(responses)} responses of iteration {progress.iteration} counts: "
                "no score came for any of them, no token could be drawn, or "
                "--mask_truncated_completions left them out; nothing was learnt",
            )
            return False
        metrics = {
            **self.sampler.passes(),
            "iteration": progress.iteration,
            **update_metrics(results),
            **sampler_errors(updater.looked, bounds=config.batch.only_filters),
            **response_metrics(experience, rewards, updater.targets),
            **source_metrics(experience.responses, self.sampler.sources),
            "score_clip_fraction": clip_fraction,
            **self._mismatch(updater),
            **self.generator.draft_metrics(),
            **version_metrics(responses, progress.iteration - 1),
            **self.sampler.cut(progress.iteration - 1),
            "kl_coef": progress.kl_coef,
            **({"entropy_coef": self.entropy_coef} if config.ppo.target_entropy else {}),
            "updates": len(results),
            **({} if resampled is None else resampled.metrics),
            **self._throughput(
                responses,
                batches,
                passes=len(results) / len(first_pass),  # the last one may have been cut short
                shares_before={"actor": left * (not from_sampler), "critic": left},
                learning=learning,
            ),
        }
        check_sampler(metrics, self.diagnostics.dtype, config.batch.rollout_engine)
        self._report(metrics, experience)
        return results[-1].skipped

    def _read_text(self, steps: int) -> None:
        """Have the text of the steps to come: one that cannot be read is to stop before them."""
        if self.pretraining is not None and "actor" in self.learning:
            self.pretraining.read(steps)

    def _shape_rewards(self, experience: Experience) -> tuple[Tensor, float]:
        """(N,) shaped scores, 0 for responses that do not count; the share that was clipped."""
        scores, progress, config = experience.scores, self.progress, self.config.rewards
        ended = experience.ended
        moments = RunningMoments(**progress.moments)
        rewards, moments = shaped_rewards(scores, ended, moments, config)
        progress.moments = asdict(moments)
        clip_fraction = float(clipped_rewards(rewards, ended, config).double().mean())
        if config.soft_overlong_tokens:
            lengths = [len(each.tokens) for each in experience.responses]
            longest = self.config.data.max_answer_seq_len
            rewards = punish_overlong(rewards, lengths, longest=longest, config=config)
        return torch.where(scores.isnan(), 0, rewards), clip_fraction

    def _rescale(self, values: Tensor) -> Tensor:
        """The critic's values in units of shaped rewards.

        It starts as the reward model, whose scores are scaled by the moments of the first ones.
        """
        if self.config.rewards.reward_scaling != "initial" or self.engines.reward is None:
            return values
        return rescale_values(RunningMoments(**self.progress.moments), values)

    def _updater(
        self, experience: Experience, rewards: Tensor, *, deferred: bool, from_sampler: bool
    ) -> Updater:
        ppo, kl_coef = self.config.ppo, self.progress.kl_coef
        if experience.values is not None:
            experience = replace(experience, values=self._rescale(experience.values))
        return Updater(
            self.engines,
            replace(ppo, entropy_coef=self.entropy_coef),
            experience,
            estimate_advantages=partial(
                advantages_and_returns, rewards=rewards, config=ppo, kl_coef=kl_coef
            ),
            kl_coef=kl_coef,
            pretraining=self.pretraining,
            rescale_values=self._rescale,
            max_length=self.config.data.max_answer_seq_len,
            learning=self.learning,
            deferred=deferred,
            from_sampler=from_sampler,
        )

    def _update(
        self,
        updater: Updater,
        minibatches: Sequence[Minibatch],
        make_batch: Callable[[Sequence[int]], ResponseBatch],
        batches: Sequence[ResponseBatch],
    ) -> list[StepResult]:
        """Take the optimizer steps; one result for each."""
        progress, start = self.progress, self.schedule.steps_before(self.progress.iteration)
        target_kl, results = self.config.ppo.target_kl, []
        for result in updater.steps(
            minibatches[: self.schedule.num_steps - start],
            make_batch,
            lambda index: self._rate_factor(start + index),
            first_batches=batches,
        ):
            results.append(result)
            progress.count_step(skipped=result.skipped)
            actor = result.outcomes.get("actor")
            if self.average is not None and actor is not None and not actor.skipped:
                self.average.update()
            if target_kl and result.approx_kl > target_kl:
                break
        return results

    def _advance(self, experience: Experience, results: Sequence[StepResult]) -> None:
        """Count the iteration, and adapt the coefficients of KL and entropy."""
        progress, responses, config = self.progress, experience.responses, self.config.ppo
        actor_learns = "actor" in self.learning
        progress.iteration += 1
        progress.responses += len(responses)
        progress.tokens += sum(map(len, responses))
        if not results:
            return
        kl = response_sums(experience.kl(), experience.mask)[experience.counts]
        progress.kl_spent = float(kl.double().mean())
        if config.target_entropy and actor_learns:
            tokens = sum(result.num_tokens for result in results)
            progress.entropy = sum(each.entropy * each.num_tokens for each in results) / tokens
            progress.entropy_coef = adapted_entropy_coef(
                progress.entropy_coef, entropy=progress.entropy, target=config.target_entropy
            )
        if config.adaptive_kl_target and actor_learns and math.isfinite(progress.kl_spent):
            progress.kl_coef = adapted_kl_coef(
                progress.kl_coef,
                kl=progress.kl_spent,
                target=config.adaptive_kl_target,
                horizon=config.kl_horizon,
                num_samples=len(responses),
            )

    def _log_rollouts(self, experience: Experience, targets: AdvantagesAndReturns | None) -> None:
        most = self.config.classic.log_rollouts
        if most and rank() == 0:
            decode, iteration = self.setup.tokenizer.decode, self.progress.iteration
            self.rollouts.write(
                rollout_rows(experience, targets, decode, iteration=iteration, most=most)
            )

    def _throughput(
        self,
        responses: Sequence[Response],
        batches: Sequence[ResponseBatch],
        *,
        passes: float,
        shares_before: Mapping[str, float],
        learning: Collection[str],
    ) -> dict[str, float | None]:
        progress, seconds, work = self.progress, self.timer.take(), None
        if self.setup.counter is not None:
            backbone = self.engines.actor.module.policy("actor").backbone
            work = self.setup.counter(
                responses,
                passes=passes,
                shares_before=shares_before,
                counts=counts_over_ranks(batches),
                skips_padding=backbone.skips_padding(device()),
                text=None if self.pretraining is None else self.pretraining.take_counts(),
                learning=learning,
            )
        for name in PHASES:
            progress.seconds[name] += seconds[name]
            if work is not None:
                progress.flops[name] += work.flops[name].model
        return throughput_metrics(
            seconds,
            responses,
            work=work,
            peak_tflops=device_peak(device(), self.setup.settings["actor"].torch_dtype),
            device=device(),
        )

    def _mismatch(self, updater: Updater) -> dict[str, float]:
        """Metrics of the sampler beside the policy, where they may differ by more than rounding."""
        correction = self.config.ppo.correction
        own, draws = self.config.batch.rollout_engine == "own", self.config.batch.do_sample
        if not draws or (own and correction is None):
            return {}
        return importance_metrics(updater.importance, updater.experience, correction)

    def _report(self, metrics: dict[str, Any], experience: Experience) -> None:
        """Log metrics, progress line, warnings and a sample; every rank knows and warns of all."""
        config, log = self.config, self.setup.run.log
        iteration, total = self.progress.iteration, self.schedule.num_iterations
        log.write("train", self.progress.step, metrics)
        log.advance()
        if iteration % config.run.logging_steps == 0 or iteration == total:
            log.say_metrics(rlhf_line(iteration, total, metrics))
        for message in self.diagnostics.iteration(metrics):
            log.report_event(self.progress.step, "warning", message)
        interval = 1 if config.classic.print_answers else config.classic.print_answers_interval
        if interval and (iteration - 1) % interval == 0:
            response, decode = experience.responses[0], self.setup.tokenizer.decode
            log.say(
                f"  sample       {decode(response.prompt)!r} -> {decode(response.tokens)!r} "
                f"(score {float(experience.scores[0]):.3g})"
            )
