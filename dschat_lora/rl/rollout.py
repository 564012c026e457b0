"""Rollouts: the actor's responses to prompts, the same for any number of processes."""

import gc
import json
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dschat_lora.algos.seeds import permutation, stream_seed
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
from dschat_lora.generation.sampling import Responses, Sampling, undrawn_reason
from dschat_lora.generation.transformers_engine import TransformersDecoder
from dschat_lora.models.loading import PreTrainedModel, Tokenizer, end_ids
from dschat_lora.rl.advice import FullWhileDecodingError
from dschat_lora.rl.batch import DecodedTurn, Response, TokenSequence, decoded_turns
from dschat_lora.rl.environment import Episodes
from dschat_lora.rl.roles import Network
from dschat_lora.rl.rollout_engines import Drawn, ServerEngine, raise_on_every_rank

if TYPE_CHECKING:
    from dschat_lora.rl.agents import Agents  # which needs a server's libraries

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


@dataclass(frozen=True)
class PromptOrder:
    """Prompts of each iteration: a random order of all of them, epoch after epoch."""

    num_prompts: int
    per_iteration: int
    seed: int

    @property
    def iterations_per_epoch(self) -> int:
        """The last one of an epoch may have fewer prompts."""
        return -(-self.num_prompts // self.per_iteration)

    def passes(self, iteration: int) -> dict[str, float]:
        """Passes over the prompts before an iteration, as a metric."""
        return {"epoch": iteration / max(1, self.iterations_per_epoch)}

    def size(self, iteration: int) -> int:
        """How many prompts an iteration has."""
        number = iteration % self.iterations_per_epoch
        return min(self.per_iteration, self.num_prompts - number * self.per_iteration)

    def __call__(self, iteration: int) -> list[int]:
        """Numbers of the prompts of an iteration, counted from 0."""
        epoch, number = divmod(iteration, self.iterations_per_epoch)
        order = permutation(self.num_prompts, "prompts", self.seed, epoch)
        first = number * self.per_iteration
        return [int(n) for n in order[first : first + self.per_iteration]]


@dataclass(frozen=True)
class _TurnDecoder:
    """Decodes turns of the actor, each with random numbers of its own."""

    decode: Callable[..., Any]
    key: tuple[int | str, ...]
    max_tokens: int  # of a response
    keep_logprobs: bool
    is_end: Callable[[int], bool]
    find_end: Callable[[Sequence[int]], int | None]

    def first(
        self,
        prompts: Sequence[tuple[int, PromptSample]],
        num_generations: int,
        needed: int | None = None,
    ) -> list[Response]:
        """Responses to prompts, with their numbers, prompt after prompt.

        Of those that are not to the ``needed`` prompts whose responses are the shortest, none.
        """
        found = self.ask(prompts, num_generations, needed)
        return self.answers(prompts, num_generations, found, needed)

    def ask(
        self,
        prompts: Sequence[tuple[int, PromptSample]],
        num_generations: int,
        needed: int | None = None,
    ) -> Any:
        """What the decoder makes of prompts, with their numbers."""
        copies = range(num_generations)
        more = {} if needed is None else {"needed": needed}
        return self.decode(
            [prompt.input_ids.tolist() for _, prompt in prompts],
            seeds=[[stream_seed(*self.key, n, k) for k in copies] for n, _ in prompts],
            keep_logprobs=self.keep_logprobs,
            **more,
        )

    def answers(
        self,
        prompts: Sequence[tuple[int, PromptSample]],
        num_generations: int,
        found: Responses,
        needed: int | None = None,
    ) -> list[Response]:
        """The responses to prompts that were decoded, prompt after prompt; see :meth:`first`."""
        blank = [_unanswered(*each) for each in prompts for _ in range(num_generations)]
        responses = self._continued(blank, found)
        if needed is None:
            return responses
        tokens, longest = found.tokens(), dict[int, int]()
        for group in range(len(prompts)):
            own = slice(group * num_generations, (group + 1) * num_generations)
            if not any(found.cut[own]):
                longest[group] = max(map(len, tokens[own]))
        kept = {n * num_generations for n in sorted(longest, key=longest.__getitem__)[:needed]}
        return [r for n, r in enumerate(responses) if n - n % num_generations in kept]

    def next(
        self,
        copies: Sequence[tuple[int, int]],
        decoded: list[int],
        rows: Sequence[int],
        read: Sequence[Response],
        turn: int,
    ) -> list[Response]:
        """Responses that go on with a turn, of those of ``rows`` among the ``copies``.

        ``decoded`` are the rows of the turn before, and becomes those of this one.
        """
        found = self.decode(
            [[*each.prompt, *each.tokens] for each in read],
            seeds=[[stream_seed(*self.key, *copies[row], "turn", turn)] for row in rows],
            limits=[self.max_tokens - len(each.tokens) for each in read],
            # All but the last token that the actor chose.
            prefixes=[
                (decoded.index(row), len(each.prompt) + each.last_chosen)
                for row, each in zip(rows, read, strict=True)
            ],
            keep_logprobs=self.keep_logprobs,
        )
        decoded[:] = rows
        return self._continued(read, found)

    def _continued(self, responses: Sequence[Response], found: Responses) -> list[Response]:
        turns = decoded_turns(found, keep_logprobs=self.keep_logprobs)
        return [
            _with_turn(response, turn.cut(self.is_end, self.find_end))
            for response, turn in zip(responses, turns, strict=True)
        ]


def _with_turn(to: Response, turn: DecodedTurn) -> Response:
    return replace(
        to,
        tokens=(*to.tokens, *turn.tokens),
        ended=turn.ended,
        logprobs=(*to.logprobs, *turn.logprobs),
        sampler_logprobs=(*to.sampler_logprobs, *turn.sampler_logprobs),
        actor_mask=to.actor_mask and (*to.actor_mask, *(True for _ in turn.tokens)),
        undrawn=turn.undrawn,
    )


def _unanswered(group: int, prompt: PromptSample) -> Response:
    ids = tuple(prompt.input_ids.tolist())
    return Response(ids, (), False, group, prompt.columns, source=prompt.source)


def _from_row(row: Tensor, blank: Response, width: int) -> Response:
    """The response to ``blank``'s prompt of a row of :func:`_table`."""
    return replace(
        blank,
        tokens=tuple(row[4 : 4 + int(row[1])].long().tolist()),
        ended=bool(row[3] > 0),
        undrawn=bool(row[3] < 0),
        logprobs=tuple(row[4 + width :][: int(row[2])].tolist()),
        sampler_logprobs=tuple(row[4 + 2 * width :][: int(row[2])].tolist()),
    )


def _table(own: Mapping[int, Response], width: int) -> Tensor:
    """(n, 4 + 3 width) fp64: numbers, tokens and fp32 values, which are exact in it."""
    table = torch.full((len(own), 4 + 3 * width), -1, dtype=torch.float64)
    for row, (number, each) in zip(table, own.items(), strict=True):
        drawn = torch.tensor([each.logprobs, each.sampler_logprobs])
        sizes = [number, len(each.tokens), drawn.shape[1], each.ended - each.undrawn]
        row[:4] = torch.tensor(sizes, dtype=torch.float64)
        row[4 : 4 + len(each.tokens)] = torch.tensor(each.tokens)
        row[4 + width :].view(2, width)[:, : drawn.shape[1]] = drawn
    return table


def responses_as_json(responses: Mapping[int, Response]) -> str:
    """Responses of episodes by number, without their prompts' columns."""
    known = {n: replace(each, columns=b"") for n, each in responses.items()}
    fields = {n: asdict(each) for n, each in known.items()}
    return json.dumps(fields, default=bytes.decode)


def response_from_json(fields: dict[str, Any], columns: bytes) -> Response:
    """A response of :func:`responses_as_json`."""

    def fixed(found: dict[str, Any]) -> dict[str, Any]:
        return {n: tuple(v) if isinstance(v, list) else v for n, v in found.items()}

    earlier = tuple(TokenSequence(**fixed(each)) for each in fields["earlier_sequences"])
    changed = {"columns": columns, "earlier": fields["earlier"].encode()}
    return Response(**{**fixed(fields), **changed, "earlier_sequences": earlier})


class Generator:
    """Generates responses with the actor's present weights; call methods on every rank.

    At ZeRO 3 the weights are gathered once for a whole phase if the free memory holds them, else
    layer by layer at every token.
    """

    def __init__(
        self,
        engine: TrainEngine[Network],
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
        episodes: Episodes | None = None,
        agents: "Agents | None" = None,
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
            begin = self._episodes.environment.begin
            prompts = begin(prompts, mine, num_generations, key)
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
                        [(_unanswered(n, prompts[n]), (n, k)) for n, k in copies],
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
    ) -> _TurnDecoder:
        return _TurnDecoder(
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
        blank = [_unanswered(n, prompt) for n, prompt in enumerate(prompts)]
        blank = [each for each in blank for _ in range(num_generations)]
        if self._plays_episodes:
            shares = map(json.loads, gather_texts(responses_as_json(own)))
            found = {int(n): fields for share in shares for n, fields in share.items()}
            return [response_from_json(found[n], each.columns) for n, each in enumerate(blank)]
        whole = gather_over_ranks(_table(own, width).to(self._engine.device)).cpu()
        rows = whole[whole[:, 0].argsort()]
        # Of some prompts there may be none.
        numbers = range(len(blank)) if len(rows) == len(blank) else rows[:, 0].long().tolist()
        return [_from_row(row, blank[n], width) for row, n in zip(rows, numbers, strict=True)]

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


def stop_ids(tokenizer: Tokenizer, model: PreTrainedModel, stop_tokens: Sequence[str]) -> list[int]:
    """End tokens of tokenizer, chat template, generation config and ``--stop_tokens``.

    Raises:
        ValueError: if one of ``stop_tokens`` is not one token.
    """
    known = getattr(model.generation_config, "eos_token_id", None)
    configured = (
        list(known) if isinstance(known, list | tuple) else [] if known is None else [known]
    )
    typed = []
    for text in stop_tokens:
        ids = tokenizer.encode(text, add_special_tokens=False)
        if len(ids) != 1:
            raise ValueError(
                f"--stop_tokens {text!r} is {len(ids)} tokens of the actor's tokenizer, it must be "
                "one; for other texts there is --stop_strings"
            )
        typed += ids
    return list(dict.fromkeys([*end_ids(tokenizer), *map(int, configured), *typed]))


def end_of_text(
    tokens: Sequence[int], stop_strings: Sequence[str], decode: Callable[[list[int]], str]
) -> int | None:
    """How many tokens it takes until the text has one of the strings; None if it never does."""

    def has_stop(count: int) -> bool:
        text = decode(list(tokens[:count]))
        return any(string in text for string in stop_strings)

    if not stop_strings or not has_stop(len(tokens)):
        return None
    return bisect_left(range(len(tokens) + 1), True, key=has_stop)
