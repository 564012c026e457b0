"""The edit distances of many texts to one reference, in words."""

from collections.abc import Sequence
from itertools import takewhile
from operator import eq

from sacrebleu.metrics.lib_ter import _OP_DEL, _OP_INS, _OP_NOP, _OP_SUB


class EditDistance:
    """Insertions, deletions and substitutions of words that lead to ``other`` (Levenshtein).

    The table of distances D is kept by two integers for each word of the text: bit j of the first
    where ``D[i, j + 1] - D[i, j]`` is 1, of the second where it is -1 (Myers 1999, Hyyro 2003).
    Rows of words that the text before began with are kept.
    """

    def __init__(self, other: Sequence[str]) -> None:
        self._other = other
        self._places: dict[str, int] = {}
        for j, word in enumerate(other):
            self._places[word] = self._places.get(word, 0) | 1 << j
        self._own: Sequence[str] = ()
        self._rows = [((1 << len(other)) - 1, 0)]

    def __call__(self, own: Sequence[str]) -> int:
        """The least number of edits."""
        up, down = self._rows_of(own)[-1]
        return len(own) + up.bit_count() - down.bit_count()

    def trace(self, own: Sequence[str]) -> tuple[int, str]:
        """The least number of edits, and which: sacrebleu's letters, and choice among equals."""
        rows = self._rows_of(own)

        def edits(i: int, j: int) -> int:
            up, down = rows[i]
            before = (1 << j) - 1
            return i + (up & before).bit_count() - (down & before).bit_count()

        operations, i, j = [], len(own), len(self._other)
        while i or j:
            now = edits(i, j)
            same = i and j and own[i - 1] == self._other[j - 1]
            if i and j and edits(i - 1, j - 1) + (not same) == now:
                i, j, operation = i - 1, j - 1, _OP_NOP if same else _OP_SUB
            elif i and edits(i - 1, j) + 1 == now:
                i, operation = i - 1, _OP_DEL
            else:
                j, operation = j - 1, _OP_INS
            operations.append(operation)
        return edits(len(own), len(self._other)), "".join(reversed(operations))

    def _rows_of(self, own: Sequence[str]) -> list[tuple[int, int]]:
        known = sum(takewhile(bool, map(eq, own, self._own)))
        rows = self._rows[: known + 1]
        every, (up, down) = rows[0][0], rows[-1]
        for word in own[known:]:
            equal = self._places.get(word, 0) | down
            diagonal = ((equal & up) + up ^ up) | equal
            more = (down | ~(diagonal | up)) << 1 | 1
            less = (diagonal & up) << 1
            up, down = (less | ~(diagonal | more)) & every, more & diagonal & every
            rows.append((up, down))
        self._own, self._rows = own, rows
        return rows
