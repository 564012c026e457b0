"""Answers that follow a grammar, by llguidance: which tokens may come next."""

import importlib.util
import threading
from collections.abc import Collection
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dschat_lora.addons.serving.endpoint.errors import UnsupportedError
from dschat_lora.addons.serving.endpoint.grammars import Grammar
from dschat_lora.models.loading import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

_KEPT = 16  # compiled grammars of a model


class GrammarError(ValueError):
    """An answer that cannot go on by its grammar."""


class GrammarState:
    """The place in its grammar of one answer."""

    def __init__(self, matcher: "LLMatcher") -> None:
        self._matcher = matcher

    def allowed(self, size: int) -> Tensor:
        """(size,) bool: the tokens that may come next.

        Raises:
            GrammarError: if there are none.
        """
        packed = torch.frombuffer(bytearray(self._matcher.compute_bitmask()), dtype=torch.uint8)
        bits = (packed[:, None] >> torch.arange(8, dtype=torch.uint8)) & 1
        mask = torch.zeros(size, dtype=torch.bool)
        known = bits.flatten()[:size].bool()
        mask[: len(known)] = known
        if self._matcher.is_error() or not mask.any():
            raise GrammarError(f"no token follows the grammar: {_in_line(self._matcher)}")
        return mask

    def take(self, token: int) -> bool:
        """Go on by an allowed token; returns whether the answer is whole.

        Raises:
            GrammarError: if the grammar has become too large.
        """
        self._matcher.consume_token(token)
        if self._matcher.is_error():
            raise GrammarError(f"the grammar failed: {_in_line(self._matcher)}")
        return bool(self._matcher.is_stopped())


class Grammars:
    """Compiled grammars of a model; of any thread.

    Args:
        tokenizer: of the model.
        vocabulary_size: tokens that the model knows.
        end_ids: tokens that end an answer.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, vocabulary_size: int, end_ids: Collection[int]
    ) -> None:
        self._tokenizer, self._size = tokenizer, vocabulary_size
        self._end_ids = sorted(end_ids) or [int(tokenizer.eos_token_id)]
        self._lock = threading.Lock()
        self._compiled: dict[str, LLMatcher] = {}  # by their texts, the last used one behind
        self._vocabulary: LLTokenizer | None = None

    def start(self, grammar: Grammar) -> GrammarState:
        """The beginning of a grammar, compiled unless it is known; that may take seconds.

        Raises:
            UnsupportedError: naming the field and what is wrong with its schema, or what to
                install.
        """
        with self._lock:
            matcher = self._compiled.pop(grammar.text, None)
        matcher = matcher or self._compile(grammar)
        with self._lock:
            while len(self._compiled) >= _KEPT:
                del self._compiled[next(iter(self._compiled))]
            self._compiled[grammar.text] = matcher
        return GrammarState(matcher.deep_copy())

    def _compile(self, grammar: Grammar) -> "LLMatcher":
        field = grammar.field
        if importlib.util.find_spec("llguidance") is None:
            words = f"{field} needs llguidance: pip install 'dschat_lora[serving]'"
            raise UnsupportedError(words, field)
        from llguidance import LLMatcher
        from llguidance.hf import from_tokenizer

        if self._vocabulary is None:
            try:
                self._vocabulary = from_tokenizer(
                    self._tokenizer, n_vocab=self._size, eos_token=self._end_ids
                )
            except ValueError as error:
                words = f"{field}: llguidance cannot read the tokenizer: {error!s:.200}"
                raise UnsupportedError(words, field) from error
        matcher = LLMatcher(self._vocabulary, grammar.text, log_level=0)
        if matcher.is_error():
            raise UnsupportedError(f"{field}: {_in_line(matcher)}", field)
        try:
            GrammarState(matcher.deep_copy()).allowed(self._size)
        except GrammarError as error:  # such as {"$ref": "#"}
            raise UnsupportedError(f"{field}: {error}", field) from error
        return matcher


def _in_line(matcher: "LLMatcher") -> str:
    said, _, _ = matcher.get_error().partition("<state>")  # what follows is for its developers
    return f"{' '.join(said.split()):.300}"
