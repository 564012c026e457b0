"""Metrics of data-to-text generation: BLEU, NIST, METEOR, ROUGE-L, CIDEr and chrF.

Every function takes the hypotheses and, for each, its references, one or more; their number may
differ. BLEU and chrF are sacrebleu's. NIST, ROUGE-L and CIDEr follow the programs that the E2E
challenge published its scores with. TER is in :mod:`.ter`.
"""

import math
import re
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from importlib.metadata import version
from importlib.util import find_spec
from itertools import zip_longest
from operator import or_
from types import SimpleNamespace
from typing import Any

from nltk.stem.porter import PorterStemmer
from nltk.translate.meteor_score import meteor_score
from sacrebleu.metrics import BLEU, CHRF
from sacrebleu.tokenizers.tokenizer_13a import Tokenizer13a

Texts = Sequence[str]
References = Sequence[Sequence[str]]
Tokens = tuple[str, ...]
Tokenize = Callable[[str], Tokens]

ROUGE_BETA = 1.2  # recall counts more than precision by its square
CIDER_SIGMA = 6.0  # tokens of difference in length
# NIST's penalty is 0.5 at two thirds of the references' length.
NIST_BETA = -math.log(0.5) / math.log(1.5) ** 2
# Abbreviations; words with the marks within them; contracted endings; whatever else stands alone.
_TREEBANK = re.compile(
    r"\.\.\.|--"
    r"|(?:[a-z]\.)+|(?:dr|jr|mr|mrs|ms|sr|st)\."
    r"|\w+?(?=n['\u2019]t\b)|n['\u2019]t\b|['\u2019](?:s|re|ve|ll|m|d)\b"
    r"|\w+(?:(?:['\u2019](?!(?:s|re|ve|ll|m|d|t)\b)|[-.,:/&_])\w+)*"
    r"|\S"
)
# Punctuation that the E2E challenge leaves out of the tokens; brackets are kept.
_PUNCTUATION = {
    *('"', "'", "`", "''", "``", ".", "?", "!", ",", ":", ";", "-", "--", "..."),
    *("\u2013", "\u2014", "\u2018", "\u2019", "\u201c", "\u201d"),
}


@dataclass(frozen=True)
class Score:
    """A metric over a whole test set."""

    value: float  # in the metric's own scale
    signature: str  # which variant it is, and of which version


def treebank_tokens(text: str) -> Tokens:
    """Tokens of the Penn Treebank's kind in lower case, without punctuation.

    Close to Stanford's PTBTokenizer as the E2E challenge uses it, which needs Java.
    """
    return tuple(t for t in _TREEBANK.findall(text.lower()) if t not in _PUNCTUATION)


def words_of(text: str) -> Tokens:
    """What spaces separate, as GenerationEval passes texts on to METEOR: punctuation is kept."""
    return tuple(text.split())


def streams(references: References) -> list[list[str | None]]:
    """Lists of one reference for each text; where a text has fewer, None."""
    return [list(stream) for stream in zip_longest(*references)]


def bleu(hypotheses: Texts, references: References) -> Score:
    """BLEU in [0, 100]: 13a tokens in lower case, closest reference's length, no smoothing.

    As mteval-v13a of the E2E challenge and multi-bleu-detok of WebNLG define it (Papineni et
    al. 2002): 0 where no 4-gram agrees.
    """
    metric = BLEU(lowercase=True, tokenize="13a", smooth_method="none", force=True)
    return _by_sacrebleu(metric, hypotheses, references)


def chrf(hypotheses: Texts, references: References) -> Score:
    """chrF2 in [0, 100]: F-score of character 1- to 6-grams (Popovic 2015), with case."""
    return _by_sacrebleu(CHRF(), hypotheses, references)


def _by_sacrebleu(metric: BLEU | CHRF, hypotheses: Texts, references: References) -> Score:
    value = metric.corpus_score(list(hypotheses), streams(references)).score
    return Score(float(value), str(metric.get_signature()))


def nist(hypotheses: Texts, references: References) -> Score:
    """NIST with 1- to 5-grams, from 0 up, on BLEU's tokens.

    ``sum_n sum_w info(w) / sum_n 1``: for each n the information of the n-grams that agree with
    some reference, each as often as it is in one of them, over the hypotheses' n-grams, where
    ``info(w_1..w_n) = log2(count(w_1..w_n-1) / count(w_1..w_n))`` over all references; times
    ``exp(-beta log(min(1, L_hyp / L_ref))^2)`` with the references' mean lengths (eqs. 2 and 3
    of Doddington 2002).
    """
    tokenize: Callable[[str], str] = Tokenizer13a()
    own = [words_of(tokenize(text.lower())) for text in hypotheses]
    others = [[words_of(tokenize(text.lower())) for text in each] for each in references]
    counts: Counter[Tokens] = Counter()
    for reference in (reference for each in others for reference in each):
        counts.update(_ngrams(reference, *range(1, 6)))
        counts[()] += len(reference)
    total = 0.0
    for n in range(1, 6):
        told, formed = 0.0, 0
        for hypothesis, each in zip(own, others, strict=True):
            own_ngrams = _ngrams(hypothesis, n)
            formed += own_ngrams.total()
            # As often as in the reference that has it most often.
            agreeing = own_ngrams & reduce(or_, [_ngrams(reference, n) for reference in each])
            for ngram, count in agreeing.items():
                told += count * math.log2(counts[ngram[:-1]] / counts[ngram])
        total += told / formed if formed else 0.0
    length = sum(len(hypothesis) for hypothesis in own)
    wanted = sum(sum(map(len, each)) / len(each) for each in others)
    ratio = min(1.0, length / wanted) if wanted else 0.0
    penalty = math.exp(-NIST_BETA * math.log(ratio) ** 2) if ratio else 0.0
    known = f"own, n 1-5, tok:13a, lower case, sacrebleu {version('sacrebleu')}"
    return Score(total * penalty, known)


