"""Which columns of a cache each row of a batch attends to, as kernels of attention read it."""

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from dschat_lora.algos.segments import to_device
from dschat_lora.kernels.attention import COPIES, NOWHERE, OwnColumns


class OwnColumnTable:
    """Columns of up to so many rows, at fixed addresses on the device."""

    def __init__(self, rows: int, device: torch.device) -> None:
        self._table = torch.zeros(2 * rows + rows // 2 * COPIES, dtype=torch.int64, device=device)
        self._rows = rows

    def _parts(self, table: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        first, own, tiles = table.tensor_split((self._rows, 2 * self._rows))
        return first, own, tiles.view(-1, COPIES)

    def tell(self, first: Mapping[int, int], shared: Iterable[tuple[int, Sequence[int]]]) -> None:
        """Set the first column of each row that attends to any, and what rows have in common.

        ``shared`` are a column, and rows that hold the same before it; each row is there once at
        most. The host does not wait.
        """
        table = torch.zeros(len(self._table), dtype=torch.int64)
        begins, own, tiles = self._parts(table)
        begins.fill_(NOWHERE)[[*first]] = torch.tensor([*first.values()], dtype=torch.int64)
        tiles.fill_(-1)
        parts = (
            (column, rows[part :: -(-len(rows) // COPIES)])
            for column, rows in shared
            for part in range(-(-len(rows) // COPIES))
        )
        for tile, (column, rows) in zip(tiles, (x for x in parts if len(x[1]) > 1), strict=False):
            tile[: len(rows)] = torch.tensor(rows)
            own[[*rows]] = column
        self._table.copy_(to_device(table, self._table.device))

    def of(self, last: Tensor, *, window: int | None, shares: bool) -> OwnColumns:
        """Those of the first rows, whose new tokens are in columns ``last``, (rows,) int64.

        With a ``window`` a row attends to the last so many of them.
        """
        first, own, tiles = self._parts(self._table)
        rows = len(last)
        return OwnColumns(
            first[:rows], own[:rows], last, tiles[: rows // 2] if shares else None, window
        )
