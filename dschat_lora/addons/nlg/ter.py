"""Translation edit rate (TER): sacrebleu's, and pyter's as GenerationEval takes it."""

from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import product, takewhile
from typing import TypeVar

from nltk.metrics.distance import edit_distance
from sacrebleu.metrics import TER

from dschat_lora.addons.nlg.metrics import References, Score, Texts, streams
from dschat_lora.data.workers import usable_cores

TER_TEXTS = 50  # texts of one task of a worker
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
    rates = _in_workers(_pyter_rate, hypotheses, references)
    return Score(sum(rates) / len(rates), "own, pyter's definition, mean over texts")


def shifted_edits(own: Sequence[str], other: Sequence[str]) -> int:
    """Shifts and edits that turn ``own`` into ``other``, each counting 1, by pyter's greedy search.

    Each shift moves a longest run of words to where ``other`` has it. The one that reduces the edit
    distance the most is made, of equals that with the greatest list of words, until none does.
    """
    words, shifts, distance = list(own), 0, edit_distance(own, other)
    while True:
        moves = []
        for i, j in product(range(len(words)), range(len(other))):
            if i != j and words[i] == other[j]:
                alike = zip(words[i:], other[j:], strict=False)
                end = i + len([*takewhile(lambda pair: pair[0] == pair[1], alike)])
                rest = words[:i] + words[end:]
                moved = rest[:j] + words[i:end] + rest[j:]
                moves.append((-edit_distance(moved, other), moved))
        if not moves or -max(moves)[0] >= distance:
            return int(shifts + distance)
        less, words = max(moves)
        shifts, distance = shifts + 1, -less


def _tercom_edits(text: str, references: Sequence[str]) -> tuple[float, float]:
    """Edits of a text, and its references' mean length."""
    score = TER(normalized=True).corpus_score([text], streams([references]))
    return score.num_edits, score.ref_length


def _pyter_rate(text: str, references: Sequence[str]) -> float:
    others = [reference.split() for reference in references]
    return min(1.0 if not o else shifted_edits(text.split(), o) / len(o) for o in others)


def _in_workers(
    function: Callable[[str, Sequence[str]], ResultT], hypotheses: Texts, references: References
) -> list[ResultT]:
    """What ``function`` makes of each text and its references, in order."""
    workers = min(-(-len(hypotheses) // TER_TEXTS), usable_cores())
    if workers <= 1:
        return list(map(function, hypotheses, references))
    with ProcessPoolExecutor(workers) as pool:
        return list(pool.map(function, hypotheses, references, chunksize=TER_TEXTS))
