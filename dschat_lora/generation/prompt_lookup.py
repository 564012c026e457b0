"""Prompt look-up: drafts of a row's next tokens, copied from where its last ones stood before."""

import warnings
from collections.abc import Sequence
from itertools import takewhile

from transformers import PreTrainedModel

from dschat_lora.config.when import no_effect
from dschat_lora.generation.kv_cache import in_shards, takes_cache
from dschat_lora.generation.prefix_cache import can_keep_prefixes

NGRAMS = (3, 2)  # tokens that are looked up, the longest first
MOST_PAUSE = 64  # steps without a look-up, once many drafts were wrong


class PromptLookup:
    """Drafts of what follows some tokens: what followed the last of them where they stood before.

    A draft is as long as twice what was right of the one before, so that wrong ones cost little;
    after one of which nothing was right there is none for 1, 2, 4, ... steps. The look-up is that
    of Saxena, https://github.com/apoorvumang/prompt-lookup-decoding, and of arXiv:2304.04487.

    Args:
        tokens: of the prompt.
        most: tokens of a draft; 0 makes none.
        vocabulary: number of tokens; a draft ends before what is none, such as a picture's.
    """

    def __init__(self, tokens: Sequence[int], most: int, vocabulary: int = 2**31) -> None:
        self._vocabulary = vocabulary
        self._most = self._length = most
        self._pause = self._wait = 0
        self._tokens: list[int] = []
        self._following: dict[tuple[int, ...], int] = {}  # the place behind each n-gram
        self.add(tokens)

    def add(self, tokens: Sequence[int]) -> None:
        """Go on with tokens."""
        if not self._most:
            return
        for token in tokens:
            end = len(self._tokens)
            for n in NGRAMS:
                if end >= n:
                    self._following[tuple(self._tokens[end - n :])] = end
            self._tokens.append(token)

    def draft(self, room: int) -> list[int]:
        """Up to ``room`` tokens that may come next; a text that repeats itself goes on so."""
        if self._wait:
            self._wait -= 1
            return []
        keys = (tuple(self._tokens[-n:]) for n in NGRAMS)
        start = next((self._following[key] for key in keys if key in self._following), None)
        if start is None:
            return []
        period = len(self._tokens) - start
        found = (self._tokens[start + i % period] for i in range(min(room, self._length)))
        return list(takewhile(lambda token: token < self._vocabulary, found))

    def learn(self, accepted: int) -> None:
        """How many tokens of the last draft were right."""
        self._length = min(self._most, max(1, 2 * accepted))
        self._pause = 0 if accepted else min(MOST_PAUSE, 2 * self._pause or 1)
        self._wait = self._pause


def proposed(lookups: Sequence[PromptLookup], rooms: Sequence[int]) -> list[list[int]]:
    """A draft for each row of a batch; none where they are too short for the batch.

    A step computes as many tokens of every row as the longest draft has: it pays where there is
    a token for each row on average.
    """
    drafts = [each.draft(room) for each, room in zip(lookups, rooms, strict=True)]
    return drafts if sum(map(len, drafts)) >= len(drafts) else [[] for _ in drafts]


def usable_drafts(model: PreTrainedModel, most: int) -> int:
    """Tokens of a draft that a model can verify: ``most``, or 0 with a warning that says why."""
    reason = None
    if not most:
        return 0
    if in_shards(model):
        reason = "its weights are gathered layer by layer"
    elif not takes_cache(model):
        reason = "it is decoded without a cache"
    elif not can_keep_prefixes(model):
        reason = "what its layers keep depends on the whole text, and no token can be taken back"
    if reason is None:
        return most
    name = type(model).__name__
    words = no_effect(f"prompt_lookup_num_tokens {most}", f" with {name}: {reason}")
    warnings.warn(words, stacklevel=2)
    return 0
