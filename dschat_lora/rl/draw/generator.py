"""Rollouts: the actor's responses to prompts, the same for any number of processes."""

import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any, Protocol

from dschat_lora.data.samples import PromptSample
from dschat_lora.engine.distributed import (
    data_rank,
    data_world_size,
    device,
    gather_over_ranks,
    gather_texts,
)
from dschat_lora.generation.sampling import Sampling, undrawn_reason
from dschat_lora.rl.draw.engine import Drawing
from dschat_lora.rl.draw.turn_decoder import TurnDecoder, unanswered
from dschat_lora.rl.response.response import Response
from dschat_lora.rl.response.transfer import (
    as_table,
    from_row,
    response_from_json,
    responses_as_json,
)


class BrokenWeightsError(ValueError):
    """A weight of the actor is not finite, or no answer can be drawn. Raised on every rank."""


# Numbers of responses, these with their environment's messages read, and the number of the turn.
NextTurn = Callable[[Sequence[int], Sequence[Response], int], list[Response]]


class EpisodePlayer(Protocol):
    """Episodes with an environment, such as :class:`~dschat_lora.rl.play.environment.Episodes`."""

    def begin(
        self,
        prompts: Sequence[PromptSample],
        mine: Iterable[int],
        num_generations: int,
        key: tuple[int | str, ...],
    ) -> list[PromptSample]: ...
    def play(
        self,
        responses: Sequence[Response],
        next_turn: NextTurn,
        *,
        max_tokens: int,
        places: Sequence[int],
    ) -> list[Response]: ...


class AgentPlayer(Protocol):
    """Agents that play episodes, such as :class:`~dschat_lora.rl.play.agents.Agents`."""

    def play(
        self,
        copies: Sequence[tuple[Response, tuple[int, int]]],
        decode: Callable[..., Any],
        *,
        key: tuple[int | str, ...],
        max_calls_at_a_time: int,
        is_end: Callable[[int], bool],
    ) -> list[Response]: ...


