"""Continuous batching: rows join and leave a running batch between any two tokens."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor
from transformers import PreTrainedModel

from dschat_lora.algos.segments import block_causal_mask, to_device
from dschat_lora.generation.batch_state import next_logits, padded_left
from dschat_lora.generation.fast_linears import FastLinears
from dschat_lora.generation.kv_cache import RecurrentStates, fast_attention, takes_cache
from dschat_lora.generation.sampling import Sampling, sample_tokens
from dschat_lora.lora.mixed import AdapterRows
from dschat_lora.models.backbone import attention_windows, recurrent_layers
from dschat_lora.models.causal_lm import fp32_logits

COLUMN_BUCKET = 64  # columns by which a cache grows at least


class SlotCache(RecurrentStates):
    """``past_key_values`` of a transformers model, where token p of a row lies in column p.

    A layer's keys and values are (rows, heads, columns, D) each. They grow with the batch and are
    kept then. Entries that masks hide are finite, left by rows that have gone.
    """

    def __init__(self) -> None:
        super().__init__()
        self._rows = self._columns = 0  # that each layer holds
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}
        self._prompts: tuple[Tensor, Tensor] | None = None
        self._tokens: tuple[Tensor, Tensor] | None = None
        self._width = 0

    def reserve(self, rows: int, columns: int) -> None:
        """Make room for so many rows and columns."""
        if rows > self._rows:
            self._rows = max(rows, 2 * self._rows)
        if columns > self._columns:
            grown = max(columns, self._columns * 3 // 2)
            self._columns = -(-grown // COLUMN_BUCKET) * COLUMN_BUCKET
        for index, (keys, values) in self._layers.items():
            if keys.shape[0] < self._rows or keys.shape[2] < self._columns:
                self._layers[index] = self._grown(keys), self._grown(values)
        for name, state in self._states.items():
            if len(state) < self._rows:
                self._states[name] = state.new_zeros(self._rows, *state.shape[1:])
                self._states[name][: len(state)] = state

    def _grown(self, store: Tensor) -> Tensor:
        rows, heads, columns, size = store.shape
        grown = store.new_zeros(self._rows, heads, self._columns, size)
        grown[:rows, :, :columns] = store
        return grown

    def read_prompts(self, rows: Tensor, padding: Tensor) -> None:
        """What is stored next are prompts of (B,) rows, (B,) ``padding`` on the left of each.

        There must be room for their full width.
        """
        self._prompts, self._tokens = (rows, padding), None

    def read_tokens(self, positions: Tensor, width: int) -> None:
        """What is stored next is one token of each row, at its (B,) position below ``width``."""
        rows = torch.arange(len(positions), device=positions.device)
        self._prompts, self._tokens, self._width = None, (rows, positions), width

    def _state_rows(self) -> tuple[int, Tensor | None, int]:
        prompts = None if self._prompts is None else self._prompts[0]
        return self._rows, prompts, 0 if self._tokens is None else len(self._tokens[0])

    def update(
        self, key: Tensor, value: Tensor, layer_idx: int, *_: object, **__: object
    ) -> tuple[Tensor, Tensor]:
        """Store (B, heads, T, D) of new tokens; returns the keys and values to attend to."""
        if layer_idx not in self._layers:
            shapes = [(self._rows, x.shape[1], self._columns, x.shape[3]) for x in (key, value)]
            self._layers[layer_idx] = key.new_zeros(shapes[0]), value.new_zeros(shapes[1])
        stores = self._layers[layer_idx]
        if self._tokens is None:
            assert self._prompts is not None
            prompt_rows, padding = self._prompts
            # Behind a prompt its last entry again, up to the longest one's width: masks hide it.
            places = torch.arange(key.shape[2], device=key.device) + padding[:, None]
            places = places.clamp(max=key.shape[2] - 1)[:, None, :, None]
            for store, new in zip(stores, (key, value), strict=True):
                store[prompt_rows, :, : key.shape[2]] = new.gather(2, places.expand_as(new))
            return key, value
        rows, columns = self._tokens
        for store, new in zip(stores, (key, value), strict=True):
            store[rows, :, columns] = new[:, :, 0]
        keys, values = (store[: len(rows), :, : self._width] for store in stores)
        return keys, values

    def move(self, source: int, target: int, columns: int) -> None:
        """Copy the first ``columns`` of one row over those of another."""
        for stores in self._layers.values():
            for store in stores:
                store[target, :, :columns] = store[source, :, :columns]
        for state in self._states.values():
            state[target] = state[source]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns in use; some models call it, but with given positions none depends on it."""
        return self._width


