"""A static key-value cache for decoding, allocated once for all columns."""

import torch
from torch import Tensor


class KVCache:
    """``past_key_values`` of a transformers model; layers are allocated as they are used.

    A layer's keys and values are (rows, heads, columns, D) each, at fixed addresses. They
    are zeros at first: masked entries must still be finite.

    Attributes:
        capacity: (rows, columns) that a layer holds.
        copies: of each row while the prompts are read, 0 afterwards.
        rows, columns: in use.
        column: (1,) int64, where the next token goes, on the device.
    """

    def __init__(self, capacity: tuple[int, int], *, device: torch.device) -> None:
        self.capacity, self.copies = capacity, 0
        self.rows, self.columns = capacity
        self.column = torch.zeros(1, dtype=torch.int64, device=device)
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}

    def start(self, rows: int, copies: int) -> None:
        """Take the prompts of another batch; what masks do not hide is written anew."""
        self.rows, self.columns, self.copies = rows, self.capacity[1], copies

    def update(
        self, key: Tensor, value: Tensor, layer_idx: int, *_: object, **__: object
    ) -> tuple[Tensor, Tensor]:
        """Store (B, heads, T, D) of new tokens; returns all keys and values, (B, heads, ., D)."""
        if layer_idx not in self._layers:
            rows, columns = self.capacity
            shapes = [(rows, x.shape[1], columns, x.shape[3]) for x in (key, value)]
            self._layers[layer_idx] = (key.new_zeros(shapes[0]), value.new_zeros(shapes[1]))
        stores = self._layers[layer_idx]
        if self.copies:
            for store, new in zip(stores, (key, value), strict=True):
                self._store_prompts(store, new)
            return key, value
        keys, values = (store[: self.rows] for store in stores)
        keys.index_copy_(2, self.column, key)
        values.index_copy_(2, self.column, value)
        return keys[:, :, : self.columns], values[:, :, : self.columns]

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

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns in use; some models call it, but with given positions none depends on it."""
        return self.columns
