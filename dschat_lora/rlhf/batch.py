"""Responses of an iteration, their padded batches, and the minibatches of an update."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dschat_lora.algos.devices import to_device
from dschat_lora.algos.seeds import permutation
from dschat_lora.algos.segments import Spans
from dschat_lora.algos.sft import IGNORE_INDEX
from dschat_lora.data.batch import SampleCollator, batch_to_device
from dschat_lora.data.budget import cut_evenly
from dschat_lora.data.samples import Sample
from dschat_lora.perf.throughput import StepCounts


@dataclass(frozen=True)
class Response:
    """A prompt and the actor's response to it.

    With an environment, its messages stand between turns of the actor: they are read, and nothing
    is learnt from them.
    """

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]  # up to and including end-of-sequence, if it came
    ended: bool  # whether it did
    group: int  # number of the prompt within the iteration
    columns: bytes = b""  # the row of data, as JSON
    logprobs: tuple[float, ...] = ()  # of the actor's tokens in the decode loop, in nats, if kept
    actor_mask: tuple[bool, ...] = ()  # which of the tokens are the actor's; empty: all
    earlier: bytes = b""  # messages before the last turn, as JSON; empty: there is but one turn
    sampler_logprobs: tuple[float, ...] = ()  # in the distribution they were drawn from

    def __len__(self) -> int:
        return len(self.prompt) + len(self.tokens)

    @property
    def num_actor_tokens(self) -> int:
        """Tokens that the actor chose."""
        return sum(self.actor_mask) if self.actor_mask else len(self.tokens)

    @property
    def last_chosen(self) -> int:
        """Place of the last token that the actor chose, where an environment's may follow it."""
        return len(self.tokens) - 1 - self.actor_mask[::-1].index(True)

    @property
    def last_turn(self) -> tuple[int, ...]:
        """The tokens of the actor's last turn."""
        read = self.actor_mask
        return self.tokens[len(read) - read[::-1].index(False) :] if False in read else self.tokens


@dataclass(frozen=True)
class ResponseBatch:
    """Rows of one response each, right-padded; without any, one row of one padding token.

    Response tokens are those that the actor chose; others in a row are read only.
    A place is an index into the flattened (B T) positions.
    """

    input_ids: Tensor  # (B, T) int64
    position_ids: Tensor  # (B, T) int64, from 0
    segment_ids: Tensor  # (B, T) int64, 1 on tokens, 0 on padding
    logit_positions: Tensor  # (K,) int64 places where response tokens are predicted
    target_ids: Tensor  # (K,) int64 those tokens
    owner: Tensor  # (K,) int64, row of each
    step: Tensor  # (K,) int64, its place among the actor's tokens of the response
    ends: Tensor  # (n,) int64 place of each response's last token
    spans: Spans  # of the responses
    numbers: tuple[int, ...]  # n numbers of the responses within the iteration
    counts: StepCounts  # of this batch

    def to(self, device: torch.device | str) -> "ResponseBatch":
        """The same batch on ``device``."""
        return batch_to_device(self, device)

    @property
    def inputs(self) -> tuple[Tensor, Tensor, Tensor]:
        """Token, position and segment ids."""
        return self.input_ids, self.position_ids, self.segment_ids

    def table(self, values: Tensor, width: int) -> Tensor:
        """(n, width) of the (K,) values of response tokens, 0 elsewhere, with gradient."""
        empty = values.new_zeros(len(self.numbers), width)
        return empty.index_put((self.owner, self.step), values)


def response_mask(responses: Sequence[Response], device: torch.device) -> Tensor:
    """(N, R) bool, True on the actor's tokens of each response; R of the longest, at least 1.

    What an environment said has no place in it: tables hold the actor's tokens one after another.
    """
    lengths = torch.tensor([each.num_actor_tokens for each in responses], dtype=torch.int64)
    width = max(1, int(lengths.max())) if len(lengths) else 1
    return to_device(torch.arange(width) < lengths[:, None], device)


def step_counts(batches: Sequence[ResponseBatch]) -> StepCounts:
    """Sums over this rank's batches."""
    return sum((batch.counts for batch in batches), StepCounts())


@dataclass(frozen=True)
class Minibatch:
    """The responses of one optimizer step."""

    numbers: list[int]  # of all ranks
    micro_batches: list[list[int]]  # of this rank, perhaps empty ones; as many on every rank


def collate(responses: Sequence[Response], numbers: Sequence[int], pad_id: int) -> ResponseBatch:
    """The batch of some responses of an iteration."""
    make = SampleCollator(pad_id)
    batch = make([[_sample(responses[n])] for n in numbers]) if numbers else make.empty()
    width, owner = batch.input_ids.shape[1], batch.logit_positions // batch.input_ids.shape[1]
    counts = torch.tensor([responses[n].num_actor_tokens for n in numbers] or [0])
    before = counts.cumsum(0) - counts  # targets of earlier rows
    rows = torch.arange(len(numbers))
    sizes = torch.tensor([len(responses[n]) for n in numbers], dtype=torch.int64)
    return ResponseBatch(
        input_ids=batch.input_ids,
        position_ids=batch.position_ids,
        segment_ids=batch.segment_ids,
        logit_positions=batch.logit_positions,
        target_ids=batch.target_ids,
        owner=owner,
        step=torch.arange(len(owner)) - before[owner],
        ends=rows * width + sizes - 1,
        spans=batch.spans,
        numbers=tuple(numbers),
        counts=StepCounts(
            num_samples=batch.num_samples,
            num_tokens=batch.num_tokens,
            num_targets=batch.num_targets,
            num_attended=batch.num_attended,
            num_positions=batch.input_ids.numel(),
            num_scored_pairs=len(batch.input_ids) * width**2,
        ),
    )


def _sample(response: Response) -> Sample:
    ids = np.array([*response.prompt, *response.tokens], dtype=np.int32)
    labels = ids.copy()
    labels[: len(response.prompt)] = IGNORE_INDEX
    if response.actor_mask:
        labels[len(response.prompt) :][~np.array(response.actor_mask)] = IGNORE_INDEX
    return Sample(ids, labels)


def make_minibatches(
    lengths: Sequence[int],
    *,
    rows_per_step: int,
    micro_batch_size: int,
    rank: int,
    world_size: int,
    key: tuple[int | str, ...],
    tokens_per_device: int = 0,
) -> list[Minibatch]:
    """The optimizer steps of one pass over the responses.

    Which responses are in a step depends neither on the rank nor on the number of processes.
    Every rank gets as many micro-batches at a step, some perhaps empty.

    ``lengths`` are tokens of each response with its prompt; those of like length share a
    micro-batch. ``key`` is that of the random order. ``tokens_per_device`` bounds the positions of
    a rank's micro-batch, padding included, in place of responses (0: by responses); steps stay the
    same.
    """
    order = permutation(len(lengths), *key)
    per_batch = micro_batch_size * world_size
    steps = []
    for first in range(0, len(order), rows_per_step):
        rows = [int(n) for n in order[first : first + rows_per_step]]
        rows.sort(key=lambda n: -lengths[n])
        if tokens_per_device:
            sizes = np.array([lengths[n] for n in rows])
            cuts = cut_evenly(sizes, tokens_per_device, multiple_of=world_size)
            mine = [rows[cut] for cut in cuts[rank::world_size]]
        else:
            batches = range(0, len(rows), per_batch)
            mine = [rows[start : start + per_batch][rank::world_size] for start in batches]
        steps.append(Minibatch(rows, mine))
    return steps
