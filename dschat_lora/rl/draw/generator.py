"""Rollouts: the actor's responses to prompts, the same for any number of processes."""

import gc
import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import Any, Protocol

import torch
from torch import nn

from dschat_lora.data.samples import PromptSample
from dschat_lora.engine.build import TrainEngine
from dschat_lora.engine.distributed import (
    data_rank,
    data_world_size,
    gather_over_ranks,
    gather_texts,
    max_over_ranks,
    sum_over_ranks,
)
from dschat_lora.engine.zero import broken_parameters, gathered
from dschat_lora.generation.generate import Decoder, KeepGoing, check_cache
from dschat_lora.generation.sampling import Sampling, undrawn_reason
from dschat_lora.generation.transformers_engine import TransformersDecoder
from dschat_lora.models.loading import PreTrainedModel
from dschat_lora.rl.draw.rollout_engines import Drawn, ServerEngine, raise_on_every_rank
from dschat_lora.rl.draw.turn_decoder import TurnDecoder, unanswered
from dschat_lora.rl.response.errors import FullWhileDecodingError
from dschat_lora.rl.response.response import Response
from dschat_lora.rl.response.transfer import (
    as_table,
    from_row,
    response_from_json,
    responses_as_json,
)

# Share of the free memory that the whole weights may take during generation at ZeRO 3.
GATHER_SHARE = 0.6


def whole_weights_fit(parameters: Iterable[Any], here: torch.device) -> bool:
    """Whether the free memory of every rank holds sharded weights whole; call on every rank."""
    fits = True
    if here.type == "cuda":
        size = sum(p.ds_numel * p.element_size() for p in parameters)
        fits = size < GATHER_SHARE * free_bytes(here)
    return max_over_ranks(float(not fits)) == 0


