"""Decoding state of a batch with a key-value cache."""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from dschat_lora.algos.devices import to_device
from dschat_lora.algos.segments import block_causal_mask
from dschat_lora.generation.cuda_graphs import DecodeStep, first_cause, has_failed, run_watching
from dschat_lora.generation.forward import next_logits, padded_left
from dschat_lora.generation.kv_cache import KVCache
from dschat_lora.generation.sampling import Responses
from dschat_lora.lora.parallel import group_of
from dschat_lora.models.backbone import attention_windows
from dschat_lora.models.recurrent import recurrent_layers

ROW_BUCKETS = (8, 16, 32, 64, 128)
COLUMN_BUCKET = 128
PROMPT_BUCKET = 64  # columns of prompts that are read at once


class Rows(Protocol):
    """Sequences that are decoded together, a token of each at a time."""

    sequences: list[int]

    def start(
        self,
        prompts: Sequence[Sequence[int]],
        responses: Responses,
        *,
        copies: int,
        kept: "Kept | None" = None,
    ) -> None:
        """Process the prompts, and choose the first token of ``copies`` responses to each.

        ``kept`` says what of them was computed before.
        """

    def step(self) -> None:
        """Choose the next token of every row."""

    def keep(self, alive: Sequence[bool]) -> None:
        """Drop the sequences that have ended, where that saves work."""


