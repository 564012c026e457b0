"""The responses of each iteration: which prompts, and who answers them."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from dschat_lora.config.addons import groups_of
from dschat_lora.config.data import DataConfig
from dschat_lora.data.loader import Tail, sample_sources, sources_in_metrics
from dschat_lora.data.prepare import Prepared
from dschat_lora.data.rows import DataKind
from dschat_lora.data.samples import PromptSample, SourcedSamples
from dschat_lora.engine.distributed import data_world_size
from dschat_lora.generation.sampling import Sampling
from dschat_lora.rl.draw.engine import Pending
from dschat_lora.rl.draw.generator import Generator, Rollouts
from dschat_lora.rl.draw.source import Draws, PromptOrder, Source, prompts_per_iteration
from dschat_lora.rl.loop.schedule import RlhfProgress, RlhfSchedule
from dschat_lora.rl.loop.setup import RlhfSetup
from dschat_lora.rl.options.inputs import text_data
from dschat_lora.rl.response.response import Response
from dschat_lora.rl.score.scores import Scores
from dschat_lora.rl.watch.metrics import source_metrics, version_metrics
from dschat_lora.rl.watch.throughput import PhaseTimer
from dschat_lora.runtime.checkpointer import Stateful


class RolloutSampler:
    """Gives the responses of the present iteration; call methods on every rank.

    ``schedule`` is that of the run, and ``parts`` are what its checkpoints keep, by name.
    """

    def __init__(
        self, setup: RlhfSetup, generator: Generator, progress: RlhfProgress, timer: PhaseTimer
    ) -> None:
        self._setup, self._config, self._generator = setup, setup.config, generator
        self.progress, self.timer = progress, timer
        self._told = sources_in_metrics(setup.config.data.data, setup.data.prompts)
        config, batch, now = setup.config, setup.config.batch, lambda: progress.iteration
        self.schedule = make_rlhf_schedule(setup, now)
        self.source, self._answers = self.schedule.source, None
        if (of_data := setup.data.answers) is not None:
            responses = self.source.per_iteration * batch.num_generations
            count = max(1, round(of_data.share * responses))
            self._answers = _source(setup, of_data.data, of_data.prepared, now, count, "samples")
        sampling = Sampling(
            max_new_tokens=config.data.max_answer_seq_len,
            do_sample=batch.do_sample,
            temperature=batch.temperature,
            top_p=batch.top_p,
            top_k=batch.top_k,
        )
        self._how: dict[str, Any] = {"sampling": sampling, "num_generations": batch.num_generations}
        self._made = dict[int, Draws]()  # of the present iteration and later ones
        makers = (own.rollouts(self) for own in groups_of(config, "rollouts"))
        self._rollouts: Rollouts | None = next(filter(None, makers), None)
        sources = {"stream": self.source, "answers": self._answers}
        self.parts: dict[str, Stateful] = {n: s for n, s in sources.items() if s and s.state()}
        if self._rollouts is not None:
            self.parts[self._rollouts.name] = self._rollouts
        self._metrics: dict[str, float] = {}

    def draw(
        self, scores_of: Callable[[Sequence[Response]], Scores]
    ) -> tuple[list[Response], Scores | None]:
        """The actor's responses and, where the reference has such, answers of data.

        Dynamic sampling replaces some by their scores, and returns those of what is left.

        Raises:
            BrokenWeightsError, RolloutError, StreamError: if they could not be drawn.
        """
        config, iteration = self._config, self.progress.iteration
        phase = self.timer.phase
        with phase("generation"):
            draws, begun = self.draws_of(iteration), self._rollouts
            drawn = begun() if begun else self._generate(draws.prompts)
            responses = [*self._generator.player.checked(drawn)]
            first = len(draws.prompts)
            responses += [replace(each, group=n) for n, each in enumerate(draws.answers, first)]
            responses = self._setup.reference.reading(responses)
        scores, metrics = None, dict[str, float]()
        if tries := config.ppo.dynamic_sampling:
            from dschat_lora.rl.learn.dynamic_sampling import resample

            draw = phase("generation")(lambda asked, n: self._generate(asked, "further", n))
            resampled = resample(
                responses,
                algorithm=config.ppo.rules,
                further=draws.further,
                tries=tries,
                generate=draw,
                score=phase("scoring")(scores_of),
            )
            responses, scores, metrics = resampled
        metrics |= version_metrics(responses, iteration)
        self._metrics = metrics | source_metrics(responses, self._told)
        self._generator.engine.make_room()
        return responses, scores

    def metrics(self, iteration: int) -> dict[str, float]:
        """Of the responses that were drawn last, which were those of an iteration."""
        return self.source.passes(iteration + 1) | self._metrics

    def draws_of(self, iteration: int) -> Draws:
        """What is drawn for an iteration, which is made once."""
        now = self.progress.iteration
        self._made = {number: each for number, each in self._made.items() if number >= now}
        if iteration not in self._made:
            self._made[iteration] = self._make_draws(iteration)
        return self._made[iteration]

    def begin(self, draws: Draws, iteration: int) -> Pending[list[Response]]:
        """What waits for the responses of an iteration, which are begun on."""
        key = (self._config.run.seed, iteration)
        return self._generator.begin(draws.prompts, key=key, **self._how)

    def _make_draws(self, iteration: int) -> Draws:
        """What is drawn for an iteration: a function of its number."""
        config, block = self._config, self.source.block(iteration)
        prompts = [*block]
        further = block.others("further prompts", config.run.seed, iteration)
        answers = list[Response]()
        if self._answers is not None:
            pool = self._answers.block(iteration).pool
            prompts, answers = self._setup.reference.mixed(prompts, pool, iteration=iteration)
        return Draws(prompts, further, answers)

    def _generate(self, prompts: Sequence[PromptSample], *more: int | str) -> list[Response]:
        """Responses to the prompts; ``more`` is of the seed."""
        if not prompts:
            return []
        iteration = self.progress.iteration
        key = (self._config.run.seed, iteration, *more)
        drawn = self._generator(prompts, key=key, keep_logprobs=True, **self._how)
        return drawn if self._rollouts is None else [each.drawn_by(iteration) for each in drawn]


def _source(
    setup: RlhfSetup,
    data: DataConfig,
    prepared: Prepared,
    iteration: Callable[[], int],
    per_iteration: int,
    kind: DataKind = "prompts",
) -> Source:
    """The samples of each iteration: ``prepared``, or what is read on of which it is the head."""
    config = setup.config
    if data.tail is not None:
        tail: Tail = data.tail
        how: dict[str, Any] = {"per_iteration": per_iteration, "iteration": iteration, "kind": kind}
        how["beside"] = text_data(config)
        source: Source = tail.source(setup, data, prepared, **how)
        return source
    count, told = len(prepared.train), sources_in_metrics(config.data.data, setup.data.prompts)
    numbers = sample_sources(prepared, told).numbers if told else np.zeros(count, np.int64)
    samples = SourcedSamples(prepared.train, numbers)
    times = {name: prepared.times[name] for name in told}
    return PromptOrder(count, per_iteration, config.run.seed, samples, times)


def make_rlhf_schedule(setup: RlhfSetup, iteration: Callable[[], int] = lambda: 0) -> RlhfSchedule:
    """The schedule of a run; ``iteration`` is the one that is next."""
    config, batch = setup.config, setup.config.batch
    rows = batch.per_device_training_batch_size * batch.gradient_accumulation_steps
    size = prompts_per_iteration(batch)
    return RlhfSchedule(
        _source(setup, config.data.data, setup.data.prompts, iteration, size),
        num_generations=batch.num_generations,
        rows_per_step=rows * data_world_size(),
        ppo_epochs=config.ppo.ppo_epochs,
        num_epochs=config.optim.num_train_epochs,
        max_steps=config.optim.max_steps,
        eval_interval=config.run.eval_interval,
    )
