"""A key-value cache whose rows come and go."""

from collections.abc import Sequence

import torch
from torch import Tensor

from dschat_lora.generation.batch_state import COLUMN_BUCKET
from dschat_lora.generation.kv_cache import RecurrentStates, WriteHeads
from dschat_lora.generation.prefix_cache import Layers


class SlotCache(RecurrentStates):
    """``past_key_values`` of a transformers model, where token p of a row lies in column p.

    A layer's keys and values are (rows, heads, columns, D) each. They grow with the batch and are
    kept then. What masks hide of a row is finite: it holds nothing of rows that have gone.

    Attributes:
        rows: that each layer holds.
        columns: that tokens attend to.
    """

    def __init__(self) -> None:
        super().__init__()
        self.rows = self._room = 0  # that each layer holds, and columns
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}
        self._rows_in_use: slice | Tensor = slice(0)
        self._places: tuple[Tensor, Tensor] | None = None  # row and column of each new token
        self.columns, self._clears = 0, False

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's keys and values."""
        return sum(store[0, :, 0].nbytes for stores in self._layers.values() for store in stores)

    def reserve(self, rows: int, columns: int) -> bool:
        """Make room for so many rows and columns; whether stores were moved for it."""
        before = self.rows, self._room
        if rows > self.rows:
            self.rows = max(rows, 2 * self.rows)
        if columns > self._room:
            grown = max(columns, self._room * 3 // 2)
            self._room = -(-grown // COLUMN_BUCKET) * COLUMN_BUCKET
        for index, (keys, values) in self._layers.items():
            if keys.shape[0] < self.rows or keys.shape[2] < self._room:
                self._layers[index] = self._grown(keys), self._grown(values)
        for name, state in self._states.items():
            if len(state) < self.rows:
                self._states[name] = state.new_zeros(self.rows, *state.shape[1:])
                self._states[name][: len(state)] = state
        return before != (self.rows, self._room)

    def _grown(self, store: Tensor) -> Tensor:
        rows, heads, columns, size = store.shape
        grown = store.new_zeros(self.rows, heads, self._room, size)
        grown[:rows, :, :columns] = store
        return grown

    def read_prompts(self, rows: Tensor, columns: Tensor, width: int, *, clears: bool) -> None:
        """What is stored next are tokens of (B,) rows, in (B, T) columns.

        They attend to the first ``width`` columns. Where a pass ``clears``, all else in their rows
        becomes zero.
        """
        self._rows_in_use, self._places, self.columns = rows, (rows[:, None], columns), width
        self._clears = clears

    def read_tokens(self, columns: Tensor, width: int) -> None:
        """What is stored next are tokens of each of the first rows, in (B, T) columns."""
        rows = torch.arange(len(columns), device=columns.device)
        self._rows_in_use, self._places = slice(len(columns)), (rows[:, None], columns)
        self.columns, self._clears = width, False

    def _state_rows(self) -> tuple[int, Tensor | None, int]:
        rows = self._rows_in_use
        return (self.rows, None, rows.stop) if isinstance(rows, slice) else (self.rows, rows, 0)

    def step_columns(self) -> Tensor | None:
        """(rows,) int64 column of each row's next token; None while prompts are read."""
        columns = None if self._places is None else self._places[1]
        steps = isinstance(self._rows_in_use, slice) and columns is not None
        return columns[:, 0] if steps and columns is not None else None

    def update(
        self,
        key: Tensor,
        value: Tensor,
        layer_idx: int,
        *_: object,
        write: WriteHeads | None = None,
        **__: object,
    ) -> tuple[Tensor, Tensor]:
        """Store (B, heads, T, D) of new tokens; returns the keys and values to attend to.

        In a step ``write`` may do so: see :meth:`step_columns`.
        """
        if layer_idx not in self._layers:
            shapes = [(self.rows, x.shape[1], self._room, x.shape[3]) for x in (key, value)]
            self._layers[layer_idx] = key.new_zeros(shapes[0]), value.new_zeros(shapes[1])
        stores = self._layers[layer_idx]
        assert self._places is not None
        rows, columns = self._places
        if write is not None:
            own = self._rows_in_use
            write(stores[0][own], stores[1][own], columns[:, 0])
        else:
            for store, new in zip(stores, (key, value), strict=True):
                if self._clears:
                    store.index_fill_(0, rows[:, 0], 0)
                store[rows, :, columns] = new.transpose(1, 2)
        keys, values = (store[self._rows_in_use, :, : self.columns] for store in stores)
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

    def move_each(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """As :meth:`move`, row by row, which a CPU does in a quarter of the time."""
        stores = [store for pair in self._layers.values() for store in pair]
        for store in (*stores, *self._states.values()):
            for source, target in zip(sources, targets, strict=True):
                store[target] = store[source]

    def move(self, sources: Tensor, targets: Tensor) -> None:
        """Copy rows over others, (B,) int64 each."""
        for stores in self._layers.values():
            for store in stores:
                store.index_copy_(0, targets, store.index_select(0, sources))
        self._move_states(sources, targets)
