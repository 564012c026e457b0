"""Iterations of PPO, RLOO, GRPO and their kin: draw responses, score them, learn, watch."""

from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from torch import Tensor

from dschat_lora.algos.advantages import RunningMoments
from dschat_lora.engine.distributed import device
from dschat_lora.engine.results import reads_late
from dschat_lora.report.log import rlhf_line
from dschat_lora.report.terminal import sample_lines
from dschat_lora.rl.learn.engines import Engines, Retry, make_experience, with_reward_model
from dschat_lora.rl.learn.experience import Experience, Steps, advantages_and_returns, plan_steps
from dschat_lora.rl.learn.update import StepResult, Updater
from dschat_lora.rl.loop.build import make_generator, make_parts, make_pretraining
from dschat_lora.rl.loop.sampler import RolloutSampler
from dschat_lora.rl.loop.schedule import RlhfProgress
from dschat_lora.rl.loop.setup import RlhfSetup
from dschat_lora.rl.response.batch import Batching, ResponseBatch
from dschat_lora.rl.response.response import Response
from dschat_lora.rl.score.scores import Scores, rescale_values, shape
from dschat_lora.rl.watch.metrics import check_sampler, iteration_metrics
from dschat_lora.rl.watch.throughput import Throughput
from dschat_lora.runtime.loop import standard_schedule