class SlotRows:
    """A batch whose rows come and go; each row may use another adapter.

    Args:
        model: in evaluation mode; whole, with a kind of attention that takes our cache.
        adapters: of the model's mixed layers; None where it has none.
        pad_id: any token.

    Raises:
        ValueError: if the architecture cannot decode with our cache.
    """

    def __init__(
        self, model: PreTrainedModel, adapters: AdapterRows | None = None, *, pad_id: int
    ) -> None:
        windows = attention_windows(model.config)
        if windows is None or not takes_cache(model):
            raise ValueError(
                f"{type(model).__name__} cannot decode several requests in one batch: it has "
                "layers whose states our cache does not hold"
            )
        self._model, self._adapters, self._pad_id = model, adapters, pad_id
        self._windows, self._device = windows, model.device
        self._cache = SlotCache()
        self._lengths: list[int] = []  # tokens of each row in the cache
        self._numbers: list[int] = []  # adapter of each row
        # Not stacked: several adapters have the same weight, which can lie in one stack alone.
        self._linears = FastLinears(model, stacked=False)

    def __len__(self) -> int:
        """Rows in use."""
        return len(self._lengths)

    @contextmanager
    def kernels(self) -> Iterator[None]:
        """Within, layers compute as is best for a few tokens; weights must not change."""
        with ExitStack() as stack:
            stack.enter_context(self._linears.in_use())
            stack.enter_context(fp32_logits(self._model))
            stack.enter_context(fast_attention(self._model))
            yield

    def join(self, prompts: Sequence[Sequence[int]], adapters: Sequence[int]) -> Tensor:
        """(B, V) logits after prompts that become the last rows, each with its adapter's number."""
        self._cache.reserve(len(self) + len(prompts), max(map(len, prompts)) + 1)
        numbers = range(len(prompts))
        batches = [list(numbers)]
        if recurrent_layers(self._model):  # which would take padding for tokens
            lengths = [*map(len, prompts)]
            batches = [[i for i in numbers if lengths[i] == n] for n in sorted({*lengths})]
        logits = torch.cat(
            [self._read([prompts[i] for i in b], b, [adapters[i] for i in b]) for b in batches]
        )
        order = [i for batch in batches for i in batch]
        self._lengths += map(len, prompts)
        self._numbers += adapters
        return logits[sorted(numbers, key=order.__getitem__)]

    def _read(
        self, prompts: Sequence[Sequence[int]], numbers: Sequence[int], adapters: Sequence[int]
    ) -> Tensor:
        """(B, V) logits after prompts that have these numbers among those that join."""
        ids, real = padded_left(prompts, self._pad_id, self._device)
        positions = (real.cumsum(-1) - 1).clamp(min=0)
        rows = to_device(len(self) + torch.tensor(numbers), self._device)
        self._cache.read_prompts(rows, ids.shape[1] - real.sum(-1))
        masks = {
            kind: block_causal_mask(real, self._model.dtype, window=window)
            for kind, window in self._windows.items()
        }
        return self._forward(ids, positions, masks, adapters)

    def step(self, tokens: Sequence[int]) -> Tensor:
        """(B, V) logits after one more token of every row."""
        width = max(self._lengths) + 1
        self._cache.reserve(len(self._lengths), width)
        positions = to_device(torch.tensor(self._lengths), self._device)
        ids = to_device(torch.tensor(tokens), self._device)
        self._cache.read_tokens(positions, width)
        columns, masks = torch.arange(width, device=self._device), {}
        for kind, window in self._windows.items():
            hidden = columns > positions[:, None]
            if window is not None:
                hidden |= columns <= positions[:, None] - window
            mask = torch.zeros(hidden.shape, dtype=self._model.dtype, device=self._device)
            mask.masked_fill_(hidden, torch.finfo(mask.dtype).min)
            masks[kind] = mask[:, None, None]
        logits = self._forward(ids[:, None], positions[:, None], masks, self._numbers)
        self._lengths = [length + 1 for length in self._lengths]
        return logits

    def leave(self, row: int) -> None:
        """Drop a row; the last one takes its place."""
        last = len(self._lengths) - 1
        if row != last:
            self._cache.move(last, row, self._lengths[last])
            self._lengths[row], self._numbers[row] = self._lengths[last], self._numbers[last]
        self._lengths.pop()
        self._numbers.pop()

    def clear(self) -> None:
        """Drop all rows and free the cache."""
        self._lengths, self._numbers, self._cache = [], [], SlotCache()

    def _forward(
        self, ids: Tensor, positions: Tensor, masks: dict[str, Tensor], adapters: Sequence[int]
    ) -> Tensor:
        if self._adapters is not None:
            self._adapters.choose(adapters, ids.shape[1])
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