def free_bytes(here: torch.device) -> int:
    """Memory of a GPU that is free, and what torch has reserved and does not use."""
    unused = torch.cuda.memory_reserved(here) - torch.cuda.memory_allocated(here)
    return int(torch.cuda.mem_get_info(here)[0] + unused)


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
    """Generates responses with the actor's present weights; call methods on every rank.

    At ZeRO 3 the weights are gathered once for a whole phase if the free memory holds them, else
    layer by layer at every token.
    """

    def __init__(
        self,
        engine: TrainEngine[nn.Module],
        rollout: PreTrainedModel,
        sharded: PreTrainedModel,
        *,
        eos_ids: Collection[int],
        pad_id: int,
        batch_size: int,
        max_length: int = 0,
        keeps_memory: bool = False,
        update_bytes: int = 0,
        merged: bool = False,
        unpacked: bool | None = None,
        num_drafts: int = 0,
        find_end: Callable[[Sequence[int]], int | None] = lambda tokens: None,
        episodes: EpisodePlayer | None = None,
        agents: AgentPlayer | None = None,
        by_transformers: bool = False,
        servers: ServerEngine | None = None,
    ) -> None:
        """Prepare to decode ``batch_size`` responses at a time, of ``max_length`` with the prompt.

        What a GPU needs for that stays in its memory between calls if ``keeps_memory``, as long as
        an update, which takes ``update_bytes`` by estimate, has room beside it. With
        ``merged``, adapters are added to copies of the weights, and ``unpacked`` ones are copies of
        4-bit weights (None: as the free memory allows).
        ``by_transformers``, or by ``servers``, another engine decodes, which takes all responses of
        a call and sees to its batches itself.
        ``find_end`` says after how many tokens the text of a turn ends, if it does, and
        ``episodes`` what an environment adds to it; or ``agents`` ask for the turns.
        ``rollout`` is the actor's model in modules without the engine's hooks, ``sharded`` in the
        engine's modules, which gather their weights.
        """
        self._engine, self._rollout, self._batch_size = engine, rollout.eval(), batch_size
        self._eos_ids, self._keeps_memory = frozenset(eos_ids), keeps_memory
        self._update_bytes = update_bytes
        self.released = False  # whether what was kept had to go
        self._num_drafts = num_drafts
        self._drafts = torch.zeros(2, dtype=torch.float64)  # drafted, and accepted
        self._sharded, self._decoders = sharded, dict[int, Any]()
        self._find_end, self._episodes, self._agents = find_end, episodes, agents
        self._plays_episodes = episodes is not None or agents is not None
        self._servers = servers
        self._own_batches = not by_transformers and servers is None
        self._make_decoder: Callable[[PreTrainedModel], Any] = partial(
            Decoder,
            eos_ids=eos_ids,
            pad_id=pad_id,
            device=engine.device,
            largest=(batch_size, max_length),
            merged=merged,
            unpacked=unpacked,
            retains=self._plays_episodes,
            num_drafts=num_drafts,
        )
        if by_transformers:
            self._make_decoder = lambda model: partial(
                _raising_together,
                TransformersDecoder(model, eos_ids=eos_ids, pad_id=pad_id, batch_size=batch_size),
            )

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
        with self._weights() as (decoder, keep_going):
            counted = self._num_drafts > 0 and self._own_batches
            if counted:
                self._drafts -= torch.tensor([decoder.drafted, decoder.accepted])
            # A decoder that refills its rows takes all prompts, and so do other engines. Where some
            # are given up that would be the last ones of the queue, however short their responses.
            refills = self._own_batches and decoder.refills and keep_going is None
            refills = refills and needed is None
            batches = self._own_batches and not (refills and self._episodes is None)
            batches = batches or self._agents is not None
            at_a_time = max(1, self._batch_size // num_generations if batches else len(order))
            chunks = -(-len(order[:: data_world_size()]) // at_a_time)
            decode = partial(decoder, sampling=sampling, keep_going=keep_going)
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
            if counted:
                self._drafts += torch.tensor([decoder.drafted, decoder.accepted])
        responses = self._share(found, prompts, num_generations, sampling)
        if any(each.undrawn for each in responses):
            own = broken_parameters(dict(self._rollout.named_parameters()))
            broken = [*dict.fromkeys(chain(*map(json.loads, gather_texts(json.dumps(own)))))]
            if broken or all(each.undrawn for each in responses):
                raise BrokenWeightsError(undrawn_reason(broken))
        return responses

    def draft_metrics(self) -> dict[str, float | None]:
        """Guessed tokens since the last call, and the share of them that was drawn; on every rank.

        Nothing without prompt look-up.
        """
        if not self._num_drafts:
            return {}
        drafted, accepted = sum_over_ranks(self._drafts.tolist())
        self._drafts.zero_()
        share = accepted / drafted if drafted else None
        return {"draft_tokens": drafted, "draft_acceptance": share}

    @property
    def keeps(self) -> bool:
        """Whether anything is kept in memory for the next call."""
        return bool(self._decoders)

    def release(self) -> None:
        """Free what is kept, from here on after every call."""
        self.released, self._keeps_memory = True, False
        self._decoders.clear()
        gc.collect()
        if self._engine.device.type == "cuda":
            torch.cuda.empty_cache()

    def make_room(self) -> None:
        """Free what is kept where it leaves less memory than an update takes."""
        on_gpu = self._engine.device.type == "cuda"
        if self.keeps and on_gpu and free_bytes(self._engine.device) < self._update_bytes:
            self.release()

    def begin(
        self,
        prompts: Sequence[PromptSample],
        sampling: Sampling,
        *,
        num_generations: int,
        key: tuple[int | str, ...],
        needed: int | None = None,
    ) -> Callable[[], list[Response]]:
        """Have servers begin on what a call gives, with log-probabilities; it waits for that.

        They go on with the adapter as it is when this is called, while it is trained.
        """
        assert self._servers is not None, "what decodes here holds up training"
        assert not self._plays_episodes, "turns are asked for one after another"
        mine = _by_length(prompts)[data_rank() :: data_world_size()]
        own = [(n, prompts[n]) for n in mine]
        with self._servers.decoding():
            begin = partial(self._servers.begin, sampling=sampling)
            turns = self._turns(begin, sampling, key, keep_logprobs=True)
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
        whole = gather_over_ranks(as_table(own, width).to(self._engine.device)).cpu()
        rows = whole[whole[:, 0].argsort()]
        # Of some prompts there may be none.
        numbers = range(len(blank)) if len(rows) == len(blank) else rows[:, 0].long().tolist()
        return [from_row(row, blank[n], width) for row, n in zip(rows, numbers, strict=True)]

    @contextmanager
    def _weights(self) -> Iterator[tuple[Any, KeepGoing | None]]:
        """What to decode with, and where ranks must run as many passes, ``keep_going``."""
        if self._servers is not None:
            with self._servers.decoding() as decode:
                yield decode, None
            return
        try:
            if self._engine.zero_stage < 3:
                yield self._decoder(self._rollout), None
                return
            parameters: list[Any] = list(self._rollout.parameters())
            if not self._fits(parameters):
                self._engine.eval()
                decoder = self._decoder(self._sharded)
                yield decoder, lambda done: max_over_ranks(float(not done)) > 0
                return
            with gathered(parameters):
                yield self._decoder(self._rollout), None
        except torch.OutOfMemoryError as error:
            raise FullWhileDecodingError(str(error)) from error
        finally:
            if not self._keeps_memory:
                self._decoders.clear()

    def _decoder(self, model: PreTrainedModel) -> Any:
        if id(model) not in self._decoders:
            if self._own_batches:
                check_cache(model)
            self._decoders[id(model)] = self._make_decoder(model)
        return self._decoders[id(model)]

    def _fits(self, parameters: list[Any]) -> bool:
        return whole_weights_fit(parameters, self._engine.device)


def _raising_together(decoder: TransformersDecoder, *args: Any, **options: Any) -> Drawn:
    """What a decoder draws; call equally often on every rank.

    Raises:
        RolloutError: on every rank, if it fails on one.
    """
    failure = ""
    try:
        found = decoder(*args, **options)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        failure = str(error)
    raise_on_every_rank(failure)
    return found


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
