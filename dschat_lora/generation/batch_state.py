"""Decoding state of a batch, with a key-value cache and without one."""

from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from dschat_lora.algos.segments import block_causal_mask, to_device
from dschat_lora.generation.cuda_graphs import DecodeStep, RecordedSteps
from dschat_lora.generation.kv_cache import KVCache
from dschat_lora.generation.own_columns import Held, OwnColumnTable
from dschat_lora.generation.sampling import Responses
from dschat_lora.lora.collectives import TensorGroup
from dschat_lora.models.backbone import (
    WITHOUT_MASK,
    attends,
    attention_windows,
    cache_argument,
    recurrent_layers,
)

ROW_BUCKETS = (8, 16, 32, 64, 128)
COLUMN_BUCKET = 128  # columns of a step are read in multiples of it, where steps are recorded
PROMPT_BUCKET = 64  # columns of prompts that are read at once


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
        retains: keep the keys and values of sequences that have ended, which later prompts begin
            with.
        record: see :class:`RecordedSteps`; the options of sampling are part of a step.
        group: the ranks that the model is divided among; None where it is whole.

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
        group: TensorGroup | None = None,
    ) -> None:
        self._model, self._group, self._pad_id = model, group, pad_id
        self._buckets, self._retains = buckets, retains
        self._steps = None if record is None else RecordedSteps(record)
        self._recurrent = bool(recurrent_layers(model))
        self._order: list[int] = []  # which sequence each row holds, in use or ended
        self._first: list[int] = []  # column that each sequence begins in
        self.sequences: list[int] = []
        self._filled = self._width = 0  # columns in use, and those of prompts
        self._copies, self._shares = 1, False  # see OwnColumnTable.tell
        rows, columns = capacity
        if buckets:
            rows, columns = rows + -rows % ROW_BUCKETS[0], columns + -columns % COLUMN_BUCKET
        self._own = OwnColumnTable(rows, device)
        # One step adds 1 to all: tokens chosen, the cache's column, and each row's position.
        self._counters = torch.zeros(2 + rows, dtype=torch.int64, device=device)
        self._chosen, self._positions = self._counters[:1], self._counters[2:, None]
        self._cache = KVCache((rows, columns), self._counters[1:2])
        self._num_positions: int | None = getattr(model.config, "max_position_embeddings", None)
        self._windows: dict[str, int | None] = attention_windows(model.config) or {}
        self._ids = torch.full((rows, 1), pad_id, device=device)
        self._sequence = torch.zeros(rows, dtype=torch.int64, device=device)
        # Of each kind of layer (rows, 1, 1, window + columns) that hides everything. The first
        # ``window`` columns come before the cache's, so that hiding what leaves the window needs
        # no special case there.
        hidden, dtype = torch.finfo(model.dtype).min, model.dtype
        shapes = {kind: (rows, 1, 1, (w or 0) + columns) for kind, w in self._windows.items()}
        self._masks = {
            kind: torch.full(shape, hidden, dtype=dtype, device=device)
            for kind, shape in shapes.items()
        }
        self._responses: Responses | None = None

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
        source: "CachedRows | None" = None,
        prefixes: Sequence[tuple[int, int]] | None = None,
    ) -> None:
        """Process each prompt once for all its copies, and choose the first tokens.

        ``prefixes`` has, for each prompt, a sequence of the earlier batch ``source`` and how many
        tokens of it the prompt begins with; at least one follows.
        """
        self._responses, count = responses, len(prompts) * copies
        lengths, device = torch.tensor([len(prompt) for prompt in prompts]), self._ids.device
        room = self._cache.capacity[1] - max(responses.limits)
        self._filled = self._width = self._prompt_columns(int(lengths.max()), room)
        self._copies = copies
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
            new = self._filled
            if source is not None and prefixes is not None:
                new = self._take(source, prefixes, lengths)
            of_new = {kind: mask[:, :, -new:] for kind, mask in masks.items()}
            inputs = ids[:, -new:], positions[:, -new:], of_new
            logits = next_logits(self._model, *inputs, self._cache)[:, -1]
        logits = logits.repeat_interleave(copies, 0)
        self.sequences = list(range(count))
        self._order = [*self.sequences, *(-1 for _ in range(self._cache.capacity[0] - count))]
        self._first = [self._filled - len(prompt) for prompt in prompts for _ in range(copies)]
        self._cache.following, self._cache.copies = None, 0
        self._counters.zero_()
        self._cache.column.fill_(self._filled - 1)  # the last one in use
        self._sequence[:count] = torch.arange(count, device=ids.device)
        self._positions[:count] = positions[:, -1:].repeat_interleave(copies, 0)
        for kind, window in self._windows.items():
            last = masks[kind][:, :, -1:].repeat_interleave(copies, 0)
            self._masks[kind][:count, :, :, window or 0 :][..., : self._filled] = last
        self._own.clear()
        self._tell_columns(self.sequences)
        place = self._sequence[:count], self._chosen
        self._ids[:count, 0] = responses.advance(logits, *place, self._group)

    def _tell_columns(self, living: Collection[int]) -> None:
        """Have rows of sequences that have ended read nothing, and those of one prompt it once."""
        rows = ((row, each) for row, each in enumerate(self.sequences) if each in living)
        first, copies, end = self._first, self._copies, self._width
        self._shares = self._own.tell(
            (row, Held(first[each], each // copies, end)) for row, each in rows
        )

    def _read_by_length(
        self, ids: Tensor, positions: Tensor, masks: dict[str, Tensor], lengths: Tensor
    ) -> Tensor:
        """(B, V) logits after prompts, those of one length together: padding has no state."""
        by_length: list[Tensor] = []
        copies = torch.arange(self._cache.copies)
        for length in sorted({*lengths.tolist()}):
            own = (lengths == length).nonzero()
            rows = to_device((own * len(copies) + copies).flatten(), ids.device)
            own = to_device(own[:, 0], ids.device)
            first = self._filled - length
            self._cache.read(rows, first)
            of_own = {kind: mask[own, :, first:, first:] for kind, mask in masks.items()}
            inputs = ids[own, first:], positions[own, first:], of_own
            by_length.append(next_logits(self._model, *inputs, self._cache)[:, -1])
        order = lengths.argsort(stable=True).argsort()
        return torch.cat(by_length)[to_device(order, ids.device)]

    def _take(
        self, source: "CachedRows", prefixes: Sequence[tuple[int, int]], lengths: Tensor
    ) -> int:
        """Put what was computed before in place; how many of the last columns are not."""
        device = self._ids.device
        known = torch.tensor([length for _, length in prefixes])
        rows = torch.tensor([source._order.index(sequence) for sequence, _ in prefixes])
        first = torch.tensor([source._first[sequence] for sequence, _ in prefixes])
        width = self._filled
        new = self._prompt_columns(int((lengths - known).max()), width)
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
        if self._steps is None:
            self.advance()
        else:
            shape = (self._responses, rows, self._cache.columns, self._shares)
            self._steps.run(shape, self.advance, self._ids.device)

    def advance(self) -> None:
        """One token for every row, in place."""
        assert self._responses is not None
        cache = self._cache
        rows = cache.rows
        self._counters += 1
        if self._responses.ragged and self._num_positions is not None:
            # Rows at their limit go on with the others: nothing reads what they choose.
            self._positions.clamp_(max=self._num_positions - 1)
        masks = {}
        for kind, window in self._windows.items():  # shows the new token, hides what it has left
            mask, before = self._masks[kind], window or 0
            mask.index_fill_(3, cache.column + before if before else cache.column, 0.0)
            if window is not None:
                mask.index_fill_(3, cache.column, torch.finfo(mask.dtype).min)
            masks[kind] = mask[:rows, :, :, before:][..., : cache.columns]
            self._own.mark(masks[kind], cache.column.expand(rows), window)
        inputs = self._ids[:rows], self._positions[:rows], masks, cache
        logits = next_logits(self._model, *inputs)[:, -1]
        place = self._sequence[:rows], self._chosen
        self._ids[:rows, 0] = self._responses.advance(logits, *place, self._group)

    def keep(self, alive: Sequence[bool]) -> None:
        """Move unfinished rows into the places of finished ones, and use the first rows alone.

        ``alive`` says whether each row in use is unfinished; at least one is.
        """
        living = [row for row, lives in enumerate(alive) if lives]
        sequences = {self.sequences[row] for row in living}
        rows, _ = self._rounded(len(living), 0)
        if self._cache.rows - rows < max(1, self._cache.rows // 16):
            self._tell_columns(sequences)
            return
        sources = [row for row in living if row >= rows]
        targets = [row for row in range(rows) if row >= len(alive) or not alive[row]]
        if sources:
            self._move(sources, targets[: len(sources)])
        self._cache.rows = rows
        self.sequences = self.sequences[:rows]
        self._tell_columns(sequences)

    def _move(self, sources: list[int], targets: list[int]) -> None:
        device = self._ids.device
        source, target = (to_device(torch.tensor(x), device) for x in (sources, targets))
        (self._cache.swap if self._retains else self._cache.move)(source, target)
        for state in (self._ids, self._positions, self._sequence, *self._masks.values()):
            state.index_copy_(0, target, state.index_select(0, source))
        order = self._order
        for source_row, target_row in zip(sources, targets, strict=True):
            self.sequences[target_row] = self.sequences[source_row]
            order[source_row], order[target_row] = order[target_row], order[source_row]

    def _prompt_columns(self, tokens: int, most: int) -> int:
        """Columns that are read for so many tokens, ``most`` where rounded they would be more."""
        return min(-(-tokens // PROMPT_BUCKET) * PROMPT_BUCKET, most) if self._buckets else tokens

    def _rounded(self, rows: int, columns: int) -> tuple[int, int]:
        """The shape that a batch takes, where shapes are to be few."""
        if not self._buckets:
            return rows, columns
        largest = ROW_BUCKETS[-1]
        fitting = (bucket for bucket in ROW_BUCKETS if bucket >= rows)
        bucket = next(fitting, -(-rows // largest) * largest)
        rows = min(bucket, max(rows, self._cache.capacity[0]))
        return rows, -(-columns // COLUMN_BUCKET) * COLUMN_BUCKET


class RecomputedRows:
    """Rows without a cache: each step recomputes them, slow but right for any causal model.

    Rows are padded on the right, which no token before the padding attends to.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        pad_id: int,
        device: torch.device,
        group: TensorGroup | None = None,
    ) -> None:
        self._model, self._pad_id, self._device, self._group = model, pad_id, device, group
        self._texts: list[list[int]] = []
        self._chosen = torch.zeros(1, dtype=torch.int64, device=device)
        self.sequences: list[int] = []

    def start(
        self,
        prompts: Sequence[Sequence[int]],
        responses: Responses,
        *,
        copies: int,
        source: object = None,
        prefixes: object = None,
    ) -> None:
        """Choose the first token of each response; nothing of an earlier batch is used."""
        self._responses = responses
        self._texts = [list(prompt) for prompt in prompts for _ in range(copies)]
        self.sequences = list(range(len(self._texts)))
        self.step()

    def step(self) -> None:
        """Choose the next token of every row."""
        texts = [self._texts[sequence] for sequence in self.sequences]
        width = max(len(text) for text in texts)
        rows = [text + [self._pad_id] * (width - len(text)) for text in texts]
        lengths = to_device(torch.tensor([len(text) for text in texts]), self._device)
        real = torch.arange(width, device=self._device) < lengths[:, None]
        ids = to_device(torch.tensor(rows), self._device)
        output = self._model(input_ids=ids, attention_mask=real.long(), use_cache=False)
        rows_of = torch.arange(len(texts), device=self._device)
        sequences = to_device(torch.tensor(self.sequences), self._device)
        logits = output.logits[rows_of, lengths - 1]
        tokens = self._responses.advance(logits, sequences, self._chosen, self._group)
        self._chosen += 1
        for text, token in zip(texts, tokens.tolist(), strict=True):
            text.append(token)

    def keep(self, alive: Sequence[bool]) -> None:
        """Drop the sequences that have ended."""
        pairs = zip(self.sequences, alive, strict=True)
        self.sequences = [sequence for sequence, lives in pairs if lives]


def next_logits(
    model: PreTrainedModel,
    ids: Tensor,
    positions: Tensor,
    masks: dict[str, Tensor],
    cache: object,
    last: int = 1,
) -> Tensor:
    """(B, last, V) logits after the last columns of ``ids``, whose keys and values ``cache`` takes.

    ``masks`` are by kind of attention layer, of which most models have one.
    """
    inputs: dict[str, object] = {"input_ids": ids, "use_cache": True, "logits_to_keep": last}
    inputs[str(cache_argument(model))] = cache
    if attends(model.config):
        # Recurrent layers take none: no row has padding that they read.
        mask = dict.fromkeys(WITHOUT_MASK) | masks if len(masks) > 1 else next(iter(masks.values()))
        inputs |= {"position_ids": positions, "attention_mask": mask}
    logits: Tensor = model(**inputs).logits
    return logits[:, -last:]


def padded_left(
    prompts: Sequence[Sequence[int]],
    pad_id: int,
    device: torch.device,
    *,
    width: int | None = None,
) -> tuple[Tensor, Tensor]:
    """(B, T) int64 tokens padded on the left, and their mask: 1 on tokens, 0 on padding.

    T is ``width``, by default the length of the longest prompt.
    """
    width = width or max(len(prompt) for prompt in prompts)
    ids = [[pad_id] * (width - len(prompt)) + list(prompt) for prompt in prompts]
    real = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    return to_device(torch.tensor(ids), device), to_device(torch.tensor(real), device)
