"""Translation edit rate (TER): sacrebleu's, and pyter's as GenerationEval takes it."""

from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import product, takewhile
from typing import TypeVar

from sacrebleu.metrics import TER

from dschat_lora.addons.nlg.metrics import References, Score, Texts, streams
from dschat_lora.data.workers import usable_cores

TER_TEXTS = 50  # texts of one task of a worker
Part = tuple[Texts, References]
ResultT = TypeVar("ResultT")


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


def edit_distance(own: Sequence[str], other: Sequence[str]) -> int:
    """Insertions, deletions and substitutions of words that lead to ``other`` (Levenshtein).

    Bit j of two integers says where the table of distances rises and falls by 1 from its column j
    to the next, in the row of the words so far (Myers 1999, Hyyro 2003).
    """
    places: dict[str, int] = {}
    for j, word in enumerate(other):
        places[word] = places.get(word, 0) | 1 << j
    every = (1 << len(other)) - 1
    up, down = every, 0
    for word in own:
        equal = places.get(word, 0) | down
        diagonal = ((equal & up) + up ^ up) | equal
        more = (down | ~(diagonal | up)) << 1 | 1
        less = (diagonal & up) << 1
        up, down = (less | ~(diagonal | more)) & every, more & diagonal & every
    return len(own) + up.bit_count() - down.bit_count()


def shifted_edits(own: Sequence[str], other: Sequence[str]) -> int:
    """Shifts and edits that turn ``own`` into ``other``, each counting 1, by pyter's greedy search.

    Each shift moves a longest run of words to where ``other`` has it. The one that reduces the edit
    distance the most is made, of equals that with the greatest list of words, until none does.
    """
    words, shifts, distance = list(own), 0, edit_distance(own, other)
    while True:
        found = []
        for i, j in product(range(len(words)), range(len(other))):
            if i != j and words[i] == other[j]:
                alike = zip(words[i:], other[j:], strict=False)
                end = i + len([*takewhile(lambda pair: pair[0] == pair[1], alike)])
                rest = words[:i] + words[end:]
                moved = rest[:j] + words[i:end] + rest[j:]
                found.append((-edit_distance(moved, other), moved))
        if not found or -max(found)[0] >= distance:
            return shifts + distance
        less, words = max(found)
        shifts, distance = shifts + 1, -less


def _tercom_edits(part: Part) -> tuple[float, float]:
    """Edits of some texts, and the sum of their references' mean lengths."""
    hypotheses, references = part
    found = TER(normalized=True).corpus_score(hypotheses, streams(references))
    return found.num_edits, found.ref_length


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
