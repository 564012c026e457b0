"""A static key-value cache for decoding, allocated once for all columns."""

from dataclasses import dataclass

import torch
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


class KVCache:
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
        self.capacity, self.copies = capacity, 0
        self.rows, self.columns = capacity
        self.column = column
        # Row, step of the input and column of each token that follows rows which were taken.
        self.following: tuple[Tensor, Tensor, Tensor] | None = None
        # Keys and values: (2, rows, heads, columns, D), or one of each where their shapes differ.
        self._layers: dict[int, Tensor | tuple[Tensor, Tensor]] = {}
        self._prompts: dict[int, tuple[Tensor, Tensor]] = {}  # those that a CPU shares
        self._shared_by: tuple[Tensor, int] | None = None  # the rows' sequences, of how many copies

    def start(self, rows: int, copies: int, sequences: Tensor | None = None) -> None:
        """Take the prompts of another batch; what masks do not hide is written anew.

        With ``sequences``, (rows,) int64 that their owner keeps up to date, :class:`SharedPrompts`
        come with the keys of a step.
        """
        self.rows, self.columns, self.copies = rows, self.capacity[1], copies
        self._prompts.clear()
        self._shared_by = (sequences, copies) if sequences is not None and copies > 1 else None

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
        rows = store[: count * self.copies, :, :width]
        rows.view(count, self.copies, heads, width, size).copy_(new[:, None])

    def move(self, sources: Tensor, targets: Tensor) -> None:
        """Copy the used columns of rows ``sources`` over those of rows ``targets``."""
        for layer in self._layers.values():
            for store in layer:
                used = store[:, :, : self.columns]
                used.index_copy_(0, targets, used.index_select(0, sources))

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
