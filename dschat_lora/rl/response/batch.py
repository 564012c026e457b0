"""Batches of responses: rows of tokens, and minibatches of rows."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from operator import itemgetter

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dschat_lora.algos.seeds import permutation
from dschat_lora.algos.segments import Sizes, Spans, to_device
from dschat_lora.data.batch import PaddedRows, batch_to_device, tree_pairs
from dschat_lora.data.packing import cut_evenly
from dschat_lora.engine.distributed import data_rank, data_world_size, gather_over_ranks
from dschat_lora.perf.throughput import StepCounts
from dschat_lora.rl.response.response import Response


@dataclass(frozen=True)
class ResponseBatch:
    """Rows of one sequence each, right-padded; without any, one row of one padding token.

    Sequences that share their prompt are one row: the prompt, then a branch for each of them.
    Response tokens are those that the actor chose; others in a row are read only.
    A place is an index into the flattened (B T) positions.
    """

    input_ids: Tensor  # (B, T) int64
    position_ids: Tensor  # (B, T) int64, from 0 within each response and its prompt
    segment_ids: Tensor  # (B, T) int64, 1 on tokens, 0 on padding
    logit_positions: Tensor  # (K,) int64 places where response tokens are predicted
    target_ids: Tensor  # (K,) int64 those tokens
    owner: Tensor  # (K,) int64, place of its response among the batch's
    step: Tensor  # (K,) int64, its place among the actor's tokens of the response
    ends: Tensor  # (n,) int64 place of each response's last token
    spans: Spans  # of the responses
    numbers: tuple[int, ...]  # n numbers of the responses within the iteration
    counts: StepCounts  # of this batch
    # The same as the reference reads them, with tokens in the same places of tables; None: as here.
    reference: "ResponseBatch | None" = None

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

    What it only read has no place in it: tables hold the actor's tokens one after another.
    """
    lengths = torch.tensor([each.num_actor_tokens for each in responses], dtype=torch.int64)
    width = max(1, int(lengths.max())) if len(lengths) else 1
    return to_device(torch.arange(width) < lengths[:, None], device)


def gather_rows(numbers: Sequence[int], rows: Tensor) -> Tensor:
    """(N, C) fp32 rows of all ranks in the order of their numbers; call on every rank."""
    table = gather_numbered(numbers, rows)
    return table[table[:, 0].argsort()][:, 1:].float()


def gather_numbered(numbers: Sequence[int], rows: Tensor) -> Tensor:
    """(n, 1 + C) fp64 of all ranks: numbers of responses, and their rows; call on every rank."""
    # Numbers of responses are exact in fp64, fp32 values too.
    own = to_device(torch.tensor(numbers, dtype=torch.float64), rows.device)
    return gather_over_ranks(torch.cat([own[:, None], rows.detach().double()], dim=1))


@dataclass(frozen=True)
class Minibatch:
    """The responses of one optimizer step."""

    numbers: list[int]  # of all ranks
    micro_batches: list[list[int]]  # of this rank, perhaps empty ones; as many on every rank


def collate(
    responses: Sequence[Response],
    numbers: Sequence[int],
    pad_id: int,
    *,
    shares_prompts: bool = False,
) -> ResponseBatch:
    """The batch of some responses of an iteration.

    With ``shares_prompts``, those with the same prompt are one row that holds it once. Only spans
    tell the branches of such a row apart: the model must attend by them.
    """
    chosen = [responses[n] for n in numbers]
    reference = None
    if any(each.reference_prompt is not None for each in chosen):
        prompts = (each.reference_prompt or each.prompt for each in chosen)
        pairs = zip(chosen, prompts, strict=True)
        read = [replace(each, prompt=own, reference_prompt=None) for each, own in pairs]
        reference = collate(read, range(len(read)), pad_id, shares_prompts=shares_prompts)
    owners = [owner for owner, each in enumerate(chosen) for _ in each.sequences]
    sequences = [sequence for each in chosen for sequence in each.sequences]
    rows: dict[object, list[int]] = {}
    for index, each in enumerate(sequences):
        rows.setdefault(each.prompt if shares_prompts else index, []).append(index)
    trees: list[tuple[NDArray[np.int32], Sizes]] = []  # a prompt and what follows, and their sizes
    for members in rows.values():
        parts = [sequences[members[0]].prompt, *(sequences[index].tokens for index in members)]
        ids = np.array([*chain.from_iterable(parts)], dtype=np.int32)
        trees.append((ids, tuple(map(len, parts))))
    width = max((len(ids) for ids, _ in trees), default=1)
    grid = PaddedRows(max(1, len(trees)), width, pad_id)
    paths = [path for row, tree in enumerate(trees) for path in grid.put_tree(row, *tree)]
    order = [index for members in rows.values() for index in members]
    places = [path for _, path in sorted(zip(order, paths, strict=True), key=itemgetter(0))]
    steps = [each.actor_positions for each in sequences]
    along = list(zip(places, steps, strict=True))
    filled, numbered = [0] * len(chosen), []  # steps of each response in its sequences so far
    for owner, step in zip(owners, steps, strict=True):
        numbered.append(filled[owner] + np.arange(len(step)))
        filled[owner] += len(step)
    last = dict(zip(owners, places, strict=True))  # of each response, the last sequence
    tokens = grid.input_ids.reshape(-1)
    return ResponseBatch(
        input_ids=torch.from_numpy(grid.input_ids),
        position_ids=torch.from_numpy(grid.positions),
        segment_ids=torch.from_numpy(grid.segments),
        # The logits of a token's predecessor predict it.
        logit_positions=_joined([path[step - 1] for path, step in along]),
        target_ids=_joined([tokens[path[step]] for path, step in along]),
        owner=_joined([np.full(len(step), n) for n, step in zip(owners, steps, strict=True)]),
        step=_joined(numbered),
        ends=_joined([path[-1:] for path in last.values()]),
        spans=grid.spans(),
        numbers=tuple(numbers),
        counts=StepCounts(
            num_samples=len(chosen),
            num_tokens=sum(len(ids) for ids, _ in trees),
            num_targets=sum(map(len, steps)),
            num_attended=sum(tree_pairs(sizes) for _, sizes in trees),
            num_positions=grid.input_ids.size,
            num_scored_pairs=len(grid.input_ids) * width**2,
        ),
        reference=reference,
    )


