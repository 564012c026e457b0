"""The responses of each iteration: which prompts, and who answers them."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from dschat_lora.algos.seeds import permutation, stream_seed
from dschat_lora.config.data import DataConfig
from dschat_lora.data.loader import sample_sources, told_sources
from dschat_lora.data.prepare import Prepared
from dschat_lora.data.rows import DataKind
from dschat_lora.data.samples import PromptSample, SourcedSamples
from dschat_lora.generation.sampling import Sampling
from dschat_lora.rl.draw.generator import Generator
from dschat_lora.rl.draw.prompt_stream import Pool, PromptStream
from dschat_lora.rl.draw.rollouts_ahead import RolloutsAhead
from dschat_lora.rl.learn.dynamic_sampling import Resampled, resample
from dschat_lora.rl.learn.experience import Scores
from dschat_lora.rl.learn.teacher import answer_of
from dschat_lora.rl.loop.schedule import RlhfProgress, make_rlhf_schedule
from dschat_lora.rl.loop.setup import RlhfSetup
from dschat_lora.rl.options.inputs import answers_data
from dschat_lora.rl.response.batch import Batching, ResponseBatch
from dschat_lora.rl.response.response import Response
from dschat_lora.rl.watch.throughput import PhaseTimer


class RolloutSampler:
    """Gives the responses of the present iteration; call methods on every rank.

    ``schedule`` is that of the run, and ``sources`` are the data's where metrics tell them apart.
    ``answers`` (of the data) and ``ahead`` are kept up to date; None where the run has none.
    """

    def __init__(
        self,
        setup: RlhfSetup,
        generator: Generator,
        progress: RlhfProgress,
        batching: Batching,
        timer: PhaseTimer,
    ) -> None:
        self.setup, self.config, self.generator = setup, setup.config, generator
        self.progress, self._batching, self._timer = progress, batching, timer
        config = self.config
        streams = config.data.streaming
        prompts = partial(self._stream, config.data.data, setup.prompts)
        self.schedule = make_rlhf_schedule(
            config, len(setup.prompts.train), prompts if streams else None
        )
        self.sources = told_sources(config.data.data, setup.prompts)
        self._known = self._with_sources(setup.prompts)
        self.answers: PromptStream | SourcedSamples | None = None
        if setup.answers is not None:
            self.answers = self._with_sources(setup.answers)
            if streams:
                responses = self.schedule.order.per_iteration * self.schedule.num_generations
                drawn = round((1 - config.teacher.on_policy_share) * responses)
                data = answers_data(config)
                self.answers = self._stream(data, setup.answers, max(1, drawn), kind="samples")
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

    def __call__(self) -> list[Response]:
        """Those of an iteration: the actor's and, by ``--on_policy_share``, answers of the data.

        Raises:
            BrokenWeightsError, RolloutError: if they could not be drawn.
        """
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
        drawn = self.generator.player.checked(drawn)
        responses = [*(replace(each, group=places[each.group]) for each in drawn), *given]
        prompts = self.setup.teacher_prompts
        return responses if prompts is None else prompts(responses)

    def resample(
        self,
        responses: list[Response],
        scores_of: Callable[[Sequence[Response], Sequence[ResponseBatch]], Scores],
    ) -> Resampled | None:
        """The responses by dynamic sampling, with their scores; None without it."""
        tries, iteration = self.config.ppo.dynamic_sampling, self.progress.iteration
        if not tries:
            return None

        def generate(numbers: Sequence[int], number: int) -> list[Response]:
            with self._timer.phase("generation"):
                return self._generate(numbers, "further", number)

        def score(found: Sequence[Response]) -> Scores:
            with self._timer.phase("scoring"):
                (whole,) = self._batching.minibatches(
                    found, rows_per_step=len(found), iteration=iteration
                )
                make_batch = self._batching.collator(found)
                return scores_of(found, list(map(make_batch, whole.micro_batches)))

        begun = set(self._begun(iteration))
        further = [number for number in self._further(iteration) if number not in begun]
        return resample(responses, further=further, tries=tries, generate=generate, score=score)

    def passes(self) -> dict[str, float]:
        """Passes over the data so far and, of a mixture, over each source."""
        found = self.schedule.order.passes(self.progress.iteration)
        if self.config.data.streaming:
            return found
        times = self.setup.prompts.times
        return found | {f"epochs/{name}": found["epoch"] * times[name] for name in self.sources}

    def cut(self, iteration: int) -> dict[str, int]:
        """Prompts of an iteration whose responses were given up, where some may be."""
        needed = self._needed(iteration)
        return {} if needed is None else {"cut_prompts": len(self._begun(iteration)) - needed}

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
        return [each.drawn_by(self.progress.iteration) for each in found]

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
        if self.sources and not self.config.data.streaming:
            numbers = sample_sources(data, self.sources).numbers
        return SourcedSamples(data.train, numbers)
