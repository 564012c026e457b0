"""Metrics of data-to-text generation: BLEU, NIST, METEOR, ROUGE-L, CIDEr, TER and chrF.

Every function takes the hypotheses and, for each, its references, one or more; their number may
differ. BLEU, chrF and TER are sacrebleu's. NIST, ROUGE-L and CIDEr follow the programs that the
E2E challenge published its scores with.
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial, reduce
from importlib.metadata import version
from operator import or_
from typing import Any

from sacrebleu.metrics import BLEU, CHRF
from sacrebleu.tokenizers.tokenizer_13a import Tokenizer13a

from dschat_lora.experiments.nlg import meteor as _meteor
from dschat_lora.experiments.nlg.config import MetricName, Profile
from dschat_lora.experiments.nlg.ter import pyter, ter
from dschat_lora.experiments.nlg.texts import (
    References,
    Score,
    Texts,
    Tokens,
    streams,
    treebank_tokens,
)

Metric = Callable[[Texts, References], Score]

ROUGE_BETA = 1.2  # recall counts more than precision by its square
CIDER_SIGMA = 6.0  # tokens of difference in length
# NIST's penalty is 0.5 at two thirds of the references' length.
NIST_BETA = -math.log(0.5) / math.log(1.5) ** 2


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


def chrf_plus_plus(hypotheses: Texts, references: References) -> Score:
    """chrF++ in [0, 100]: chrF2 with words and pairs of words too (Popovic 2017)."""
    return _by_sacrebleu(CHRF(word_order=2), hypotheses, references)


def nist(hypotheses: Texts, references: References) -> Score:
    """NIST with 1- to 5-grams, from 0 up, on BLEU's tokens.

    ``sum_n sum_w info(w) / sum_n 1``: for each n the information of the n-grams that agree with
    some reference, each as often as it is in one of them, over the hypotheses' n-grams, where
    ``info(w_1..w_n) = log2(count(w_1..w_n-1) / count(w_1..w_n))`` over all references; times
    ``exp(-beta log(min(1, L_hyp / L_ref))^2)`` with the references' mean lengths (eqs. 2 and 3
    of Doddington 2002).
    """
    own = [_13a_tokens(text) for text in hypotheses]
    others = [[_13a_tokens(text) for text in each] for each in references]
    counts: Counter[Tokens] = Counter()
    for reference in (reference for each in others for reference in each):
        for n in range(1, 6):
            counts.update(_ngrams(reference, n))
        counts[()] += len(reference)
    total = 0.0
    for n in range(1, 6):
        told, formed = 0.0, 0
        for hypothesis, each in zip(own, others, strict=True):
            found = _ngrams(hypothesis, n)
            formed += found.total()
            for ngram, count in _agreeing(found, [_ngrams(r, n) for r in each]).items():
                told += count * math.log2(counts[ngram[:-1]] / counts[ngram])
        total += told / formed if formed else 0.0
    length = sum(len(hypothesis) for hypothesis in own)
    wanted = sum(sum(map(len, each)) / len(each) for each in others)
    ratio = min(1.0, length / wanted) if wanted else 0.0
    penalty = math.exp(-NIST_BETA * math.log(ratio) ** 2) if ratio else 0.0
    known = f"own, n 1-5, tok:13a, lower case, sacrebleu {version('sacrebleu')}"
    return Score(total * penalty, known)


def rouge_l(hypotheses: Texts, references: References) -> Score:
    """ROUGE-L in [0, 100]: mean F-score of longest common subsequences (Lin 2004).

    The best precision and the best recall over the references, not of one and the same, with
    ``(1 + b^2) P R / (R + b^2 P)`` and b = 1.2, on :func:`treebank_tokens`.
    """
    total = 0.0
    for hypothesis, each in zip(hypotheses, references, strict=True):
        own = treebank_tokens(hypothesis)
        others = [treebank_tokens(reference) for reference in each]
        common = [_common_subsequence(own, other) for other in others]
        precision = max(common) / max(1, len(own))
        recall = max(c / max(1, len(other)) for c, other in zip(common, others, strict=True))
        if precision and recall:
            square = ROUGE_BETA**2
            total += (1 + square) * precision * recall / (recall + square * precision)
    return Score(100 * total / len(hypotheses), "own, beta 1.2, treebank tokens, lower case")


def cider(hypotheses: Texts, references: References) -> Score:
    """CIDEr-D in [0, 10], on :func:`treebank_tokens` (Vedantam et al., arXiv:1411.5726).

    The mean over texts, their references and n = 1..4 of 10 times the cosine of tf-idf weights,
    the hypothesis's clipped at the reference's, times ``exp(-(difference in length)^2 / 72)``;
    a document is all references of one text. Of one text alone every weight is 0.
    """
    own = [_counts(treebank_tokens(text)) for text in hypotheses]
    others = [[_counts(treebank_tokens(text)) for text in each] for each in references]
    documents = Counter(ngram for each in others for ngram in set().union(*each))
    most = math.log(len(own))

    def weights(counts: Counter[Tokens], n: int) -> dict[Tokens, float]:
        return {
            ngram: count * (most - math.log(max(1, documents[ngram])))
            for ngram, count in counts.items()
            if len(ngram) == n
        }

    total = 0.0
    for hypothesis, each in zip(own, others, strict=True):
        total += sum(
            math.exp(-((_length(hypothesis) - _length(reference)) ** 2) / (2 * CIDER_SIGMA**2))
            * sum(_cosine(weights(hypothesis, n), weights(reference, n)) for n in range(1, 5))
            for reference in each
        ) / (4 * len(each))
    value = 10 * total / len(own)
    return Score(value, "own, CIDEr-D, n 1-4, sigma 6, treebank tokens, lower case")


def _13a_tokens(text: str) -> Tokens:
    tokenize: Callable[[str], str] = Tokenizer13a()
    return tuple(tokenize(text.lower()).split())


def _by_sacrebleu(metric: Any, hypotheses: Texts, references: References) -> Score:
    value = metric.corpus_score(list(hypotheses), streams(references)).score
    return Score(float(value), str(metric.get_signature()))


def _ngrams(tokens: Tokens, n: int) -> Counter[Tokens]:
    return Counter(tokens[i : i + n] for i in range(len(tokens) - n + 1))


def _counts(tokens: Tokens) -> Counter[Tokens]:
    """Counts of 1- to 4-grams."""
    return Counter(tokens[i : i + n] for n in range(1, 5) for i in range(len(tokens) - n + 1))


def _length(counts: Counter[Tokens]) -> int:
    return sum(count for ngram, count in counts.items() if len(ngram) == 1)


def _agreeing(found: Counter[Tokens], others: Sequence[Counter[Tokens]]) -> Counter[Tokens]:
    """Counts of ``found``, clipped at the most in one of ``others``."""
    return found & reduce(or_, others)


def _common_subsequence(first: Tokens, second: Tokens) -> int:
    """Length of the longest common subsequence."""
    row = [0] * (len(second) + 1)
    for token in first:
        above_left = 0
        for j, other in enumerate(second, start=1):
            above = row[j]
            row[j] = above_left + 1 if token == other else max(above, row[j - 1])
            above_left = above
    return row[-1]


def _cosine(own: dict[Tokens, float], other: dict[Tokens, float]) -> float:
    """Cosine with the own weights clipped at the other's, the norms unclipped."""
    norms = math.hypot(*own.values()) * math.hypot(*other.values())
    common = own.keys() & other.keys()
    return sum(min(own[k], other[k]) * other[k] for k in common) / norms if norms else 0.0


def chosen(profile: Profile, names: Sequence[MetricName] = ()) -> dict[str, Metric]:
    """Metrics by their titles, in the order of the published tables; all usual ones by default.

    Of E2E, METEOR leaves punctuation out, as e2e-metrics does; of the others it is kept, as in
    GenerationEval.
    """
    tokenize = treebank_tokens if profile == "e2e" else _meteor.words_of
    title = "METEOR" if _meteor.is_1_5() else "METEOR (nltk)"
    known: dict[MetricName, tuple[str, Metric]] = {
        "bleu": ("BLEU", bleu),
        "nist": ("NIST", nist),
        "meteor": (title, partial(_meteor.meteor, tokenize=tokenize)),
        "rouge_l": ("ROUGE-L", rouge_l),
        "cider": ("CIDEr", cider),
        "ter": ("TER", ter),
        "ter_pyter": ("TER (pyter)", pyter),
        "chrf": ("chrF", chrf),
        "chrf++": ("chrF++", chrf_plus_plus),
    }
    wanted = names or [name for name in known if name not in ("ter_pyter", "chrf++")]
    return {title: metric for name, (title, metric) in known.items() if name in wanted}
