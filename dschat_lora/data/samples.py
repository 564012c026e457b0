"""Tokenised samples, preference pairs and prompts."""

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from dschat_lora.algos.sft import IGNORE_INDEX

Tokens = NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class Sample:
    """One tokenised record. The first label is ignored: nothing precedes it."""

    input_ids: Tokens  # (n,)
    labels: Tokens  # (n,), IGNORE_INDEX where no loss is taken

    @property
    def prompt(self) -> Tokens:
        """Tokens before the first supervised one."""
        return self.input_ids[: int((self.labels != IGNORE_INDEX).argmax())]

    @cached_property
    def num_supervised(self) -> int:
        """Supervised tokens."""
        return int(np.count_nonzero(self.labels != IGNORE_INDEX))

    def ends_in(self, token: int) -> bool:
        """Whether the last supervised token is ``token``."""
        last = self.labels[-1]
        if last == IGNORE_INDEX:
            last = self.labels[self.labels != IGNORE_INDEX][-1]
        return bool(last == token)


@dataclass(frozen=True, eq=False)
class PairSample:
    """Two answers to one prompt, as a tree: the shared prefix, then the rest of each.

    ``input_ids`` is the shared prefix (prompt included), the rest of the chosen and the rest of
    the rejected sequence, one after another.
    """

    input_ids: Tokens  # (n,)
    prompt_length: int
    shared_length: int  # >= prompt_length: answers may begin alike too
    chosen_length: int  # of the rest of the chosen sequence
    margin: float = 0.0  # by how much the chosen answer is better
    # log-probabilities of the chosen and the rejected answer under a reference, in nats
    reference: tuple[float, float] = (math.nan, math.nan)

    @property
    def prompt(self) -> Tokens:
        """Tokens of the prompt."""
        return self.input_ids[: self.prompt_length]

    @property
    def chosen(self) -> Tokens:
        """(n,) the whole chosen sequence."""
        return self.input_ids[: self.shared_length + self.chosen_length]

    @property
    def rejected(self) -> Tokens:
        """(n,) the whole rejected sequence."""
        start = self.shared_length + self.chosen_length
        return np.concatenate([self.input_ids[: self.shared_length], self.input_ids[start:]])

    @property
    def num_supervised(self) -> int:
        """Tokens of both answers, those that they share once."""
        return len(self.input_ids) - self.prompt_length

    def ends_in(self, token: int) -> bool:
        """Whether ``token`` ends both answers."""
        return bool(self.chosen[-1] == token and self.rejected[-1] == token)


@dataclass(frozen=True, eq=False)
class PromptSample:
    """A prompt to be answered, and the row that it comes from."""

    input_ids: Tokens  # (n,)
    columns: bytes  # the row as JSON, UTF-8

    @property
    def prompt(self) -> Tokens:
        """Tokens of the prompt."""
        return self.input_ids

    @property
    def num_supervised(self) -> int:
        """None."""
        return 0

    def ends_in(self, token: int) -> bool:
        """Never: there is no answer."""
        return False


@dataclass(frozen=True, eq=False)
class UnpairedSample:
    """A prompt with an answer that is good or bad, and an answer to another prompt."""

    input_ids: Tokens  # (n,) the prompt and its answer
    mismatched_ids: Tokens  # (m,) the other prompt's answer, cut where prompt and it are too long
    prompt_length: int
    label: int  # 1 where the answer is desirable, 0 where it is not
    # log-probabilities of the answer and the mismatched one under a reference, in nats
    reference: tuple[float, float] = (math.nan, math.nan)

    @property
    def prompt(self) -> Tokens:
        """Tokens of the prompt."""
        return self.input_ids[: self.prompt_length]

    @property
    def mismatched(self) -> Tokens:
        """(prompt_length + m,) the prompt and the mismatched answer."""
        return np.concatenate([self.prompt, self.mismatched_ids])

    @property
    def num_supervised(self) -> int:
        """Tokens of the answer."""
        return len(self.input_ids) - self.prompt_length

    def ends_in(self, token: int) -> bool:
        """Whether ``token`` ends the answer."""
        return bool(self.input_ids[-1] == token)


AnySample = Sample | PairSample | UnpairedSample | PromptSample
