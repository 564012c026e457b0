"""Iterations of PPO, RLOO, GRPO and their kin: generate responses, score them, update, report."""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dschat_lora.algos.advantages import RunningMoments, response_sums
from dschat_lora.algos.entropy import adapted_entropy_coef, applied_entropy_coef
from dschat_lora.algos.kl import adapted_kl_coef
from dschat_lora.algos.seeds import permutation, stream_seed
from dschat_lora.config.data import DataConfig
from dschat_lora.data.loader import sample_sources, told_sources
from dschat_lora.data.prepare import Prepared
from dschat_lora.data.rows import DataKind
from dschat_lora.data.samples import PromptSample, SourcedSamples
from dschat_lora.engine.distributed import data_rank, data_world_size, device, local_rank, rank
from dschat_lora.generation.sampling import Sampling
from dschat_lora.perf.throughput import device_peak
from dschat_lora.report.log import rlhf_line
from dschat_lora.report.rollouts import RolloutLog
from dschat_lora.rl.draw.prompt_stream import Pool, PromptStream
from dschat_lora.rl.draw.rollouts_ahead import RolloutsAhead
from dschat_lora.rl.learn.dynamic_sampling import Resampled, resample
from dschat_lora.rl.learn.ema import MovingAverage
from dschat_lora.rl.learn.engines import Engines, Retry
from dschat_lora.rl.learn.experience import (
    Experience,
    Scores,
    advantages_and_returns,
    check_scores,
    score_responses,
    scores_alone,
)
from dschat_lora.rl.learn.teacher import answer_of
from dschat_lora.rl.learn.update import StepResult, Updater, count_deferred
from dschat_lora.rl.loop.build import make_generator, make_pretraining
from dschat_lora.rl.loop.schedule import RlhfProgress, make_rlhf_schedule
from dschat_lora.rl.loop.setup import RlhfSetup
from dschat_lora.rl.options.inputs import answers_data
from dschat_lora.rl.response.batch import Minibatch, ResponseBatch, collate, make_minibatches
from dschat_lora.rl.response.response import Response
from dschat_lora.rl.score.shaping import (
    clipped_rewards,
    punish_overlong,
    rescale_values,
    shaped_rewards,
)
from dschat_lora.rl.score.user_functions import TrainerState
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

    ``progress``, ``diagnostics``, ``answers`` (of the data), ``pretraining``, ``average`` (the
    actor's moving average) and ``ahead`` are kept up to date; the last four are None where the run
    has none.
    """

    def __init__(self, setup: RlhfSetup, engines: Engines) -> None:
        """Prepare the run.

        Raises:
            ValueError: if one of ``--stop_tokens`` is not one token.
        """
        self.setup, self.config = setup, setup.config
        config, self._pad_id = self.config, int(setup.tokenizer.pad_token_id)
        streams = config.data.streaming
        prompts = partial(self._stream, config.data.data, setup.prompts)
        self.schedule = make_rlhf_schedule(
            config, len(setup.prompts.train), prompts if streams else None
        )
        self.generator = make_generator(setup, engines)
        self.engines = replace(engines, retry=Retry(engines.trained.values(), self.generator))
        self.progress = RlhfProgress(
            kl_coef=config.ppo.kl_coef,
            kl_start=config.ppo.kl_coef,
            entropy_coef=config.ppo.entropy_coef,
            entropy_start=config.ppo.entropy_coef,
        )
        self.diagnostics = Diagnostics(
            setup.settings["actor"].dtype,
            samples_tokens=config.batch.draws_from_policy and setup.answers is None,
            own_engine=config.batch.rollout_engine == "own",
            samplers_logprobs=config.ppo.use_rollout_logprobs,
            learns_from_rewards=not config.ppo.rules.distills,
            guards=config.ppo.guard != "off",
            kl_budget=config.ppo.kl_budget,
        )
        self._sources = told_sources(config.data.data, setup.prompts)
        self._known = self._with_sources(setup.prompts)
        self.answers: PromptStream | SourcedSamples | None = None
        if setup.answers is not None:
            self.answers = self._with_sources(setup.answers)
            if streams:
                responses = self.schedule.order.per_iteration * self.schedule.num_generations
                drawn = round((1 - config.teacher.on_policy_share) * responses)
                data = answers_data(config)
                self.answers = self._stream(data, setup.answers, max(1, drawn), kind="samples")
        self.pretraining = self.average = None
        if setup.text is not None:
            self.pretraining = make_pretraining(setup, setup.text)
        if config.classic.enable_ema:
            self.average = MovingAverage(setup.roles.actor.model, config.classic.ema_decay)
        run, earlier = setup.run, None
        assert run.directory is not None, "a dry run keeps nothing"
        if config.checkpoint and not goes_on_in_place(config):
            earlier = run_of(Path(config.checkpoint))
        self.rollouts = RolloutLog(run.directory, run.log, active=rank() == 0, source=earlier)
        self.ahead = None
        if config.batch.rollouts_ahead:
            self.ahead = RolloutsAhead(
                config.batch.rollouts_ahead,
                lambda: self.schedule.num_iterations,
                iteration=lambda: self.progress.iteration,
                prompts_of=lambda iteration: self._prompts(self._begun(iteration), iteration),
                begin=lambda prompts, iteration: self.generator.begin(
                    prompts, **self._drawing(iteration), needed=self._needed(iteration)
                ),
            )
        self.timer = PhaseTimer(device())
        self._shares_prompts = engines.shares_prompts and self.schedule.num_generations > 1
        self._rate_factor = standard_schedule(config.optim)(self.schedule.num_steps)

    def _stream(
        self, data: DataConfig, head: Prepared, per_iteration: int, kind: DataKind = "prompts"
    ) -> PromptStream:
        setup, run = self.setup, self.config.run
        return PromptStream(
            setup.stream(data, head, kind),
            per_iteration=per_iteration,
            most=max(1, self.config.optim.max_steps),
            kind=kind,
            seed=run.seed,
            iteration=lambda: self.progress.iteration,
            say=setup.run.log.say,
        )

    def _with_sources(self, data: Prepared) -> SourcedSamples:
        """The prepared samples, with their sources where metrics tell them apart."""
        numbers = np.zeros(len(data.train), np.int64)
        if self._sources and not self.config.data.streaming:
            numbers = sample_sources(data, self._sources).numbers
        return SourcedSamples(data.train, numbers)

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

    def state(self) -> TrainerState:
        """How far the run is, for reward functions."""
        return TrainerState(
            global_step=self.progress.step,
            max_steps=self.schedule.num_steps,
            epoch=self.schedule.order.passes(self.progress.iteration)["epoch"],
            num_train_epochs=self.config.optim.num_train_epochs,
            is_world_process_zero=rank() == 0,
            is_local_process_zero=local_rank() == 0,
        )

    def iterate(self) -> bool:
        """Generate, score, update and report; whether the last optimizer step was skipped."""
        config, progress = self.config, self.progress
        with self.timer.phase("generation"):
            responses = self._responses()
        if self.setup.agents is not None:
            self.setup.agents.check(responses)
        resampled = self._resample(responses) if config.ppo.dynamic_sampling else None
        if resampled is not None:
            responses = resampled.responses
        self.generator.make_room()
        with self.timer.phase("scoring"):
            passes = config.ppo.ppo_epochs
            minibatches = self._minibatches(
                responses, rows_per_step=self.schedule.rows_per_step, passes=passes
            )
            self._read_text(len(minibatches))
            first_pass = minibatches[: len(minibatches) // passes]
            make_batch = self._collator(responses)
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
        if config.classic.log_rollouts and rank() == 0:
            self.rollouts.write(
                rollout_rows(
                    experience,
                    updater.targets,
                    self.setup.tokenizer.decode,
                    iteration=progress.iteration,
                    most=config.classic.log_rollouts,
                )
            )
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
            **self._passes(),
            "iteration": progress.iteration,
            **update_metrics(results),
            **sampler_errors(updater.looked, bounds=config.batch.only_filters),
            **response_metrics(experience, rewards, updater.targets),
            **source_metrics(experience.responses, self._sources),
            "score_clip_fraction": clip_fraction,
            **self._mismatch(updater),
            **self.generator.draft_metrics(),
            **version_metrics(responses, progress.iteration - 1),
            **self._cut(progress.iteration - 1),
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

    def _passes(self) -> dict[str, float]:
        """Passes over the data so far and, of a mixture, over each source."""
        found = self.schedule.order.passes(self.progress.iteration)
        if self.config.data.streaming:
            return found
        times = self.setup.prompts.times
        return found | {f"epochs/{name}": found["epoch"] * times[name] for name in self._sources}

    def _responses(self) -> list[Response]:
        """Those of an iteration: the actor's and, by ``--on_policy_share``, answers of the data."""
        iteration, given = self.progress.iteration, list[Response]()
        numbers = self._numbers(iteration)
        if (answers := self.answers) is not None:
            samples = answers.pool(iteration) if isinstance(answers, PromptStream) else answers
            order = permutation(len(samples), "answers", self.config.run.seed, iteration)
            count = self.schedule.order.size(iteration) - len(numbers)
            count *= self.schedule.num_generations
            chosen = [samples[int(order[n % len(order)])] for n in range(count)]
            given = [answer_of(each, group=len(numbers) + n) for n, each in enumerate(chosen)]
        if self.ahead is not None:
            drawn = self.ahead()
        else:
            drawn = self._generate(self._begun(iteration), needed=self._needed(iteration))
        places = {n: place for place, n in enumerate(sorted({each.group for each in drawn}))}
        responses = [*(replace(each, group=places[each.group]) for each in drawn), *given]
        prompts = self.setup.teacher_prompts
        return responses if prompts is None else prompts(responses)

    def _numbers(self, iteration: int) -> list[int]:
        """Numbers of an iteration's prompts that the actor answers."""
        numbers = self.schedule.order(iteration)
        if self.answers is None:
            return numbers
        # Of a prompt all responses are drawn, or none; its fraction is rounded at random.
        wanted = self.config.teacher.on_policy_share * len(numbers)
        chance = stream_seed("on-policy share", self.config.run.seed, iteration) / 2**63
        return numbers[: int(wanted + chance)]

    def _begun(self, iteration: int) -> list[int]:
        """The same and, by ``--oversample``, further ones."""
        numbers = self._numbers(iteration)
        if self.config.batch.oversample == 1:
            return numbers
        more = self.config.batch.oversampled(len(numbers)) - len(numbers)
        return [*numbers, *self._further(iteration)[:more]]

    def _needed(self, iteration: int) -> int | None:
        return len(self._numbers(iteration)) if self.config.batch.oversample > 1 else None

    def _further(self, iteration: int) -> list[int]:
        """Numbers of the prompts that are not of an iteration, in a random order."""
        first = set(self.schedule.order(iteration))
        key = ("further prompts", self.config.run.seed, iteration)
        order = permutation(len(self._pool(iteration)), *key)
        return [int(number) for number in order if int(number) not in first]

    def _pool(self, iteration: int) -> Pool:
        """The prompts that an iteration's numbers are of."""
        if isinstance(self.schedule.order, PromptStream):
            return self.schedule.order.pool(iteration)
        return self._known

    def _prompts(self, numbers: Sequence[int], iteration: int) -> list[PromptSample]:
        pool = self._pool(iteration)
        return [pool[number] for number in numbers]

    def _generate(
        self, numbers: Sequence[int], *more: int | str, needed: int | None = None
    ) -> list[Response]:
        """Responses to the prompts of these numbers; ``more`` is of the key of random numbers.

        Of those that are not to the ``needed`` prompts whose responses end first, none.
        """
        if not numbers:
            return []
        drawing = self._drawing(self.progress.iteration, *more)
        prompts = self._prompts(numbers, self.progress.iteration)
        found = self.generator(prompts, **drawing, keep_logprobs=True, needed=needed)
        if self.ahead is None:
            return found
        return [replace(each, policy_version=self.progress.iteration) for each in found]

    def _drawing(self, iteration: int, *more: int | str) -> dict[str, Any]:
        """How the generator draws an iteration's responses; ``more`` as in :meth:`_generate`."""
        batch = self.config.batch
        return {
            "sampling": Sampling(
                max_new_tokens=self.config.data.max_answer_seq_len,
                do_sample=batch.do_sample,
                temperature=batch.rollout_temperature or batch.temperature,
                policy_temperature=batch.temperature,
                top_p=batch.top_p,
                top_k=batch.top_k,
            ),
            "num_generations": self.schedule.num_generations,
            "key": (self.config.run.seed, iteration, *more),
        }

    def _resample(self, responses: list[Response]) -> Resampled:
        """The responses by dynamic sampling, with their scores."""
        tries, iteration = self.config.ppo.dynamic_sampling, self.progress.iteration

        def generate(numbers: Sequence[int], number: int) -> list[Response]:
            with self.timer.phase("generation"):
                return self._generate(numbers, "further", number)

        def score(found: Sequence[Response]) -> Scores:
            with self.timer.phase("scoring"):
                (whole,) = self._minibatches(found, rows_per_step=len(found), passes=1)
                batches = list(map(self._collator(found), whole.micro_batches))
                return scores_alone(
                    self.engines, found, batches, scorer=self.setup.scorer, state=self.state()
                )

        begun = set(self._begun(iteration))
        further = [number for number in self._further(iteration) if number not in begun]
        return resample(responses, further=further, tries=tries, generate=generate, score=score)

    def _read_text(self, steps: int) -> None:
        """Have the text of the steps to come: one that cannot be read is to stop before them."""
        if self.pretraining is not None and "actor" in self.learning:
            self.pretraining.read(steps)

    def _minibatches(
        self, responses: Sequence[Response], *, rows_per_step: int, passes: int
    ) -> list[Minibatch]:
        """The minibatches of all passes over the responses."""
        longest = max(len(s.prompt) + len(s.tokens) for r in responses for s in r.sequences)
        # Several sequences of a response stand in as many rows of a batch.
        lengths = [len(r.sequences) * longest if r.earlier_sequences else len(r) for r in responses]
        groups = [each.group for each in responses] if self._shares_prompts else None
        return [
            minibatch
            for number in range(passes)
            for minibatch in make_minibatches(
                lengths,
                rows_per_step=rows_per_step,
                micro_batch_size=self.config.batch.per_device_training_batch_size,
                rank=data_rank(),
                world_size=data_world_size(),
                key=("minibatches", self.config.run.seed, self.progress.iteration, number),
                tokens_per_device=self.config.batch.tokens_per_device,
                groups=groups,
            )
        ]

    def _collator(self, responses: Sequence[Response]) -> Callable[[Sequence[int]], ResponseBatch]:
        return partial(collate, responses, pad_id=self._pad_id, shares_prompts=self._shares_prompts)

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

    def _cut(self, iteration: int) -> dict[str, int]:
        """Prompts of an iteration whose responses were given up, where some may be."""
        needed = self._needed(iteration)
        return {} if needed is None else {"cut_prompts": len(self._begun(iteration)) - needed}

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
