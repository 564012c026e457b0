"""Translation edit rate (TER), as sacrebleu computes it."""

from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor

from sacrebleu.metrics import TER

from dschat_lora.addons.nlg.metrics import References, Score, Texts, streams
from dschat_lora.data.workers import usable_cores

TER_TEXTS = 50  # texts of one task of a worker


def ter(hypotheses: Texts, references: References) -> Score:
    """Translation edit rate in percent of the references' mean length; 0 is best, no upper end.

    Edits to the nearest reference, moves of word groups among them (Snover et al. 2006), after
    tercom's own tokens in lower case; sacrebleu's.
    """
    workers = min(-(-len(hypotheses) // TER_TEXTS), usable_cores())
    if workers <= 1:
        counts = list(map(_tercom_edits, hypotheses, references))
    else:
        with ProcessPoolExecutor(workers) as pool:
            counts = list(pool.map(_tercom_edits, hypotheses, references, chunksize=TER_TEXTS))
    edits, length = (sum(each) for each in zip(*counts, strict=True))
    signature = TER(normalized=True, references=streams(references)).get_signature()
    value = edits / length if length else float(edits > 0)
    return Score(100 * value, str(signature))


def _tercom_edits(text: str, references: Sequence[str]) -> tuple[float, float]:
    """Edits of a text, and its references' mean length."""
    score = TER(normalized=True).corpus_score([text], streams([references]))
    return score.num_edits, score.ref_length
