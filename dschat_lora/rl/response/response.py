"""Responses of the actor, and what a decoder drew of them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dschat_lora.generation.sampling import Responses

TIMED_OUT = "timed out"  # what a failure for lack of time begins with


@dataclass(frozen=True)
class TokenSequence:
    """A prompt and what follows it, of which some tokens may only be read."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    actor_mask: tuple[bool, ...] = ()  # which of the tokens are the actor's; empty: all

    @property
    def actor_positions(self) -> NDArray[np.int64]:
        """(n,) places of the actor's tokens; nothing predicts the first of all."""
        steps = np.arange(len(self.prompt), len(self.prompt) + len(self.tokens))
        if self.actor_mask:
            steps = steps[np.array(self.actor_mask)]
        return steps[steps > 0]


@dataclass(frozen=True)
class Response:
    """A prompt and the actor's response to it.

    With an environment, its messages stand between turns of the actor: they are read, and nothing
    is learnt from them. An agent's episode may have several sequences of tokens, such as those of
    a sub-agent, or of a history that was rewritten: ``prompt`` and ``tokens`` are of the one that
    ended last, and the actor's tokens of all count as one response, sequence after sequence.
    """

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]  # up to and including end-of-sequence, if it came
    ended: bool  # whether it did
    group: int  # number of the prompt within the iteration
    columns: bytes = b""  # the row of data, as JSON
    logprobs: tuple[float, ...] = ()  # of the actor's tokens in the decode loop, in nats, if kept
    actor_mask: tuple[bool, ...] = ()  # which of the tokens are the actor's; empty: all
    earlier: bytes = b""  # messages before the last turn, as JSON; empty: there is but one turn
    sampler_logprobs: tuple[float, ...] = ()  # in the distribution they were drawn from
    undrawn: bool = False  # the last token could not be drawn; the response does not count
    environment_reward: float | None = None  # that an environment or agent gave the episode
    earlier_sequences: tuple[TokenSequence, ...] = ()  # of an agent's episode, beside the last
    num_calls: int = 0  # of an agent's episode
    num_retries: int = 0  # attempts of an agent before this one
    failure: str = ""  # why an agent's episode does not count; empty: it does
    logged: Mapping[str, float] = field(default_factory=dict)  # by an agent, beside its reward
    is_drawn: bool = True  # by the actor; else it is an answer of the data
    # iterations that the adapter which drew it had learnt from, where it may be an older one
    policy_version: int | None = None
    # what the reference reads in the place of the prompt; None: the same
    reference_prompt: tuple[int, ...] | None = None
    source: int = 0  # of the row, of several that metrics tell apart

    def __len__(self) -> int:
        return sum(len(each.prompt) + len(each.tokens) for each in self.sequences)

    @property
    def sequences(self) -> tuple[TokenSequence, ...]:
        """All of the response's sequences of tokens; one but for agents."""
        return *self.earlier_sequences, TokenSequence(self.prompt, self.tokens, self.actor_mask)

    @property
    def is_left_out(self) -> bool:
        """Whether the response does not count, whatever scores it."""
        return self.undrawn or bool(self.failure)

    @property
    def num_actor_tokens(self) -> int:
        """Tokens that the actor chose."""
        return sum(
            sum(each.actor_mask) if each.actor_mask else len(each.tokens) for each in self.sequences
        )

    @property
    def num_read_tokens(self) -> int:
        """Tokens after the prompts that the actor did not choose."""
        return sum(len(each.tokens) for each in self.sequences) - self.num_actor_tokens

    @property
    def last_chosen(self) -> int:
        """Place of the last token that the actor chose, where an environment's may follow it."""
        return len(self.tokens) - 1 - self.actor_mask[::-1].index(True)

    @property
    def last_turn(self) -> tuple[int, ...]:
        """The tokens of the actor's last turn."""
        read = self.actor_mask
        return self.tokens[len(read) - read[::-1].index(False) :] if False in read else self.tokens


class DecodedTurn(NamedTuple):
    """The actor's tokens of a turn, and their log-probabilities in nats where they were kept."""

    tokens: list[int]
    logprobs: list[float]  # of the policy
    sampler_logprobs: list[float]  # in the distribution they were drawn from
    undrawn: bool  # the last token could not be drawn
    ended: bool = False  # by itself

    def cut(
        self, is_end: Callable[[int], bool], find_end: Callable[[Sequence[int]], int | None]
    ) -> "DecodedTurn":
        """The turn up to its end: a token that is one, or as many as ``find_end`` says, if any."""
        # What was drawn after it changes nothing: a token depends on those before it alone.
        end = find_end(self.tokens[: len(self.tokens) - self.undrawn])
        if end is None:
            ended = bool(self.tokens) and not self.undrawn and is_end(self.tokens[-1])
            return self._replace(ended=ended)
        own, drawn = self.logprobs[:end], self.sampler_logprobs[:end]
        return DecodedTurn(self.tokens[:end], own, drawn, undrawn=False, ended=True)


def decoded_turns(found: Responses, *, keep_logprobs: bool) -> list[DecodedTurn]:
    """What was decoded, one turn for each sequence."""
    tokens = found.tokens()
    own = drawn = [list[float]() for _ in tokens]
    if keep_logprobs:
        own, drawn = found.logprobs(), found.sampler_logprobs()
    return [DecodedTurn(*each) for each in zip(tokens, own, drawn, found.undrawn(), strict=True)]