def _joined(arrays: Sequence[NDArray[np.int64]]) -> Tensor:
    return torch.from_numpy(np.concatenate([np.zeros(0, np.int64), *arrays]))


def make_minibatches(
    lengths: Sequence[int],
    *,
    rows_per_step: int,
    micro_batch_size: int,
    rank: int,
    world_size: int,
    key: tuple[int | str, ...],
    tokens_per_device: int = 0,
    groups: Sequence[int] | None = None,
) -> list[Minibatch]:
    """The optimizer steps of one pass over the responses.

    Which responses are in a step depends neither on the rank nor on the number of processes.
    Every rank gets as many micro-batches at a step, some perhaps empty.

    ``lengths`` are tokens of each response with its prompt; those of like length share a
    micro-batch. ``key`` is that of the random order. ``tokens_per_device`` bounds the positions of
    a rank's micro-batch, padding included, in place of responses (0: by responses); steps stay the
    same. With ``groups``, the number of each response's prompt, those of a prompt share a
    micro-batch where they can, and not those of like length.
    """
    order = permutation(len(lengths), *key)
    per_batch = micro_batch_size * world_size
    steps = []
    for first in range(0, len(order), rows_per_step):
        rows = [int(n) for n in order[first : first + rows_per_step]]
        rows.sort(key=lambda n: -lengths[n])
        batches = range(0, len(rows), per_batch)
        if tokens_per_device:
            sizes = np.array([lengths[n] for n in rows])
            cuts = cut_evenly(sizes, tokens_per_device, multiple_of=world_size)
            mine = [rows[cut] for cut in cuts[rank::world_size]]
        elif groups is not None:
            rows.sort(key=lambda n: groups[n])
            # This rank's of consecutive parts of sizes as equal as possible.
            parts = [rows[start : start + per_batch] for start in batches]
            ends = [[len(part) * n // world_size for n in (rank, rank + 1)] for part in parts]
            mine = [part[slice(*end)] for part, end in zip(parts, ends, strict=True)]
        else:
            mine = [rows[start : start + per_batch][rank::world_size] for start in batches]
        steps.append(Minibatch(rows, mine))
    return steps


@dataclass(frozen=True)
class Batching:
    """How responses stand in batches and minibatches, the same on every rank."""

    pad_id: int
    micro_batch_size: int
    tokens_per_device: int  # 0: by responses
    seed: int
    shares_prompts: bool  # whether responses to one prompt are branches of one row

    def minibatches(
        self, responses: Sequence[Response], *, rows_per_step: int, iteration: int, passes: int = 1
    ) -> list[Minibatch]:
        """The minibatches of all passes over the responses; see :func:`make_minibatches`."""
        longest = max(len(s.prompt) + len(s.tokens) for r in responses for s in r.sequences)
        # Several sequences of a response stand in as many rows of a batch.
        lengths = [
            len(r.sequences) * longest if r.episode.earlier_sequences else len(r) for r in responses
        ]
        groups = [each.group for each in responses] if self.shares_prompts else None
        return [
            minibatch
            for number in range(passes)
            for minibatch in make_minibatches(
                lengths,
                rows_per_step=rows_per_step,
                micro_batch_size=self.micro_batch_size,
                rank=data_rank(),
                world_size=data_world_size(),
                key=("minibatches", self.seed, iteration, number),
                tokens_per_device=self.tokens_per_device,
                groups=groups,
            )
        ]

    def in_one_step(self, responses: Sequence[Response], iteration: int) -> list[ResponseBatch]:
        """This rank's batches of all responses in one step."""
        (step,) = self.minibatches(responses, rows_per_step=len(responses), iteration=iteration)
        return [*map(self.collator(responses), step.micro_batches)]

    def collator(self, responses: Sequence[Response]) -> Callable[[Sequence[int]], ResponseBatch]:
        """What makes the batch of responses of some numbers."""
        return partial(collate, responses, pad_id=self.pad_id, shares_prompts=self.shares_prompts)
