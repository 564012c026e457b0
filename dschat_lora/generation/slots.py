"""Continuous batching: rows join and leave a running batch between any two tokens."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial

import torch
from torch import Tensor
from transformers import PreTrainedModel

from dschat_lora.algos.segments import to_device
from dschat_lora.generation.batch_state import COLUMN_BUCKET, next_logits, padded_left
from dschat_lora.generation.cuda_graphs import DecodeStep, RecordedSteps, graphs_for
from dschat_lora.generation.fast_linears import FastLinears
from dschat_lora.generation.kv_cache import RecurrentStates, fast_attention, takes_cache
from dschat_lora.generation.prefix_cache import Layers, PrefixCache, can_keep_prefixes
from dschat_lora.generation.sampling import Sampling, sample_tokens
from dschat_lora.lora.mixed import AdapterRows
from dschat_lora.models.backbone import attention_windows, recurrent_layers
from dschat_lora.models.causal_lm import fp32_logits


class SlotCache(RecurrentStates):
    """``past_key_values`` of a transformers model, where token p of a row lies in column p.

    A layer's keys and values are (rows, heads, columns, D) each. They grow with the batch and are
    kept then. What masks hide of a row is finite: it holds nothing of rows that have gone.

    Attributes:
        rows: that each layer holds.
    """

    def __init__(self) -> None:
        super().__init__()
        self.rows = self._columns = 0  # that each layer holds
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}
        self._rows_in_use: slice | Tensor = slice(0)
        self._places: tuple[Tensor, Tensor] | None = None  # row and column of each new token
        self._width = 0

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's keys and values."""
        return sum(store[0, :, 0].nbytes for stores in self._layers.values() for store in stores)

    def reserve(self, rows: int, columns: int) -> bool:
        """Make room for so many rows and columns; whether stores were moved for it."""
        before = self.rows, self._columns
        if rows > self.rows:
            self.rows = max(rows, 2 * self.rows)
        if columns > self._columns:
            grown = max(columns, self._columns * 3 // 2)
            self._columns = -(-grown // COLUMN_BUCKET) * COLUMN_BUCKET
        for index, (keys, values) in self._layers.items():
            if keys.shape[0] < self.rows or keys.shape[2] < self._columns:
                self._layers[index] = self._grown(keys), self._grown(values)
        for name, state in self._states.items():
            if len(state) < self.rows:
                self._states[name] = state.new_zeros(self.rows, *state.shape[1:])
                self._states[name][: len(state)] = state
        return before != (self.rows, self._columns)

    def _grown(self, store: Tensor) -> Tensor:
        rows, heads, columns, size = store.shape
        grown = store.new_zeros(self.rows, heads, self._columns, size)
        grown[:rows, :, :columns] = store
        return grown

    def read_prompts(self, rows: Tensor, columns: Tensor, width: int) -> None:
        """What is stored next are tokens of (B,) rows, in (B, T) columns.

        They attend to the first ``width`` columns.
        """
        self._rows_in_use, self._places, self._width = rows, (rows[:, None], columns), width

    def read_tokens(self, columns: Tensor, width: int) -> None:
        """What is stored next is one token of each of the first rows, in (B, 1) columns."""
        rows = torch.arange(len(columns), device=columns.device)
        self._rows_in_use, self._places = slice(len(columns)), (rows[:, None], columns)
        self._width = width

    def _state_rows(self) -> tuple[int, Tensor | None, int]:
        rows = self._rows_in_use
        return (self.rows, None, rows.stop) if isinstance(rows, slice) else (self.rows, rows, 0)

    def update(
        self, key: Tensor, value: Tensor, layer_idx: int, *_: object, **__: object
    ) -> tuple[Tensor, Tensor]:
        """Store (B, heads, T, D) of new tokens; returns the keys and values to attend to."""
        if layer_idx not in self._layers:
            shapes = [(self.rows, x.shape[1], self._columns, x.shape[3]) for x in (key, value)]
            self._layers[layer_idx] = key.new_zeros(shapes[0]), value.new_zeros(shapes[1])
        stores = self._layers[layer_idx]
        assert self._places is not None
        rows, columns = self._places
        for store, new in zip(stores, (key, value), strict=True):
            store[rows, :, columns] = new.transpose(1, 2)
        keys, values = (store[self._rows_in_use, :, : self._width] for store in stores)
        return keys, values

    def copy_of(self, row: int, columns: int) -> Layers:
        """The first keys and values of a row, (heads, columns, D) of each layer."""
        return {
            index: (keys[row, :, :columns].clone(), values[row, :, :columns].clone())
            for index, (keys, values) in self._layers.items()
        }

    def put(self, row: int, layers: Layers, columns: int) -> None:
        """Begin a row with the first ``columns`` of what :meth:`copy_of` gave; zeros follow."""
        for stores in self._layers.values():
            for store in stores:
                store[row] = 0
        for index, kept in layers.items():
            for store, entries in zip(self._layers[index], kept, strict=True):
                store[row, :, :columns] = entries[:, :columns]

    def move(self, source: int, target: int) -> None:
        """Copy one row over another."""
        for stores in self._layers.values():
            for store in stores:
                store[target] = store[source]
        for state in self._states.values():
            state[target] = state[source]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns in use; some models call it, but with given positions none depends on it."""
        return self._width


class SlotRows:
    """A batch whose rows come and go; each row may use another adapter.

    Where steps are recorded, and on a GPU, their shapes are few: rows are a power of two, those
    that hold no sequence read and write where nobody else does.

    Args:
        model: in evaluation mode; whole, with a kind of attention that takes our cache.
        adapters: of the model's mixed layers; None where it has none.
        pad_id: any token.
        prefix_cache: keep keys and values of rows that have gone, for prompts that begin with
            their tokens.
        record: see :class:`RecordedSteps`; by default CUDA graphs on a GPU.

    Raises:
        ValueError: if the architecture cannot decode with our cache.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        adapters: AdapterRows | None = None,
        *,
        pad_id: int,
        prefix_cache: bool = True,
        record: Callable[[DecodeStep], DecodeStep] | None = None,
    ) -> None:
        windows = attention_windows(model.config)
        if windows is None or not takes_cache(model):
            raise ValueError(
                f"{type(model).__name__} cannot decode several requests in one batch: it has "
                "layers whose states our cache does not hold"
            )
        self._model, self._adapters, self._pad_id = model, adapters, pad_id
        self._windows, self._device = windows, model.device
        self._recurrent = bool(recurrent_layers(model))
        self._cache = SlotCache()
        keeps = prefix_cache and can_keep_prefixes(model)
        self._prefixes = PrefixCache() if keeps else None
        if record is None and self._device.type == "cuda":
            record = graphs_for(model)
        self._has_few_shapes = record is not None or self._device.type == "cuda"
        self._steps = RecordedSteps(record)
        # Of each row in a step: token, position and adapter; and the logits after it.
        self._inputs = torch.zeros(3, 0, dtype=torch.int64, device=self._device)
        self._logits = torch.zeros(0)
        self._tokens: list[list[int]] = []  # of each row in the cache
        self._numbers: list[int] = []  # adapter of each row
        # Not stacked: several adapters have the same weight, which can lie in one stack alone.
        self._linears = FastLinears(model, stacked=False)

    def __len__(self) -> int:
        """Rows in use."""
        return len(self._tokens)

    @contextmanager
    def kernels(self) -> Iterator[None]:
        """Within, layers compute as is best for a few tokens; weights must not change."""
        with ExitStack() as stack:
            stack.enter_context(self._linears.in_use())
            stack.enter_context(fp32_logits(self._model))
            stack.enter_context(fast_attention(self._model))
            yield

    def join(
        self, prompts: Sequence[Sequence[int]], adapters: Sequence[int]
    ) -> tuple[Tensor, list[int]]:
        """Let prompts become the last rows, each with its adapter's number.

        Returns:
            (B, V) logits after them, and how many tokens of each were not computed, as an earlier
            row began with them.
        """
        numbers = range(len(prompts))
        self._reserve(len(self) + len(prompts), max(map(len, prompts)) + 1)
        known = [self._take_prefix(len(self) + i, prompts[i], adapters[i]) for i in numbers]
        # Recurrent layers would take padding for tokens. Beside a whole prompt, what follows a
        # prefix would be padded to its width.
        batches: dict[int, list[int]] = {}
        for i in numbers:
            batches.setdefault(len(prompts[i]) if self._recurrent else known[i] > 0, []).append(i)
        logits = torch.cat(
            [
                self._read(
                    [prompts[i] for i in batch],
                    [known[i] for i in batch],
                    rows=[len(self) + i for i in batch],
                    adapters=[adapters[i] for i in batch],
                )
                for batch in batches.values()
            ]
        )
        order = [i for batch in batches.values() for i in batch]
        self._tokens += map(list, prompts)
        self._numbers += adapters
        return logits[sorted(numbers, key=order.__getitem__)], known

    def _take_prefix(self, row: int, prompt: Sequence[int], adapter: int) -> int:
        """Put what is known of a prompt into a row; how many tokens, of which the last is none."""
        found: tuple[Layers, int] = ({}, 0)
        if self._prefixes is not None:
            found = self._prefixes.find(adapter, prompt[:-1])
        self._cache.put(row, *found)
        return found[1]

    def _read(
        self,
        prompts: Sequence[Sequence[int]],
        known: Sequence[int],
        *,
        rows: Sequence[int],
        adapters: Sequence[int],
    ) -> Tensor:
        """(B, V) logits after prompts, of whose tokens the first ``known`` are in their rows."""
        rests = [prompt[first:] for prompt, first in zip(prompts, known, strict=True)]
        ids, real = padded_left(rests, self._pad_id, self._device)
        lengths, firsts, row = (
            to_device(torch.tensor(each), self._device)
            for each in ([*map(len, prompts)], known, rows)
        )
        positions = (real.cumsum(-1) - 1).clamp(min=0) + firsts[:, None]
        # Padding goes behind the prompt, where the next token will replace it.
        columns = torch.where(real > 0, positions, lengths[:, None])
        width = max(map(len, prompts))
        if self._has_few_shapes:
            width += -width % COLUMN_BUCKET
        self._cache.read_prompts(row, columns, width)
        return self._forward(ids, positions, width, adapters)

    def step(self, tokens: Sequence[int]) -> Tensor:
        """(B, V) logits after one more token of every row; recorded ones hold until the next."""
        lengths = [*map(len, self._tokens)]
        count, rows, width = len(lengths), len(lengths), max(lengths) + 1
        if self._has_few_shapes:
            rows = 1 << (rows - 1).bit_length()
            width += -width % COLUMN_BUCKET
        self._reserve(rows, width)
        given = torch.zeros(3, rows, dtype=torch.int64)
        given[:, :count] = torch.tensor([tokens, lengths, self._numbers])
        self._inputs[:, :rows].copy_(to_device(given, self._device))
        self._steps.run((rows, width), partial(self._advance, rows, width), self._device)
        for row, token in zip(self._tokens, tokens, strict=True):
            row.append(token)
        return self._logits[:count]

    def _advance(self, rows: int, width: int) -> None:
        """One token of each of the first rows, whose inputs and logits stay where they are."""
        ids, positions, numbers = self._inputs[:, :rows]
        self._cache.read_tokens(positions[:, None], width)
        logits = self._forward(ids[:, None], positions[:, None], width, numbers)
        if not self._has_few_shapes:
            self._logits = logits
            return
        if len(self._logits) < self._inputs.shape[1]:
            self._logits = logits.new_zeros(self._inputs.shape[1], logits.shape[1])
        self._logits[:rows] = logits

    def _reserve(self, rows: int, columns: int) -> None:
        """Make room; where something moves for it, nothing recorded is replayed."""
        try:
            moved = self._cache.reserve(rows, columns)
        except BaseException:  # some may have moved
            self._steps.forget()
            raise
        if moved:
            self._inputs = self._inputs.new_zeros(3, self._cache.rows)
            self._steps.forget()

    def leave(self, row: int) -> None:
        """Drop a row; the last one takes its place."""
        last = len(self) - 1
        if self._prefixes is not None:
            self._prefixes.add(
                self._numbers[row],
                self._tokens[row],
                partial(self._cache.copy_of, row),
                token_bytes=self._cache.token_bytes,
            )
        if row != last:
            self._cache.move(last, row)
            self._tokens[row], self._numbers[row] = self._tokens[last], self._numbers[last]
        self._tokens.pop()
        self._numbers.pop()

    def clear(self) -> None:
        """Drop all rows, and free the cache and what is kept of earlier rows."""
        self._tokens, self._numbers, self._cache = [], [], SlotCache()
        self._steps.forget()
        self._prefixes = None if self._prefixes is None else PrefixCache()

    def _forward(
        self, ids: Tensor, positions: Tensor, width: int, adapters: Sequence[int] | Tensor
    ) -> Tensor:
        """(B, V) logits after (B, T) tokens, each of which attends to its row up to itself."""
        if self._adapters is not None:
            self._adapters.choose(adapters, ids.shape[1])
        columns, masks = torch.arange(width, device=self._device), {}
        for kind, window in self._windows.items():
            hidden = columns > positions[..., None]
            if window is not None:
                hidden |= columns <= positions[..., None] - window
            mask = torch.zeros(hidden.shape, dtype=self._model.dtype, device=self._device)
            masks[kind] = mask.masked_fill_(hidden, torch.finfo(mask.dtype).min)[:, None]
        return next_logits(self._model, ids, positions, masks, self._cache)


def sample_each(
    logits: Tensor, samplings: Sequence[Sampling], uniforms: Sequence[float]
) -> list[int]:
    """The next token of each row, by options of its own; see :func:`sample_tokens`.

    ``logits`` are (B, V); ``uniforms`` numbers in (0, 1], of which greedy rows take none.
    """
    rows: dict[Sampling, list[int]] = {}
    for row, sampling in enumerate(samplings):
        rows.setdefault(sampling, []).append(row)
    chosen = [0] * len(samplings)
    for sampling, own in rows.items():
        uniform = torch.tensor([uniforms[row] for row in own], dtype=torch.float64)
        part = logits
        if len(own) < len(chosen):
            part = logits[to_device(torch.tensor(own), logits.device)]
        tokens = sample_tokens(part, to_device(uniform, logits.device), sampling).tolist()
        for row, token in zip(own, tokens, strict=True):
            chosen[row] = token
    return chosen
