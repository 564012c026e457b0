"""METEOR: 1.5 in Java where that is installed, else nltk's."""

import shutil
from collections.abc import Callable
from importlib.metadata import version
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

from nltk.stem.porter import PorterStemmer
from nltk.translate.meteor_score import meteor_score

from dschat_lora.experiments.nlg.texts import References, Score, Texts, Tokens, treebank_tokens

Tokenize = Callable[[str], Tokens]


def is_1_5() -> bool:
    """Whether Java and the package with METEOR 1.5 are here."""
    return find_spec("pycocoevalcap") is not None and shutil.which("java") is not None


def words_of(text: str) -> Tokens:
    """What spaces separate, as GenerationEval passes texts on: punctuation is kept."""
    return tuple(text.split())


def meteor(
    hypotheses: Texts, references: References, *, tokenize: Tokenize = treebank_tokens
) -> Score:
    """METEOR in [0, 100]: 1.5 with its paraphrases where it is installed, else nltk's.

    The two are not comparable; the signature says which it is. 1.5 (Denkowski and Lavie 2014)
    needs Java and the package ``pycocoevalcap``. nltk's is that of Banerjee and Lavie 2005:
    words agree as they are, by stem, or, where WordNet's data is installed, by synonym.
    ``tokenize`` cuts texts: as the E2E challenge does, or as :func:`words_of`.
    """
    if is_1_5():
        return _meteor_1_5(hypotheses, references, tokenize)
    words, synonyms = _word_net()
    options: dict[str, Any] = {"stemmer": PorterStemmer(), "wordnet": words}
    total = sum(
        meteor_score([tokenize(text) for text in each], tokenize(own), **options)
        for own, each in zip(hypotheses, references, strict=True)
    )
    known = f"nltk {version('nltk')}, exact, stem{synonyms}, {_described(tokenize)}"
    return Score(100 * total / len(hypotheses), known)


def _word_net() -> tuple[Any, str]:
    """WordNet, or where its data, a download of its own, is missing, one without synonyms."""
    from nltk.corpus import wordnet

    try:
        wordnet.ensure_loaded()
    except LookupError:
        return SimpleNamespace(synsets=lambda word: ()), ""
    return wordnet, ", synonyms"


def _meteor_1_5(hypotheses: Texts, references: References, tokenize: Tokenize) -> Score:
    from pycocoevalcap.meteor.meteor import Meteor

    own = {i: [" ".join(tokenize(text))] for i, text in enumerate(hypotheses)}
    others = {i: [" ".join(tokenize(text)) for text in each] for i, each in enumerate(references)}
    value, _ = Meteor().compute_score(others, own)
    known = f"METEOR 1.5 -norm, pycocoevalcap {version('pycocoevalcap')}, {_described(tokenize)}"
    return Score(100 * float(value), known)


def _described(tokenize: Tokenize) -> str:
    own = tokenize is treebank_tokens
    return "treebank tokens, lower case" if own else "words between spaces"
