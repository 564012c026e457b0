"""The decode loop of this package as a rollout engine."""

import gc
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from dschat_lora.engine.distributed import max_over_ranks
from dschat_lora.engine.zero import broken_parameters, gathered
from dschat_lora.generation.generate import Decoder, KeepGoing, check_cache
from dschat_lora.generation.sampling import Responses
from dschat_lora.models.loading import PreTrainedModel
from dschat_lora.rl.draw.engine import Begin, Drawing, EngineSite, Pending
from dschat_lora.rl.options.config import RlhfConfig
from dschat_lora.rl.response.errors import FullWhileDecodingError
from dschat_lora.rl.response.response import DecodedTurn

# Share of the free memory that the whole weights may take during generation at ZeRO 3.
GATHER_SHARE = 0.6


def whole_weights_fit(parameters: Iterable[Any], here: torch.device) -> bool:
    """Whether the free memory of every rank holds sharded weights whole; call on every rank."""
    sizes = (p.ds_numel * p.element_size() for p in parameters)
    fits = here.type != "cuda" or sum(sizes) < GATHER_SHARE * free_bytes(here)
    return max_over_ranks(float(not fits)) == 0


def free_bytes(here: torch.device) -> int:
    """Memory of a GPU that is free, and what torch has reserved and does not use."""
    unused = torch.cuda.memory_reserved(here) - torch.cuda.memory_allocated(here)
    return int(torch.cuda.mem_get_info(here)[0] + unused)


def cache_columns(config: RlhfConfig) -> int:
    """Most positions of a sequence that decoding has room for.

    Where turns follow each other, a later one reads the longest episode so far, and has room for as
    many tokens as the shortest one may still get.
    """
    further = config.data.max_answer_seq_len if config.players else 0
    return config.data.max_seq_len + further


