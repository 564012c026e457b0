"""Rows that are like others: near duplicates by MinHash, and shared runs of words."""

import hashlib
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import regex
from numpy.typing import NDArray

SHINGLE_WORDS = 5  # of the runs whose sets are compared (section 4.2 of arXiv:2107.06499)
NUM_PERM = 128  # hash functions of a MinHash
LEAST_RECALL = 0.95  # share of pairs at the threshold that are found, at least
# A character of a script that puts no space between words is a word.
_SPACELESS = r"\p{Han}\p{Hiragana}\p{Katakana}\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}"
_WORD = regex.compile(
    rf"[{_SPACELESS}]\p{{M}}*|[[\p{{L}}\p{{M}}\p{{N}}]--[{_SPACELESS}]]+", regex.VERSION1
)
_BASE = np.uint64(0x9E3779B97F4A7C15)  # odd, so that no bits are lost

Hashes = NDArray[np.uint64]
Words = Sequence[str]


@dataclass(frozen=True)
class Likeness:
    """A row that goes, and what it is like."""

    row: str  # "file:line"
    like: str  # the same of the earlier row, or of the row to be evaluated on
    # Jaccard similarity in (0, 1], or the first run of words that both have
    by: float | str


def words_of(text: str) -> list[str]:
    """Words without case, punctuation and space, in Unicode's form NFKC."""
    return _WORD.findall(unicodedata.normalize("NFKC", text).casefold())


def run_hashes(words: Words, n: int) -> Hashes:
    """(runs,) hashes of the runs of n words, in order; of fewer words one, of no words none."""
    n = min(n, len(words))
    numbers = np.array([_word_hash(word) for word in words], np.uint64)
    hashes = np.zeros(len(words) - n + 1 if n else 0, np.uint64)
    for place in range(n):
        hashes = hashes * _BASE + numbers[place : place + len(hashes)]
    return hashes


@lru_cache(maxsize=2**16)
def _word_hash(word: str) -> int:
    digest = hashlib.blake2b(word.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little")


class SharedRuns:
    """Runs of ``n`` words of texts, to be found in others (appendix C of arXiv:2005.14165).

    A text of fewer words is one run, and so is a prompt.
    """

    def __init__(self, n: int) -> None:
        self._n = n
        self._rows: dict[int, str] = {}  # the first row with a run, by its hash

    def _runs(self, prompt: Words, whole: Words) -> Iterator[tuple[int, Words, int]]:
        """Hash of each run, and words with the place in them where it begins."""
        for words in (whole, *([prompt] if len(prompt) < self._n else [])):
            for place, value in enumerate(run_hashes(words, self._n).tolist()):
                yield value, words, place

    def add(self, location: str, prompt: Words, whole: Words) -> None:
        """Take in the runs of a row, from the words of its prompt and all of them."""
        for value, *_ in self._runs(prompt, whole):
            self._rows.setdefault(value, location)

    def find(self, location: str, prompt: Words, whole: Words) -> Likeness | None:
        """The first run of a row that a row which was taken in has; None where there is none."""
        if self._rows:
            for value, words, place in self._runs(prompt, whole):
                if value in self._rows:
                    run = " ".join(words[place : place + self._n])
                    return Likeness(location, self._rows[value], run)
        return None


class NearDuplicates:
    """Rows whose sets of shingles have a Jaccard similarity of ``threshold`` or more.

    Candidates are found by bands of MinHashes (chapter 3 of Leskovec, Rajaraman and Ullman, Mining
    of Massive Datasets), then compared by their sets: what is found is near, and of pairs
    at the threshold ``LEAST_RECALL`` or more are found, unless it is below 0.03.
    """

    def __init__(self, threshold: float) -> None:
        from datasketch import MinHash

        # As many hashes in a band as that share allows: the fewer candidates there are.
        sizes = range(NUM_PERM, 0, -1)
        share = {size: 1 - (1 - threshold**size) ** (NUM_PERM // size) for size in sizes}
        self._size = next((size for size in sizes if share[size] >= LEAST_RECALL), 1)
        # The permutations are drawn once.
        self._empty = MinHash(num_perm=NUM_PERM, seed=1, scheme="affine64", hashfunc=int)
        self._threshold = threshold
        self._rows: list[tuple[str, Hashes]] = []
        # Numbers of rows by what they have in a band. Most are alone there, and datasketch's own
        # index would make a set for each.
        self._buckets: dict[int, tuple[int, ...]] = {}

    def find_or_add(self, location: str, words: Words) -> Likeness | None:
        """The first of the rows before that is near; where there is none, the row is added.

        Nothing is near to a row without words.
        """
        shingles = np.unique(run_hashes(words, SHINGLE_WORDS))
        if not len(shingles):
            return None
        minhash = self._empty.copy()
        minhash.update_batch(shingles)
        bands = minhash.hashvalues[: NUM_PERM // self._size * self._size].reshape(-1, self._size)
        bands = np.column_stack([np.arange(len(bands), dtype=np.uint64), bands])
        keys = (bands * _BASE ** np.arange(bands.shape[1], dtype=np.uint64)).sum(axis=1).tolist()
        for number in sorted({each for key in keys for each in self._buckets.get(key, ())}):
            other, others = self._rows[number]
            both = len(np.intersect1d(shingles, others, assume_unique=True))
            similarity = both / (len(shingles) + len(others) - both)
            if similarity >= self._threshold:
                return Likeness(location, other, similarity)
        own = (len(self._rows),)
        for key in keys:
            earlier = self._buckets.get(key)
            self._buckets[key] = own if earlier is None else earlier + own
        self._rows.append((location, shingles))
        return None
