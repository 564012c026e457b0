"""Which columns of a cache each row of a batch attends to, as kernels of attention read it."""

from collections.abc import Hashable, Iterable, Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from dschat_lora.algos.segments import to_device
from dschat_lora.kernels import support
from dschat_lora.kernels.attention import COPIES, NOWHERE, OwnColumns


class Held(NamedTuple):
    """What a row holds: from a column on, a prompt, which ends before another column."""

    first: int
    prompt: Hashable  # rows of equal ones hold the same
    end: int


class OwnColumnTable:
    """Columns of up to so many rows, at fixed addresses on the device, where kernels read them.

    Elsewhere nothing is told, and no mask marked.
    """

    def __init__(self, rows: int, device: torch.device) -> None:
        self._table: Tensor | None = None
        if support.runs_kernels(device):
            tiles = rows // 2 * COPIES
            self._table = torch.zeros(2 * rows + tiles, dtype=torch.int64, device=device)
        self._rows = rows
        self.clear()

    def clear(self) -> None:
        """Begin another batch, of which no rows have a prompt in common yet."""
        self._shares, self._told = False, dict[int, Held]()

    def tell(self, rows: Iterable[tuple[int, Held]]) -> bool:
        """Set which rows attend to any columns, and what they hold; the host does not wait.

        Whether rows of this batch had a prompt in common, which is part of a step's shape.
        """
        if self._table is None or (told := dict(rows)) == self._told:
            return self._shares
        table = torch.zeros(len(self._table), dtype=torch.int64)
        first, own, tiles = self._parts(table)
        first.fill_(NOWHERE)
        first[torch.tensor([*told])] = torch.tensor([held.first for held in told.values()])
        tiles.fill_(-1)
        for tile, group in zip(tiles, _tiles(told), strict=False):
            tile[: len(group)] = torch.tensor(group)
            own[group] = told[group[0]].end
            self._shares = True
        self._table.copy_(to_device(table, self._table.device))
        self._told = told
        return self._shares

    def mark(self, mask: Tensor, last: Tensor, window: int | None) -> None:
        """Have a mask of the first rows say as ``columns`` what it shows of them.

        ``last`` are the columns of new tokens, (rows,) int64.
        """
        if self._table is None:
            return
        first, own, tiles = self._parts(self._table)
        rows = len(last)
        shared = tiles[: rows // 2] if self._shares else None
        vars(mask)["columns"] = OwnColumns(first[:rows], own[:rows], last, shared, window)

    def _parts(self, table: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        first, own, tiles = table.tensor_split((self._rows, 2 * self._rows))
        return first, own, tiles.view(-1, COPIES)


def _tiles(rows: Mapping[int, Held]) -> Iterator[list[int]]:
    """Rows that read their prompt together, so many at most, and two at least."""
    alike: dict[Hashable, list[int]] = {}
    for row, held in rows.items():
        alike.setdefault(held.prompt, []).append(row)
    for group in alike.values():
        count = -(-len(group) // COPIES)
        yield from (group[n::count] for n in range(count) if group[n + count :])