class OwnEngine(Drawing):
    """Decodes with the actor's present weights; call methods on every rank.

    At ZeRO 3 the weights are gathered once for a whole rollout if the free memory holds them, else
    layer by layer at every token. What a GPU needs for decoding stays in its memory between
    rollouts where the site's plan says so, as long as an update has room beside it. Where as many
    rows as by memory do not fit all the same, half of them decode, once a rollout.
    """

    def __init__(self, site: EngineSite) -> None:
        batch, plan = site.config.batch, site.plan
        self._trained, self._sharded = site.trained, site.sharded
        self._rollout = site.rollout.eval()
        self._at_a_time, self._columns = batch.rows_decoded, cache_columns(site.config)
        self._num_generations, self._has_turns = batch.num_generations, bool(site.config.players)
        self._by_memory, self._say = batch.rows_that_fit is not None, site.run.log.say
        # Ranks that divide a model among them would have to narrow together.
        self._is_whole, self._may_narrow = site.config.parallel.tensor_parallel_size == 1, False
        self._keeps_memory = plan is not None and plan.keeps_cache
        self._update_bytes = 0 if plan is None else plan.update
        self._decoders = dict[int, Decoder]()
        self._make_decoder = partial(
            Decoder,
            eos_ids=site.ends,
            pad_id=site.pad_id,
            device=site.trained.device,
            merged=batch.merge_for_rollouts,
            rounding=lambda: (site.config.run.seed, site.version()),
            refill_share=batch.refill_share,
            unpacked=site.unpacked,
            retains=self._has_turns,
        )

    @contextmanager
    def decoding(self) -> Iterator[tuple[Begin, int | None]]:
        """Within, what decodes, and how many responses at a time; None: all, by refilled rows."""
        try:
            with self._weights() as (model, keep_going):
                if id(model) not in self._decoders:
                    check_cache(model)
                refills = not (keep_going or self._has_turns)
                refills = refills and self._decoder(model).refills
                before = self._at_a_time
                self._may_narrow = refills and self._by_memory and self._is_whole

                def begin(
                    *args: Any, keep_logprobs: bool = False, **options: Any
                ) -> Pending[list[DecodedTurn]]:
                    options |= {"keep_logprobs": keep_logprobs, "keep_going": keep_going}
                    drawn = self._draw(model, *args, **options)
                    return lambda: decoded_turns(drawn, keep_logprobs)

                yield begin, None if refills else self._at_a_time
            if self._by_memory:
                self._narrow_together(before)
        except torch.OutOfMemoryError as error:
            raise FullWhileDecodingError(str(error)) from error
        finally:
            if not self._keeps_memory:
                for each in self._decoders.values():
                    each.release()
                if self._by_memory:  # it may have been most of the memory
                    torch.cuda.empty_cache()

    def _decoder(self, model: PreTrainedModel) -> Decoder:
        if id(model) not in self._decoders:
            largest = self._at_a_time, self._columns
            self._decoders[id(model)] = self._make_decoder(model, largest=largest)
        return self._decoders[id(model)]

    def _draw(self, model: PreTrainedModel, *args: Any, **options: Any) -> Responses:
        """Responses, by half of the rows where all of them do not fit."""
        group = self._num_generations
        rows = self._at_a_time // 2 // group * group
        try:
            return self._decoder(model)(*args, **options)
        except torch.OutOfMemoryError:
            if not (self._may_narrow and rows):
                raise
        # The error is gone, and with it the frames that held what was computed.
        self._may_narrow = False
        self._narrow(rows)
        return self._decoder(model)(*args, **options)

    def _narrow_together(self, before: int) -> None:
        """Decode as few at a time as the rank that decodes fewest; on every rank."""
        rows = -int(max_over_ranks(-float(self._at_a_time)))
        self._narrow(rows)
        if rows < before:
            self._say(
                f"  note         a GPU ran out of memory with {before} responses decoded at a "
                f"time; from here on it decodes {rows}, which does not change the results"
            )

    def _narrow(self, rows: int) -> None:
        """Decode so many responses at a time from here on."""
        if rows < self._at_a_time:
            self._at_a_time = rows
            self._free()

    @contextmanager
    def _weights(self) -> Iterator[tuple[PreTrainedModel, KeepGoing | None]]:
        """A model to decode with and, where ranks must run as many passes, ``keep_going``."""
        parameters: list[Any] = list(self._rollout.parameters())
        if self._trained.zero_stage < 3:
            yield self._rollout, None
        elif whole_weights_fit(parameters, self._trained.device):
            with gathered(parameters):
                yield self._rollout, None
        else:
            self._trained.eval()
            yield self._sharded, lambda done: max_over_ranks(float(not done)) > 0

    @property
    def keeps(self) -> bool:  # type: ignore[override]
        """Whether anything is kept in memory for the next rollout."""
        return self._keeps_memory and bool(self._decoders)

    def release(self) -> None:
        """Free what is kept, from here on after every rollout."""
        self.released, self._keeps_memory = True, False
        self._free()

    def _free(self) -> None:
        self._decoders.clear()
        gc.collect()
        if self._trained.device.type == "cuda":
            torch.cuda.empty_cache()

    def make_room(self) -> None:
        """Free what is kept where it leaves less memory than an update takes."""
        on_gpu = self._trained.device.type == "cuda"
        if self.keeps and on_gpu and free_bytes(self._trained.device) < self._update_bytes:
            self.release()

    def broken_weights(self) -> list[str]:
        """Names of the actor's weights on this rank that are not finite."""
        return broken_parameters(dict(self._rollout.named_parameters()))


def decoded_turns(drawn: Responses, keep_logprobs: bool) -> list[DecodedTurn]:
    """What the decode loop drew."""
    tokens = drawn.tokens()
    own = sampler = [list[float]() for _ in tokens]
    if keep_logprobs:
        own, sampler = drawn.logprobs(), drawn.sampler_logprobs()
    return [*map(DecodedTurn, tokens, own, sampler, drawn.undrawn())]