class Generator:
    """Responses to prompts by an engine; call methods on every rank."""

    def __init__(
        self,
        engine: Drawing,
        *,
        eos_ids: Collection[int],
        batch_size: int,
        find_end: Callable[[Sequence[int]], int | None] = lambda tokens: None,
        episodes: EpisodePlayer | None = None,
        agents: AgentPlayer | None = None,
    ) -> None:
        """Prepare to draw ``batch_size`` responses at a time, by engines that do not take all.

        ``find_end`` says after how many tokens the text of a turn ends, if it does, and
        ``episodes`` what an environment adds to it; or ``agents`` ask for the turns.
        """
        self.engine, self._batch_size, self._eos_ids = engine, batch_size, frozenset(eos_ids)
        self._find_end, self._episodes, self._agents = find_end, episodes, agents
        self._plays_episodes = episodes is not None or agents is not None

    def __call__(
        self,
        prompts: Sequence[PromptSample],
        sampling: Sampling,
        *,
        num_generations: int,
        key: tuple[int | str, ...],
        keep_logprobs: bool = False,
        needed: int | None = None,
    ) -> list[Response]:
        """``num_generations`` responses to each prompt, prompt after prompt, on every rank.

        The prompts are the same on every rank; each data rank answers a share of them. ``key`` is
        that of the random numbers, of which each response has its own. ``keep_logprobs`` keeps the
        decode loop's log-probabilities, of the policy and of what was drawn from.
        Where ``needed`` of the prompts are enough, the others, whose responses end last, get none:
        each batch has its share of them.

        Raises:
            BrokenWeightsError: if a token could not be drawn, as a weight is not finite, or one of
                no response could be.
        """
        # Prompts of like length are decoded together, and ranks have equal work.
        order = _by_length(prompts)
        mine = order[data_rank() :: data_world_size()]
        if self._episodes is not None:
            prompts = self._episodes.begin(prompts, mine, num_generations, key)
        found: dict[int, Response] = {}
        with self.engine.decoding(cuts=needed is not None) as (begin, at_a_time):
            if at_a_time is not None or self._agents is not None:
                at_a_time = max(1, self._batch_size // num_generations)
            else:
                at_a_time = max(1, len(order))
            chunks = -(-len(order[:: data_world_size()]) // at_a_time)

            def decode(*args: Any, **options: Any) -> Any:
                return begin(*args, sampling=sampling, **options)()

            turns = self._turns(decode, sampling, key, keep_logprobs=keep_logprobs)
            for chunk in range(chunks):
                numbers = mine[chunk * at_a_time : (chunk + 1) * at_a_time]
                copies = [(n, k) for n in numbers for k in range(num_generations)]
                places = [n * num_generations + k for n, k in copies]
                if self._agents is not None:
                    played = self._agents.play(
                        [(unanswered(n, prompts[n]), (n, k)) for n, k in copies],
                        decode,
                        key=("rollout", *key),
                        max_calls_at_a_time=self._batch_size,
                        is_end=self._eos_ids.__contains__,
                    )
                    found |= dict(zip(places, played, strict=False))
                    continue
                pairs = [(n, prompts[n]) for n in numbers]
                responses = turns.first(pairs, num_generations, _share_of(needed, numbers, mine))
                if self._episodes is not None:
                    responses = self._episodes.play(
                        responses,
                        partial(turns.next, copies, list(range(len(copies)))),
                        max_tokens=sampling.max_new_tokens,
                        places=places,
                    )
                found |= _by_place(responses, num_generations)
        responses = self._share(found, prompts, num_generations, sampling)
        if any(each.undrawn for each in responses):
            own = self.engine.broken_weights()
            broken = [*dict.fromkeys(chain(*map(json.loads, gather_texts(json.dumps(own)))))]
            if broken or all(each.undrawn for each in responses):
                raise BrokenWeightsError(undrawn_reason(broken))
        return responses

    def begin(
        self,
        prompts: Sequence[PromptSample],
        sampling: Sampling,
        *,
        num_generations: int,
        key: tuple[int | str, ...],
        needed: int | None = None,
    ) -> Callable[[], list[Response]]:
        """Begin on what a call gives, with log-probabilities; what is returned waits for that.

        The engine goes on with the adapter as it is when this is called, while it is trained.
        """
        assert not self._plays_episodes, "turns are asked for one after another"
        mine = _by_length(prompts)[data_rank() :: data_world_size()]
        own = [(n, prompts[n]) for n in mine]
        with self.engine.decoding(cuts=needed is not None) as (begin, _):
            turns = self._turns(
                partial(begin, sampling=sampling), sampling, key, keep_logprobs=True
            )
            share = _share_of(needed, mine, mine)
            wait = turns.ask(own, num_generations, share)

        def responses() -> list[Response]:
            found = turns.answers(own, num_generations, wait(), share)
            drawn = _by_place(found, num_generations)
            return self._share(drawn, prompts, num_generations, sampling)

        return responses

    def _turns(
        self,
        decode: Callable[..., Any],
        sampling: Sampling,
        key: tuple[int | str, ...],
        *,
        keep_logprobs: bool,
    ) -> TurnDecoder:
        return TurnDecoder(
            decode,
            ("rollout", *key),
            sampling.max_new_tokens,
            keep_logprobs=keep_logprobs,
            is_end=self._eos_ids.__contains__,
            find_end=self._find_end,
        )

    def _share(
        self,
        own: Mapping[int, Response],
        prompts: Sequence[PromptSample],
        num_generations: int,
        sampling: Sampling,
    ) -> list[Response]:
        """All ranks' responses by number, from those of this rank; call on every rank."""
        width = sampling.max_new_tokens
        blank = [unanswered(n, prompt) for n, prompt in enumerate(prompts)]
        blank = [each for each in blank for _ in range(num_generations)]
        if self._plays_episodes:
            shares = map(json.loads, gather_texts(responses_as_json(own)))
            found = {int(n): fields for share in shares for n, fields in share.items()}
            return [response_from_json(found[n], each.columns) for n, each in enumerate(blank)]
        whole = gather_over_ranks(as_table(own, width).to(device())).cpu()
        rows = whole[whole[:, 0].argsort()]
        # Of some prompts there may be none.
        numbers = range(len(blank)) if len(rows) == len(blank) else rows[:, 0].long().tolist()
        return [from_row(row, blank[n], width) for row, n in zip(rows, numbers, strict=True)]


def _by_length(prompts: Sequence[PromptSample]) -> list[int]:
    """Numbers of the prompts, the longest first."""
    return sorted(range(len(prompts)), key=lambda n: -len(prompts[n].input_ids))


def _share_of(needed: int | None, batch: Sequence[int], mine: Sequence[int]) -> int | None:
    """How many prompts of a batch are needed, of this rank's and of all that are, in order."""
    if needed is None or not batch:
        return needed
    own = len(range(needed)[data_rank() :: data_world_size()])
    first = mine.index(batch[0])
    return own * (first + len(batch)) // len(mine) - own * first // len(mine)


def _by_place(responses: Sequence[Response], num_generations: int) -> dict[int, Response]:
    """Responses to whole groups by their place among those to all prompts."""
    return {
        each.group * num_generations + n % num_generations: each for n, each in enumerate(responses)
    }
