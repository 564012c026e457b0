"""Translation edit rate (TER): sacrebleu's, and pyter's as GenerationEval takes it."""

from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import product, takewhile
from operator import eq
from typing import TypeVar

from sacrebleu.metrics import TER
from sacrebleu.metrics.lib_ter import (
    _BEAM_WIDTH,
    _MAX_SHIFT_CANDIDATES,
    _OP_DEL,
    _OP_INS,
    _OP_NOP,
    _OP_SUB,
    BeamEditDistance,
    _shift,
)
from sacrebleu.tokenizers.tokenizer_ter import TercomTokenizer

from dschat_lora.addons.nlg.metrics import References, Score, Texts, streams
from dschat_lora.data.workers import usable_cores

TER_TEXTS = 50  # texts of one task of a worker
Words = Sequence[str]
Distance = tuple[int, str]  # edits, and the operations by sacrebleu's letters
EditsOf = Callable[[Words, Words], float]
Part = tuple[Texts, References]
ResultT = TypeVar("ResultT")


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


def ter(hypotheses: Texts, references: References) -> Score:
    """Translation edit rate in percent of the references' mean length; 0 is best, no upper end.

    Edits to the nearest reference, moves of word groups among them (Snover et al. 2006), after
    tercom's own tokens in lower case; sacrebleu's.
    """
    counts = _in_workers(_tercom_edits, hypotheses, references)
    edits, length = (sum(each) for each in zip(*counts, strict=True))
    signature = TER(normalized=True, references=streams(references)).get_signature()
    value = edits / length if length else float(edits > 0)
    return Score(100 * value, str(signature))


def pyter(hypotheses: Texts, references: References) -> Score:
    """The mean over texts of edits over a reference's words, least over its references; 0 is best.

    As GenerationEval takes it from the package pyter: words between spaces, with case, and
    every shift of the longest run of equal words that reduces the edit distance the most. An
    empty reference counts 1.
    """
    rates = [rate for part in _in_workers(_pyter_rates, hypotheses, references) for rate in part]
    return Score(sum(rates) / len(rates), "own, pyter's definition, mean over texts")


def least_edits(own: Words, others: Sequence[Words], edits_of: EditsOf) -> float:
    """The least of ``edits_of`` a text to one of several references.

    A reference is passed over where the words that differ, in any order, are as many as the
    least so far: edits are never fewer.
    """
    bags = [Counter(own), *map(Counter, others)]
    floors = [
        max(len(own), len(other)) - (bags[0] & bag).total()
        for other, bag in zip(others, bags[1:], strict=True)
    ]
    least = float("inf")
    for i in sorted(range(len(others)), key=floors.__getitem__):
        if floors[i] < least:
            least = min(least, edits_of(own, others[i]))
    return least


def tercom_edits(own: Words, other: Words) -> int:
    """Shifts and edits that turn ``own`` into ``other``, by tercom's greedy search.

    The shifts that are tried and the beam around the diagonal are sacrebleu's. A distance that
    the beam leaves as it is, or that is no less than before the shift, is counted without one.
    """
    if not other:
        return len(own)
    exact, beam = EditDistance(other), BeamEditDistance(list(other))
    # An optimal path is at most (distance + difference in length) / 2 words off the diagonal.
    within_beam = 2 * (_BEAM_WIDTH - 1) - abs(len(own) - len(other))
    words, shifts, tried = list(own), 0, 0
    while True:
        start = exact.trace(words) if exact(words) <= within_beam else beam(words)
        distances = partial(_distance, words, start, exact, beam, within_beam)
        less, moved, tried = _shift(words, other, distances, tried)
        if less <= 0 or tried >= _MAX_SHIFT_CANDIDATES:
            return shifts + start[0]
        words, shifts = moved, shifts + 1


def _distance(
    words: list[str],
    start: Distance,
    exact: EditDistance,
    beam: Callable[[list[str]], Distance],
    within_beam: int,
    moved: list[str],
) -> Distance:
    """Edits of ``moved``; with the operations of ``words``, those before the shift."""
    if moved is words:
        return start
    edits = exact(moved)
    return (edits, "") if edits <= within_beam or edits >= start[0] else beam(moved)


def shifted_edits(own: Words, other: Words) -> int:
    """Shifts and edits that turn ``own`` into ``other``, each counting 1, by pyter's greedy search.

    Each shift moves a longest run of words to where ``other`` has it. The one that reduces the edit
    distance the most is made, of equals that with the greatest list of words, until none does.
    """
    words, shifts, distance_to = list(own), 0, EditDistance(other)
    distance = distance_to(words)
    while True:
        found = [(-distance_to(each), each) for each in _shifts(words, other)]
        if not found or -max(found)[0] >= distance:
            return shifts + distance
        less, words = max(found)
        shifts, distance = shifts + 1, -less


def _shifts(own: list[str], other: Words) -> list[list[str]]:
    """``own`` with one longest run of equal words moved to its place in ``other``."""
    shifted = []
    for i, j in product(range(len(own)), range(len(other))):
        if i == j or own[i] != other[j]:
            continue
        length = 1
        while (
            i + length < len(own)
            and j + length < len(other)
            and own[i + length] == other[j + length]
        ):
            length += 1
        rest = own[:i] + own[i + length :]
        shifted.append(rest[:j] + own[i : i + length] + rest[j:])
    return shifted


def _tercom_edits(part: Part) -> tuple[float, float]:
    """Edits of some texts, and the sum of their references' mean lengths."""
    tokenizer = TercomTokenizer(normalized=True)
    edits = length = 0.0
    for text, each in zip(*part, strict=True):
        own, *others = (tokenizer(one.rstrip()).split() for one in (text, *each))
        edits += least_edits(own, others, tercom_edits)
        length += sum(map(len, others)) / len(others)
    return edits, length


def _pyter_rates(part: Part) -> list[float]:
    rates = []
    for text, each in zip(*part, strict=True):
        own, others = text.split(), [one.split() for one in each]
        rates.append(min(1.0 if not o else shifted_edits(own, o) / len(o) for o in others))
    return rates


def _in_workers(
    function: Callable[[Part], ResultT], hypotheses: Texts, references: References
) -> list[ResultT]:
    """What ``function`` makes of some texts at a time, in order."""
    starts = range(0, len(hypotheses), TER_TEXTS)
    parts = [(hypotheses[i : i + TER_TEXTS], references[i : i + TER_TEXTS]) for i in starts]
    workers = min(len(parts), usable_cores())
    if workers <= 1:
        return [function(part) for part in parts]
    with ProcessPoolExecutor(workers) as pool:
        return list(pool.map(function, parts))
