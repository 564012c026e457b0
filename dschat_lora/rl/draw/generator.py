"""Rollouts: the actor's responses to prompts, the same for any number of processes."""

import json
from collections.abc import Callable, Collection, Sequence
from functools import partial
from itertools import chain
from typing import ClassVar, Protocol

from dschat_lora.data.samples import PromptSample
from dschat_lora.engine.distributed import data_rank, data_world_size, device, gather_texts
from dschat_lora.generation.sampling import Sampling, undrawn_reason
from dschat_lora.rl.draw.engine import Begin, Drawing, Pending
from dschat_lora.rl.draw.player import Draw, Key, OneTurn, Player
from dschat_lora.rl.response.response import Response, share_responses, unanswered
from dschat_lora.runtime.checkpointer import Stateful


class BrokenWeightsError(ValueError):
    """A weight of the actor is not finite, or no answer can be drawn. Raised on every rank."""


class Rollouts(Stateful, Protocol):
    """Responses that are begun before their iteration, as an add-on's ``rollouts`` does.

    Attributes:
        name: of its state in checkpoints.
    """

    name: ClassVar[str]

    def __call__(self) -> list[Response]:
        """Those of the present iteration; call on every rank."""


class Generator:
    """Responses to prompts, by a player whose turns an engine draws; call methods on every rank."""

    def __init__(
        self,
        engine: Drawing,
        player: Player | None = None,
        *,
        eos_ids: Collection[int],
        batch_size: int,
        find_end: Callable[[Sequence[int]], int | None] = lambda tokens: None,
    ) -> None:
        """Prepare to play ``batch_size`` responses at a time where the player takes no more.

        ``find_end`` says after how many tokens the text of a turn ends, if it does.
        """
        self.engine, self.player = engine, player or OneTurn()
        self._batch_size, self._eos_ids, self._find_end = batch_size, frozenset(eos_ids), find_end

    def __call__(
        self,
        prompts: Sequence[PromptSample],
        sampling: Sampling,
        *,
        num_generations: int,
        key: Key,
        keep_logprobs: bool = False,
    ) -> list[Response]:
        """``num_generations`` responses to each prompt, prompt after prompt, on every rank.

        The prompts are the same on every rank; each data rank answers a share of them. ``key`` is
        that of the random numbers, of which each response has its own. ``keep_logprobs`` keeps the
        decode loop's log-probabilities, of the policy and of what was drawn from.

        Raises:
            BrokenWeightsError: if a token could not be drawn, as a weight is not finite, or one of
                no response could be.
        """
        # Prompts of like length are decoded together, and ranks have equal work.
        order = _by_length(prompts)
        mine = order[data_rank() :: data_world_size()]
        prompts = self.player.begin(prompts, mine, num_generations, key)
        tasks = _tasks(prompts, num_generations)
        own: list[Response] = []
        with self.engine.decoding() as (begin, at_a_time):
            rows = self._batch_size if self.player.in_batches else at_a_time
            at_a_time = max(1, len(order) if rows is None else rows // num_generations)
            for first in range(0, len(order[:: data_world_size()]), at_a_time):
                numbers = mine[first : first + at_a_time]
                draw = self._draw(begin, sampling, key, num_generations, keep_logprobs)
                of_batch = [each for n in numbers for each in tasks[n]]
                own += self.player.play(of_batch, draw, key=draw.key)
        responses = self._share(own, tasks, sampling)
        if any(each.undrawn for each in responses):
            names = self.engine.broken_weights()
            broken = [*dict.fromkeys(chain(*map(json.loads, gather_texts(json.dumps(names)))))]
            if broken or all(each.undrawn for each in responses):
                raise BrokenWeightsError(undrawn_reason(broken))
        return responses

    def begin(
        self,
        prompts: Sequence[PromptSample],
        sampling: Sampling,
        *,
        num_generations: int,
        key: Key,
    ) -> Pending[list[Response]]:
        """Begin on what a call gives, with log-probabilities; what is returned waits for that.

        The engine goes on with the adapter as it is when this is called, while it is trained.
        """
        assert not self.player.several_turns, "turns are asked for one after another"
        mine = _by_length(prompts)[data_rank() :: data_world_size()]
        tasks = _tasks(prompts, num_generations)
        with self.engine.decoding() as (begin, _):
            draw = self._draw(begin, sampling, key, num_generations, keep_logprobs=True)
            wait = draw.begin([each for n in mine for each in tasks[n]])
        return lambda: self._share(wait(), tasks, sampling)

    def _draw(
        self, begin: Begin, sampling: Sampling, key: Key, num_generations: int, keep_logprobs: bool
    ) -> Draw:
        return Draw(
            partial(begin, sampling=sampling),
            ("rollout", *key),
            num_generations,
            sampling.max_new_tokens,
            keep_logprobs=keep_logprobs,
            is_end=self._eos_ids.__contains__,
            find_end=self._find_end,
        )

    def _share(
        self, own: Sequence[Response], tasks: Sequence[Sequence[Response]], sampling: Sampling
    ) -> list[Response]:
        """All ranks' responses, from those of this rank; call on every rank."""
        return share_responses(
            {each.origin.place: each for each in own},
            [*chain.from_iterable(tasks)],
            width=sampling.max_new_tokens,
            device=device(),
            as_json=self.player.several_turns,
        )


def _by_length(prompts: Sequence[PromptSample]) -> list[int]:
    """Numbers of the prompts, the longest first."""
    return sorted(range(len(prompts)), key=lambda n: -len(prompts[n].input_ids))


def _tasks(prompts: Sequence[PromptSample], count: int) -> list[list[Response]]:
    """So many responses to each prompt before they are drawn."""
    return [[unanswered(n, p, n * count + k) for k in range(count)] for n, p in enumerate(prompts)]
