"""Rollouts: the actor's responses to prompts, the same for any number of processes."""

import gc
import json
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import nn

from dschat_lora.data.samples import PromptSample
from dschat_lora.engine.build import TrainEngine
from dschat_lora.engine.distributed import (
    data_rank,
    data_world_size,
    gather_texts,
    max_over_ranks,
    sum_over_ranks,
)
from dschat_lora.engine.zero import broken_parameters, gathered
from dschat_lora.generation.generate import Decoder, KeepGoing, check_cache
from dschat_lora.generation.sampling import Sampling, undrawn_reason
from dschat_lora.generation.transformers_engine import TransformersDecoder
from dschat_lora.models.loading import PreTrainedModel
from dschat_lora.rl.draw.player import Draw, Key, OneTurn, Player
from dschat_lora.rl.draw.rollout_engines import Drawn, ServerEngine, raise_on_every_rank
from dschat_lora.rl.response.errors import FullWhileDecodingError
from dschat_lora.rl.response.response import Response, share_responses, unanswered

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
        player: Player | None = None,
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
        ``player`` makes responses of turns, by default one of each.
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
        self._find_end, self.player = find_end, player or OneTurn()
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
            retains=self.player.several_turns,
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
        key: Key,
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
        prompts = self.player.begin(prompts, mine, num_generations, key)
        tasks = _tasks(prompts, num_generations)
        found: list[Response] = []
        with self._weights() as (decoder, keep_going):
            counted = self._num_drafts > 0 and self._own_batches
            if counted:
                self._drafts -= torch.tensor([decoder.drafted, decoder.accepted])

            def decode(*args: Any, **options: Any) -> Callable[[], Any]:
                drawn = decoder(*args, sampling=sampling, keep_going=keep_going, **options)
                return lambda: drawn

            # A decoder that refills its rows takes all prompts, and so do other engines. Where some
            # are given up that would be the last ones of the queue, however short their responses.
            refills = self._own_batches and decoder.refills and keep_going is None
            refills = refills and needed is None and not self.player.several_turns
            whole = refills or not (self._own_batches or self.player.in_batches)
            at_a_time = len(order) if whole else max(1, self._batch_size // num_generations)
            for first in range(0, len(order[:: data_world_size()]), max(1, at_a_time)):
                numbers = mine[first : first + at_a_time]
                draw = self._draw(decode, sampling, key, num_generations, keep_logprobs)
                draw.needed = _share_of(needed, numbers, mine)
                own = [each for n in numbers for each in tasks[n]]
                found += self.player.play(own, draw, key=draw.key)
            if counted:
                self._drafts += torch.tensor([decoder.drafted, decoder.accepted])
        responses = self._share(found, tasks, sampling)
        if any(each.undrawn for each in responses):
            names = broken_parameters(dict(self._rollout.named_parameters()))
            broken = [*dict.fromkeys(chain(*map(json.loads, gather_texts(json.dumps(names)))))]
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
        key: Key,
        needed: int | None = None,
    ) -> Callable[[], list[Response]]:
        """Have servers begin on what a call gives, with log-probabilities; it waits for that.

        They go on with the adapter as it is when this is called, while it is trained.
        """
        assert self._servers is not None, "what decodes here holds up training"
        assert not self.player.several_turns, "turns are asked for one after another"
        mine = _by_length(prompts)[data_rank() :: data_world_size()]
        tasks = _tasks(prompts, num_generations)
        with self._servers.decoding():
            begin = partial(self._servers.begin, sampling=sampling)
            draw = self._draw(begin, sampling, key, num_generations, keep_logprobs=True)
            draw.needed = _share_of(needed, mine, mine)
            wait = draw.begin([each for n in mine for each in tasks[n]])
        return lambda: self._share(wait(), tasks, sampling)

    def _draw(
        self,
        decode: Callable[..., Callable[[], Any]],
        sampling: Sampling,
        key: Key,
        num_generations: int,
        keep_logprobs: bool,
    ) -> Draw:
        return Draw(
            decode,
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
            device=self._engine.device,
            as_json=self.player.several_turns,
        )

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


def _tasks(prompts: Sequence[PromptSample], num_generations: int) -> list[list[Response]]:
    """The responses to each prompt before they are drawn."""
    copies = range(num_generations)
    return [
        [unanswered(n, p, n * num_generations + k) for k in copies] for n, p in enumerate(prompts)
    ]