class RlhfTrainer:
    """Makes one iteration after another; call methods on every rank.

    ``progress``, ``sampler`` and ``parts`` are kept up to date.
    """

    def __init__(self, setup: RlhfSetup, engines: Engines) -> None:
        """Prepare the run.

        Raises:
            ValueError: if one of ``--stop_tokens`` is not one token, or a part cannot be made.
        """
        self.setup, self.config = setup, setup.config
        config = self.config
        self.progress = RlhfProgress()
        self.progress.begin_at(config.ppo)
        batch = config.batch
        self._batching = Batching(
            int(setup.tokenizer.pad_token_id),
            batch.per_device_training_batch_size,
            batch.tokens_per_device,
            config.run.seed,
            shares_prompts=engines.shares_prompts and batch.num_generations > 1,
        )
        self.generator = make_generator(setup, engines, lambda: self.progress.iteration)
        self.pretraining = text = make_pretraining(setup)
        self.throughput = Throughput(
            setup.costs.counter,
            dtype=setup.models.settings["actor"].torch_dtype,
            skips_padding=engines.actor.module.policy("actor").backbone.skips_padding(device()),
            take_text=lambda: None if text is None else text.take_counts(),
        )
        self.sampler = RolloutSampler(setup, self.generator, self.progress, self.throughput.timer)
        self.schedule = self.sampler.schedule
        self.state = partial(self.schedule.state, self.progress)
        retry = Retry(engines.trained.values(), self.generator.engine)
        self.engines = replace(engines, retry=retry)
        scorer = setup.scoring.scorer
        self._scorer = with_reward_model(scorer, self.engines, self._scored_batches)
        self.parts = make_parts(setup, self.progress, self.pretraining)
        self._rate_factor = standard_schedule(config.optim)(self.schedule.num_steps)

    @property
    def learning(self) -> tuple[str, ...]:
        """The roles that learn at this iteration: the critic alone while it warms up."""
        warms_up = self.progress.iteration < self.config.ppo.critic_warmup_iterations
        return ("critic",) if warms_up and self.config.has_critic else ("actor", "critic")

    def iterate(self) -> bool:
        """Draw, score, credit, learn and watch; whether the last optimizer step was skipped."""
        phase, progress, learning = self.throughput.timer.phase, self.progress, self.learning
        responses, scores = self.sampler.draw(self._scores)
        with phase("scoring"):
            steps = self._plan(responses)
            experience = make_experience(
                self.engines,
                responses,
                steps.first_batches,
                scores or self._scores(responses),
                deferred=steps.deferred,
                from_sampler=steps.from_sampler,
            )
            shaped = shape(
                experience.scores,
                experience.ended,
                [len(each.tokens) for each in responses],
                RunningMoments(**progress.moments),
                self.config.rewards,
                longest=self.config.data.max_answer_seq_len,
            )
            progress.moments = asdict(shaped.moments)
        with phase("training"):
            updater = self._updater(experience, shaped.rewards, steps)
            results = self._learn(updater)
        experience = updater.experience.scored()  # with the old outputs
        progress.iteration += 1
        progress.responses += len(responses)
        progress.tokens += sum(map(len, responses))
        of_parts = self.parts.after_iteration(experience, updater.targets)
        if not results:
            self.throughput.timer.take()
            self.setup.run.log.report_event(
                progress.step,
                "empty_batch",
                f"none of the {len(responses)} responses of iteration {progress.iteration} "
                "counts: they have no score, no token could be sampled, or "
                "--mask_truncated_completions excluded them; nothing was trained",
            )
            self.parts.check()
            return False
        spent = {"seconds": progress.seconds, "flops": progress.flops}
        metrics = {
            **self.sampler.metrics(progress.iteration - 1),
            "iteration": progress.iteration,
            **iteration_metrics(results, updater, experience, shaped, self.config),
            **self.throughput(responses, steps, spent, taken=len(results), learning=learning),
        }
        self._report(metrics, of_parts, experience)
        return results[-1].skipped

    def _plan(self, responses: Sequence[Response]) -> Steps:
        """The optimizer steps to come, whose text is read: where it cannot be, none is taken."""
        steps = plan_steps(
            self.config.ppo,
            self._batching,
            responses,
            rows_per_step=self.schedule.rows_per_step,
            iteration=self.progress.iteration,
        )
        if self.pretraining is not None and "actor" in self.learning:
            self.pretraining.read(len(steps.minibatches))
        self._planned = steps
        return steps

    def _scored_batches(self, responses: Sequence[Response]) -> Sequence[ResponseBatch]:
        """Those that are planned, but where dynamic sampling may yet replace prompts."""
        if self.config.ppo.dynamic_sampling:
            return self._batching.in_one_step(responses, self.progress.iteration)
        return self._planned.first_batches

    def _scores(self, responses: Sequence[Response]) -> Scores:
        return self._scorer(responses, self.state())

    def _rescale(self, values: Tensor) -> Tensor:
        """The critic's values in units of shaped rewards; it starts from unscaled scores."""
        if self.config.rewards.reward_scaling != "initial" or self.engines.reward is None:
            return values
        return rescale_values(RunningMoments(**self.progress.moments), values)

    def _updater(self, experience: Experience, rewards: Tensor, steps: Steps) -> Updater:
        ppo, kl_coef = self.config.ppo, self.progress.kl_coef
        if experience.values is not None:
            experience = replace(experience, values=self._rescale(experience.values))
        return Updater(
            self.engines,
            ppo,
            experience,
            steps,
            estimate_advantages=partial(
                advantages_and_returns, rewards=rewards, config=ppo, kl_coef=kl_coef
            ),
            kl_coef=kl_coef,
            entropy_coef=ppo.entropy_coef,
            pretraining=self.pretraining,
            rescale_values=self._rescale,
            max_length=self.config.data.max_answer_seq_len,
            learning=self.learning,
        )

    def _learn(self, updater: Updater) -> list[StepResult]:
        """Take the optimizer steps; one result for each.

        They are read at the end, unless something is to be done before the next step.
        """
        start = self.schedule.steps_before(self.progress.iteration)
        target_kl, results = self.config.ppo.target_kl, list[StepResult]()
        left = self.schedule.num_steps - start
        late = reads_late(device()) and not target_kl and self.parts.take_steps_late
        reads = updater.queue_steps(lambda index: self._rate_factor(start + index), most=left)
        for read in list(reads) if late else reads:
            result = read()
            results.append(result)
            self.progress.count_step(skipped=result.skipped)
            self.parts.after_step(result)
            if target_kl and result.approx_kl > target_kl:
                break
        return results

    def _report(
        self, metrics: dict[str, Any], of_parts: dict[str, float], experience: Experience
    ) -> None:
        """Log metrics, progress line, warnings and a sample; every rank knows and warns of all."""
        self.parts.check_names(metrics.keys())
        metrics |= of_parts
        config, log = self.config, self.setup.run.log
        iteration, total = self.progress.iteration, self.schedule.num_iterations
        check_sampler(metrics, self.setup.models.settings["actor"].dtype, config.batch)
        log.write("train", self.progress.step, metrics)
        if iteration % config.run.logging_steps == 0 or iteration == total:
            left = log.time_left(iteration)
            line = rlhf_line(iteration, total, metrics, left=left, verbose=log.is_verbose)
            log.say_metrics(line)
        for message in self.parts.warnings("after_log", metrics):
            log.report_event(self.progress.step, "warning", message)
        interval = 1 if config.classic.print_answers else config.classic.print_answers_interval
        if interval and (iteration - 1) % interval == 0:
            response, decode = experience.responses[0], self.setup.tokenizer.decode
            answer = decode(response.tokens, skip_special_tokens=True)
            score = f" (score {float(experience.scores[0]):.3g})"
            log.say(sample_lines("sample", decode(response.prompt), answer, score))
        self.parts.check()