def _ngrams(tokens: Tokens, *sizes: int) -> Counter[Tokens]:
    """Counts of the n-grams of each size."""
    return Counter(tokens[i : i + n] for n in sizes for i in range(len(tokens) - n + 1))


def rouge_l(hypotheses: Texts, references: References) -> Score:
    """ROUGE-L in [0, 100]: mean F-score of longest common subsequences (Lin 2004).

    The best precision and the best recall over the references, not of one and the same, with
    ``(1 + b^2) P R / (R + b^2 P)`` and b = 1.2, on :func:`treebank_tokens`.
    """
    total = 0.0
    for hypothesis, each in zip(hypotheses, references, strict=True):
        own = treebank_tokens(hypothesis)
        others = [treebank_tokens(reference) for reference in each]
        common = [_longest_common_subsequence(own, other) for other in others]
        precision = max(common) / max(1, len(own))
        recall = max(c / max(1, len(other)) for c, other in zip(common, others, strict=True))
        if precision and recall:
            square = ROUGE_BETA**2
            total += (1 + square) * precision * recall / (recall + square * precision)
    return Score(100 * total / len(hypotheses), "own, beta 1.2, treebank tokens, lower case")


def _longest_common_subsequence(first: Tokens, second: Tokens) -> int:
    row = [0] * (len(second) + 1)
    for token in first:
        above_left = 0
        for j, other in enumerate(second, start=1):
            above = row[j]
            row[j] = above_left + 1 if token == other else max(above, row[j - 1])
            above_left = above
    return row[-1]


def cider(hypotheses: Texts, references: References) -> Score:
    """CIDEr-D in [0, 10], on :func:`treebank_tokens` (Vedantam et al., arXiv:1411.5726).

    The mean over texts, their references and n = 1..4 of 10 times the cosine of tf-idf weights,
    the hypothesis's clipped at the reference's, times ``exp(-(difference in length)^2 / 72)``;
    a document is all references of one text. Of one text alone every weight is 0.
    """
    own = [treebank_tokens(text) for text in hypotheses]
    others = [[treebank_tokens(text) for text in each] for each in references]
    documents = Counter(
        ngram for each in others for ngram in set().union(*(_ngrams(o, 1, 2, 3, 4) for o in each))
    )
    most = math.log(len(own))

    def weights(tokens: Tokens, n: int) -> dict[Tokens, float]:
        return {
            ngram: count * (most - math.log(max(1, documents[ngram])))
            for ngram, count in _ngrams(tokens, n).items()
        }

    total = 0.0
    for hypothesis, each in zip(own, others, strict=True):
        total += sum(
            math.exp(-((len(hypothesis) - len(reference)) ** 2) / (2 * CIDER_SIGMA**2))
            * sum(_cosine(weights(hypothesis, n), weights(reference, n)) for n in range(1, 5))
            for reference in each
        ) / (4 * len(each))
    value = 10 * total / len(own)
    return Score(value, "own, CIDEr-D, n 1-4, sigma 6, treebank tokens, lower case")


def _cosine(own: dict[Tokens, float], other: dict[Tokens, float]) -> float:
    """Cosine with the own weights clipped at the other's, the norms unclipped."""
    norms = math.hypot(*own.values()) * math.hypot(*other.values())
    common = own.keys() & other.keys()
    return sum(min(own[k], other[k]) * other[k] for k in common) / norms if norms else 0.0


def has_meteor_1_5() -> bool:
    """Whether Java and the package with METEOR 1.5 are here."""
    return find_spec("pycocoevalcap") is not None and shutil.which("java") is not None


def meteor(
    hypotheses: Texts, references: References, *, tokenize: Tokenize = treebank_tokens
) -> Score:
    """METEOR in [0, 100]: 1.5 with its paraphrases where it is installed, else nltk's.

    The two are not comparable; the signature says which it is. 1.5 (Denkowski and Lavie 2014)
    needs Java and the package ``pycocoevalcap``. nltk's is that of Banerjee and Lavie 2005:
    words agree as they are, by stem, or, where WordNet's data is installed, by synonym.
    ``tokenize`` cuts texts: as the E2E challenge does, or as :func:`words_of`.
    """
    own = [tokenize(text) for text in hypotheses]
    others = [[tokenize(text) for text in each] for each in references]
    how = "treebank tokens, lower case" if tokenize is treebank_tokens else "words between spaces"
    if has_meteor_1_5():
        from pycocoevalcap.meteor.meteor import Meteor

        value, _ = Meteor().compute_score(
            {i: [" ".join(words) for words in each] for i, each in enumerate(others)},
            {i: [" ".join(words)] for i, words in enumerate(own)},
        )
        known = f"METEOR 1.5 -norm, pycocoevalcap {version('pycocoevalcap')}, {how}"
        return Score(100 * float(value), known)
    from nltk.corpus import wordnet

    synonyms = ", synonyms"
    options: dict[str, Any] = {"stemmer": PorterStemmer(), "wordnet": wordnet}
    try:
        wordnet.ensure_loaded()
    except LookupError:  # its data is a download of its own
        synonyms, options["wordnet"] = "", SimpleNamespace(synsets=lambda word: ())
    total = sum(meteor_score(each, text, **options) for text, each in zip(own, others, strict=True))
    known = f"nltk {version('nltk')}, exact, stem{synonyms}, {how}"
    return Score(100 * total / len(hypotheses), known)
