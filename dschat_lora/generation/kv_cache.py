"""A static cache for decoding, of keys and values for all columns and of recurrent states."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class SharedPrompts:
    """Keys and values of the first columns, which several rows have in common.

    A CPU reads them once for all responses to a prompt (Hydragen, arXiv:2402.05099, section 3.2);
    keys and values of a step have them as their attribute ``prompts``.

    Attributes:
        keys, values: (prompts, heads, W, D).
        sequences: (rows,) int64; row i answers prompt ``sequences[i] // copies``.
        copies: responses to a prompt.
    """

    keys: Tensor
    values: Tensor
    sequences: Tensor
    copies: int


class RecurrentStates:
    """States of recurrent layers, a row for each sequence, by the methods of transformers' caches.

    Prompts are read without padding, which such layers would take for tokens.
    """

    def __init__(self) -> None:
        # Of each layer, kind (convolution or recurrence) and number, at fixed addresses.
        self._states: dict[tuple[int, str, int], Tensor] = {}

    def _state_rows(self) -> tuple[int, Tensor | None, int]:
        """Rows that a layer holds; the rows of each prompt's copies, or of a step their number."""
        raise NotImplementedError

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """(rows, channels, width) of a step, changed in place; None where prompts are read."""
        return self._state(layer_idx, "convolution", state_idx)

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """(rows, ...) likewise."""
        return self._state(layer_idx, "recurrence", state_idx)

    def update_conv_state(
        self, inputs: Tensor, layer_idx: int, state_idx: int = 0, *, conv_kernel_size: int
    ) -> Tensor:
        """Keep the last of (B, channels, T) inputs of prompts; returns all."""
        width = inputs.shape[-1]
        last = F.pad(inputs, (max(0, conv_kernel_size - width), 0))[..., -conv_kernel_size:]
        self._store_state(last, (layer_idx, "convolution", state_idx))
        return inputs

    def update_recurrent_state(
        self, state: Tensor, layer_idx: int, state_idx: int = 0, **_: object
    ) -> Tensor:
        """Keep the (B, ...) state after prompts or a step."""
        self._store_state(state, (layer_idx, "recurrence", state_idx))
        return state

    def is_recording_past(self, layer_idx: int) -> bool:
        """Whether steps are taken back."""
        return False

    def _state(self, layer: int, kind: str, number: int) -> Tensor | None:
        _, prompts, count = self._state_rows()
        state = self._states.get((layer, kind, number))
        return None if prompts is not None or state is None else state[:count]

    def _store_state(self, state: Tensor, key: tuple[int, str, int]) -> None:
        most, prompts, count = self._state_rows()
        if key not in self._states:
            self._states[key] = state.new_zeros(most, *state.shape[1:])
        store = self._states[key]
        if prompts is None:
            store[:count] = state
        else:
            store[prompts] = state.repeat_interleave(len(prompts) // len(state), 0)

    def _move_states(self, sources: Tensor, targets: Tensor) -> None:
        for store in self._states.values():
            store.index_copy_(0, targets, store.index_select(0, sources))


class KVCache(RecurrentStates):
    """``past_key_values`` of a transformers model; layers are allocated as they are used.

    A layer's keys and values are (rows, heads, columns, D) each, at fixed addresses, one behind
    the other where their shapes are equal. They are zeros at first: masked entries must still be
    finite.

    Attributes:
        capacity: (rows, columns) that a layer holds.
        copies: of each row while the prompts are read, 0 afterwards.
        rows, columns: in use.
        is_compileable: that a mask may be left out where it hides nothing; models of transformers
            5.0 ask for it.
        column: (1,) int64, where the token of a step goes, on the device; counted by its owner.
    """

    is_compileable = False

    def __init__(self, capacity: tuple[int, int], column: Tensor) -> None:
        super().__init__()
        self.capacity, self.copies = capacity, 0
        self.rows, self.columns = capacity
        self.column = column
        # Row, step of the input and column of each token that follows rows which were taken.
        self.following: tuple[Tensor, Tensor, Tensor] | None = None
        # Keys and values: (2, rows, heads, columns, D), or one of each where their shapes differ.
        self._layers: dict[int, Tensor | tuple[Tensor, Tensor]] = {}
        self._prompts: dict[int, tuple[Tensor, Tensor]] = {}  # those that a CPU shares
        self._shared_by: tuple[Tensor, int] | None = None  # the rows' sequences, of how many copies
        self._part: tuple[Tensor, int] | None = None  # rows of some prompts, and their first column

    def start(self, rows: int, copies: int, sequences: Tensor | None = None) -> None:
        """Take the prompts of another batch; what masks do not hide is written anew.

        With ``sequences``, (rows,) int64 that their owner keeps up to date, :class:`SharedPrompts`
        come with the keys of a step.
        """
        self.rows, self.columns, self.copies = rows, self.capacity[1], copies
        self._prompts.clear()
        self._part = None
        self._shared_by = (sequences, copies) if sequences is not None and copies > 1 else None

    def read(self, rows: Tensor, column: int) -> None:
        """Take some of the prompts, whose copies go to ``rows``, into columns from one on."""
        self._part = rows, column

    def _state_rows(self) -> tuple[int, Tensor | None, int]:
        rows = self._part[0] if self._part is not None and self.copies else None
        return self.capacity[0], rows, self.rows

    def take(self, source: "KVCache", rows: Tensor, columns: Tensor) -> None:
        """Take what was computed before, from this cache or another.

        Column j of row i becomes column ``columns[i, j]`` of row ``rows[i]`` there: (B, W) and
        (B,) int64.
        """
        for index, stores in source._layers.items():
            taken = [_gathered(store, rows, columns) for store in stores]
            if index not in self._layers:
                self._layers[index] = self._allocate(taken[0], taken[1])
            for store, new in zip(self._layers[index], taken, strict=True):
                store[: len(rows), :, : columns.shape[1]] = new

    def update(
        self, key: Tensor, value: Tensor, layer_idx: int, *_: object, **__: object
    ) -> tuple[Tensor, Tensor]:
        """Store (B, heads, T, D) of new tokens; returns all keys and values, (B, heads, ., D)."""
        if layer_idx not in self._layers:
            self._layers[layer_idx] = self._allocate(key, value)
        stores = self._layers[layer_idx]
        if self.copies:
            for store, new in zip(stores, (key, value), strict=True):
                self._store_prompts(store, new)
            if self._shared_by is not None:
                self._prompts[layer_idx] = key.contiguous(), value.contiguous()
            return key, value
        if self.following is not None:
            rows, steps, columns = self.following
            for store, new in zip(stores, (key, value), strict=True):
                store[rows, :, columns] = new[rows, :, steps]
            keys, values = (store[: len(key), :, : self.columns] for store in stores)
            return keys, values
        pair = _as_pair(key, value) if isinstance(stores, Tensor) else None
        if isinstance(stores, Tensor) and pair is not None:
            stores[:, : self.rows].index_copy_(3, self.column, pair)
        else:
            for store, new in zip(stores, (key, value), strict=True):
                store[: self.rows].index_copy_(2, self.column, new)
        keys, values = (store[: self.rows, :, : self.columns] for store in stores)
        if layer_idx in self._prompts and self._shared_by is not None:
            sequences, copies = self._shared_by
            shared = SharedPrompts(*self._prompts[layer_idx], sequences[: self.rows], copies)
            vars(keys)["prompts"] = vars(values)["prompts"] = shared
        return keys, values

    def _allocate(self, key: Tensor, value: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        rows, columns = self.capacity
        keys, values = ((rows, x.shape[1], columns, x.shape[3]) for x in (key, value))
        if keys != values:
            return key.new_zeros(keys), value.new_zeros(values)
        return key.new_zeros(2, *keys)

    def _store_prompts(self, store: Tensor, new: Tensor) -> None:
        count, heads, width, size = new.shape
        if self._part is not None:
            rows, column = self._part
            store[rows, :, column : column + width] = new.repeat_interleave(self.copies, 0)
            return
        rows = store[: count * self.copies, :, :width]
        rows.view(count, self.copies, heads, width, size).copy_(new[:, None])

    def move(self, sources: Tensor, targets: Tensor) -> None:
        """Copy the used columns of rows ``sources`` over those of rows ``targets``."""
        for layer in self._layers.values():
            for store in layer:
                used = store[:, :, : self.columns]
                used.index_copy_(0, targets, used.index_select(0, sources))
        self._move_states(sources, targets)

    def swap(self, first: Tensor, second: Tensor) -> None:
        """Exchange the used columns of rows ``first`` and of rows ``second``."""
        self.move(torch.cat([first, second]), torch.cat([second, first]))

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns in use; some models call it, but with given positions none depends on it."""
        return self.columns


def _gathered(store: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """(B, heads, W, D) of (., heads, ., D): column ``columns[i, j]`` of row ``rows[i]``."""
    index = columns[:, None, :, None].expand(-1, store.shape[1], -1, store.shape[3])
    return store.index_select(0, rows).gather(2, index)


def _as_pair(first: Tensor, second: Tensor) -> Tensor | None:
    """(2, ...) view of two tensors of one shape that lie in one storage, else None."""
    storages = (each.untyped_storage().data_ptr() for each in (first, second))
    distance = second.storage_offset() - first.storage_offset()
    alike = first.shape == second.shape and first.stride() == second.stride()
    if next(storages) != next(storages) or not alike or distance <= 0:
        return None
    size, stride = (2, *first.shape), (distance, *first.stride())
    return first.as_strided(size, stride, first.storage_offset())