class CachedRows:
    """Rows with a key-value cache: a step computes one token.

    Prompts are padded on the left, so every row writes its next token to the same column. All
    tensors of a step stay where they are, from one call of :meth:`start` to the next; with
    ``buckets`` their shapes change rarely too, so that a GPU replays the step as a graph.

    Args:
        model: in evaluation mode; its weights stay where they are.
        capacity: (rows, columns) of the largest batch, columns counting prompt and response.
        pad_id: any token, since masks hide it.
        device: of the model.
        buckets: round shapes up to a few.
        retains: keep the keys and values of sequences that have ended, for :class:`Kept`.
        record: turns a step of one shape into its replay, as what :func:`graphs_for` returns does;
            None runs every step anew.

    Attributes:
        sequences: which sequence each row in use holds.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        capacity: tuple[int, int],
        *,
        pad_id: int,
        device: torch.device,
        buckets: bool = False,
        retains: bool = False,
        record: Callable[[DecodeStep], DecodeStep] | None = None,
    ) -> None:
        self._model, self._group, self._pad_id = model, group_of(model), pad_id
        self._buckets, self._retains, self._record = buckets, retains, record
        self._recurrent = bool(recurrent_layers(model))
        self._order: list[int] = []  # which sequence each row holds, in use or ended
        self._first: list[int] = []  # column that each sequence begins in
        self.sequences: list[int] = []
        self._filled = 0
        rows, columns = self._rounded(*capacity)
        # One step adds 1 to all: tokens chosen, the cache's column, and each row's position.
        self._counters = torch.zeros(2 + rows, dtype=torch.int64, device=device)
        self._chosen, self._positions = self._counters[:1], self._counters[2:, None]
        self._cache = KVCache((rows, columns), self._counters[1:2])
        self._num_positions: int | None = getattr(model.config, "max_position_embeddings", None)
        self._windows: dict[str, int | None] = attention_windows(model.config) or {}
        self._ids = torch.full((rows, 1), pad_id, device=device)
        self._sequence = torch.zeros(rows, dtype=torch.int64, device=device)
        self._masks = {kind: self._new_mask(window) for kind, window in self._windows.items()}
        self._responses: Responses | None = None
        # Each shape's step of each set of options, which are part of it.
        self._recorded: dict[tuple[Responses, int, int], DecodeStep] = {}
        self._tried: set[tuple[Responses, int, int]] = set()

    def holds(self, rows: int, columns: int) -> bool:
        """Whether a batch of this size fits."""
        most_rows, most_columns = self._cache.capacity
        rows, columns = self._rounded(rows, columns)
        return rows <= most_rows and columns <= most_columns

    def start(
        self,
        prompts: Sequence[Sequence[int]],
        responses: Responses,
        *,
        copies: int,
        kept: "Kept | None" = None,
    ) -> None:
        """Process each prompt once for all its copies, and choose the first tokens."""
        self._responses, count = responses, len(prompts) * copies
        lengths, device = torch.tensor([len(prompt) for prompt in prompts]), self._ids.device
        self._filled = self._width(
            int(lengths.max()), self._cache.capacity[1] - max(responses.limits)
        )
        # On a CPU every row holds a sequence, and attention is ours; in 16 bits the sum of both
        # parts would be rounded once more.
        shares = device.type == "cpu" and not self._buckets and self._model.dtype.itemsize > 2
        shares = shares and not self._recurrent
        self._cache.start(self._rounded(count, 0)[0], copies, self._sequence if shares else None)
        # Rows that are not in use write where nobody reads.
        self._sequence.fill_(responses.capacity)
        for mask in self._masks.values():
            mask.fill_(torch.finfo(mask.dtype).min)
        ids, segments = padded_left(prompts, self._pad_id, device, width=self._filled)
        positions = (segments.cumsum(-1) - 1).clamp(min=0)
        masks = {
            kind: block_causal_mask(segments, self._model.dtype, window=window)
            for kind, window in self._windows.items()
        }
        if self._recurrent:
            logits = self._read_by_length(ids, positions, masks, lengths)
        else:
            new = self._filled if kept is None else self._take(kept, lengths)
            of_new = {kind: mask[:, :, -new:] for kind, mask in masks.items()}
            inputs = ids[:, -new:], positions[:, -new:], of_new
            logits = next_logits(self._model, *inputs, self._cache)
        logits = logits.repeat_interleave(copies, 0)
        self.sequences = list(range(count))
        self._order = [*self.sequences, *(-1 for _ in range(self._cache.capacity[0] - count))]
        self._first = [self._filled - len(prompt) for prompt in prompts for _ in range(copies)]
        self._cache.following = None
        width = self._filled
        self._cache.copies = 0
        self._counters.zero_()
        self._cache.column.fill_(width - 1)  # the last one in use
        self._sequence[:count] = torch.arange(count, device=ids.device)
        self._positions[:count] = positions[:, -1:].repeat_interleave(copies, 0)
        for kind, window in self._windows.items():
            last = masks[kind][:, :, -1:].repeat_interleave(copies, 0)
            self._masks[kind][:count, :, :, window or 0 :][..., :width] = last
        place = self._sequence[:count], self._chosen
        self._ids[:count, 0] = responses.advance(logits, *place, self._group)

    def _read_by_length(
        self, ids: Tensor, positions: Tensor, masks: dict[str, Tensor], lengths: Tensor
    ) -> Tensor:
        """(B, V) logits after prompts, those of one length together: padding has no state."""
        found: list[Tensor] = []
        copies = torch.arange(self._cache.copies)
        for length in sorted({*lengths.tolist()}):
            own = (lengths == length).nonzero()
            rows = to_device((own * len(copies) + copies).flatten(), ids.device)
            own = to_device(own[:, 0], ids.device)
            first = self._filled - length
            self._cache.read(rows, first)
            of_own = {kind: mask[own, :, first:, first:] for kind, mask in masks.items()}
            inputs = ids[own, first:], positions[own, first:], of_own
            found.append(next_logits(self._model, *inputs, self._cache))
        order = lengths.argsort(stable=True).argsort()
        return torch.cat(found)[to_device(order, ids.device)]

    def _take(self, kept: "Kept", lengths: Tensor) -> int:
        """Put what was computed before in place; how many of the last columns are not."""
        device, source = self._ids.device, kept.rows
        known = torch.tensor([length for _, length in kept.prefixes])
        rows = torch.tensor([source._order.index(sequence) for sequence, _ in kept.prefixes])
        first = torch.tensor([source._first[sequence] for sequence, _ in kept.prefixes])
        width = self._filled
        new = self._width(int((lengths - known).max()), width)
        columns = torch.arange(width) + (first + lengths - width)[:, None]
        columns = columns.clamp(0, source._cache.capacity[1] - 1)
        self._cache.take(source._cache, to_device(rows, device), to_device(columns, device))
        row, step = (torch.arange(new) >= new - (lengths - known)[:, None]).nonzero().unbind(1)
        following = (row, step, width - new + step)
        self._cache.following = tuple(to_device(each, device) for each in following)  # type: ignore[assignment]
        self._cache.copies, self._cache.columns = 0, width
        return new

    def step(self) -> None:
        """Choose the next token of every row."""
        self._filled += 1
        assert self._responses is not None
        rows, self._cache.columns = self._rounded(self._cache.rows, self._filled)
        shape = (self._responses, rows, self._cache.columns)
        if has_failed():
            self._record = None
            self._recorded.clear()
        if self._record is None or shape in self._recorded:
            self._recorded.get(shape, self.advance)()
        elif shape not in self._tried:
            # What a graph contains has to have run before: libraries set themselves up then.
            self._tried.add(shape)
            self._try()
        else:
            self._recorded[shape] = self._record_step(self._record)
            self._recorded[shape]()

    def _try(self) -> None:
        """A step as it is, which shows whether it can be captured."""
        if self._ids.device.type != "cuda":
            return self.advance()
        place = run_watching(self.advance)
        if place is not None:
            self._give_up(f"the model waits for the GPU at {place}")

    def _record_step(self, record: Callable[[DecodeStep], DecodeStep]) -> DecodeStep:
        try:
            return record(self.advance)
        except RuntimeError as error:
            self._give_up(first_cause(error))
            return self.advance

    def _give_up(self, reason: str) -> None:
        warnings.warn(f"decoding without CUDA graphs, more slowly: {reason}", stacklevel=2)
        self._record = None
        self._recorded.clear()

    def advance(self) -> None:
        """One token for every row, in place."""
        assert self._responses is not None
        cache = self._cache
        rows = cache.rows
        self._counters += 1
        if self._responses.ragged and self._num_positions is not None:
            # Rows at their limit go on with the others: nothing reads what they choose.
            self._positions.clamp_(max=self._num_positions - 1)
        masks = {kind: self._open_column(kind, w) for kind, w in self._windows.items()}
        logits = next_logits(self._model, self._ids[:rows], self._positions[:rows], masks, cache)
        place = self._sequence[:rows], self._chosen
        self._ids[:rows, 0] = self._responses.advance(logits, *place, self._group)

    def keep(self, alive: Sequence[bool]) -> None:
        """Move unfinished rows into the places of finished ones, and use the first rows alone.

        ``alive`` says whether each row in use is unfinished; at least one is.
        """
        living = [row for row, lives in enumerate(alive) if lives]
        rows, _ = self._rounded(len(living), 0)
        if self._cache.rows - rows < max(1, self._cache.rows // 16):
            return
        sources = [row for row in living if row >= rows]
        targets = [row for row in range(rows) if row >= len(alive) or not alive[row]]
        self._move(sources, targets[: len(sources)])
        self._cache.rows = rows
        self.sequences = self.sequences[:rows]

    def _move(self, sources: list[int], targets: list[int]) -> None:
        if not sources:
            return
        device = self._ids.device
        source, target = (to_device(torch.tensor(x), device) for x in (sources, targets))
        if self._retains:
            self._cache.swap(source, target)
        else:
            self._cache.move(source, target)
        for state in (self._ids, self._positions, self._sequence, *self._masks.values()):
            state.index_copy_(0, target, state.index_select(0, source))
        for source_row, target_row in zip(sources, targets, strict=True):
            self.sequences[target_row] = self.sequences[source_row]
            order = self._order
            order[source_row], order[target_row] = order[target_row], order[source_row]

    def _new_mask(self, window: int | None) -> Tensor:
        """(rows, 1, 1, window + columns) that hides everything.

        The first ``window`` columns come before the cache's, so that hiding what leaves the
        window needs no special case there.
        """
        rows, columns = self._cache.capacity
        hidden = torch.finfo(self._model.dtype).min
        shape = (rows, 1, 1, (window or 0) + columns)
        return torch.full(shape, hidden, dtype=self._model.dtype, device=self._ids.device)

    def _open_column(self, kind: str, window: int | None) -> Tensor:
        """The mask of a step: shows the new token, and hides what its window has left."""
        mask, cache = self._masks[kind], self._cache
        column = cache.column if window is None else cache.column + window
        mask.index_fill_(3, column, 0.0)
        if window is not None:
            mask.index_fill_(3, cache.column, torch.finfo(mask.dtype).min)
        return mask[: cache.rows, :, :, window or 0 :][..., : cache.columns]

    def _width(self, tokens: int, most: int) -> int:
        """Columns that are read for so many tokens, ``most`` where rounded they would be more."""
        return min(-(-tokens // PROMPT_BUCKET) * PROMPT_BUCKET, most) if self._buckets else tokens

    def _rounded(self, rows: int, columns: int) -> tuple[int, int]:
        """The shape that a batch takes, where shapes are to be few."""
        if not self._buckets:
            return rows, columns
        largest = ROW_BUCKETS[-1]
        fitting = (bucket for bucket in ROW_BUCKETS if bucket >= rows)
        rows = next(fitting, -(-rows // largest) * largest)
        return rows, -(-columns // COLUMN_BUCKET) * COLUMN_BUCKET


@dataclass(frozen=True)
class Kept:
    """Keys and values of an earlier batch that prompts begin with.

    ``prefixes`` has, for each prompt, a sequence of those ``rows`` and how many tokens of it the
    prompt begins with; at least one follows.
    """

    rows: CachedRows
    prefixes: Sequence[tuple[int, int]]
