"""Tokens of an agent's calls: a call that continues an earlier answer goes on from its tokens."""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from dschat_lora.data.chat import Chat
from dschat_lora.data.encoder import Encoder
from dschat_lora.data.messages import (
    Message,
    call_arguments,
    called_function,
    content_text,
    with_arguments,
)
from dschat_lora.endpoint.text import TURN_FIELDS, chat_ids, continues
from dschat_lora.models.loading import Tokenizer
from dschat_lora.rl.play.environment import TurnTokens
from dschat_lora.rl.response.response import DecodedTurn, TokenSequence

# Programs that read thoughts from an answer put them back with white space of their own.
_THOUGHT_TAG = re.compile(r"(</?think>)")


@dataclass(eq=False)
class Conversation:
    """A sequence of tokens that grows by an answer at a time."""

    prompt: tuple[int, ...]
    key: tuple[int | str, ...]  # of the random numbers of its answers
    tokens: list[int] = field(default_factory=list)
    actor_mask: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)  # of the actor's tokens, in nats
    sampler_logprobs: list[float] = field(default_factory=list)
    num_answers: int = 0
    messages: Sequence[Message] = ()  # of the last call; empty for a prompt that was text
    is_asked: bool = False  # a call to continue it waits for its answer

    def __len__(self) -> int:
        return len(self.prompt) + len(self.tokens)

    @property
    def sequence(self) -> TokenSequence:
        """What is learnt from."""
        return TokenSequence(self.prompt, tuple(self.tokens), tuple(self.actor_mask))

    def add(self, read: Sequence[int], answer: DecodedTurn) -> None:
        """Append tokens that are read, and an answer."""
        self.tokens += [*read, *answer.tokens]
        self.actor_mask += [False] * len(read) + [True] * len(answer.tokens)
        self.logprobs += answer.logprobs
        self.sampler_logprobs += answer.sampler_logprobs
        self.num_answers += 1


@dataclass(frozen=True)
class PromptTokens:
    """How messages become tokens."""

    chat: Chat
    encoder: Encoder
    tokenizer: Tokenizer
    turn_tokens: TurnTokens
    limit: int  # most tokens of prompt and answer
    vocabulary_size: int

    @cached_property
    def _special_tokens(self) -> list[str]:
        return [
            each.content for each in self.tokenizer.added_tokens_decoder.values() if each.special
        ]

    def holds_special_tokens(self, messages: Sequence[Message]) -> bool:
        """Whether the text of a special token, such as an end of turn, stands in messages."""
        # Arguments that are JSON text may spell one by escapes.
        text = json.dumps([*map(with_arguments, messages)], ensure_ascii=False, default=str)
        return any(token in text for token in self._special_tokens)


@dataclass
class Conversations:
    """All conversations of an episode.

    A prompt continues a conversation if it begins with all of its tokens. Anything else, such as a
    history that was rewritten, a second answer to one prompt, or a sub-agent's first question, is
    a conversation of its own, whose prompt is not learnt from.
    """

    own_prompt: tuple[int, ...]  # of the row, whose first answer has the first random numbers
    all: list[Conversation] = field(default_factory=list)  # in the order of their last answers
    # Where messages that end in an answer stand: conversation, and how many of its tokens.
    _known: dict[str, tuple[Conversation, int]] = field(default_factory=dict)

    def prompt_ids(
        self, messages: Sequence[Message], columns: Mapping[str, Any], to: PromptTokens
    ) -> list[int]:
        """Tokens of messages, up to where the actor speaks.

        Those of the longest history that ends in an answer given before are the tokens that were
        drawn, whatever its text would be tokenised to; where the chat template would not append
        what follows, all messages are tokenised anew.

        Raises:
            ValueError: if the chat template refuses the messages.
        """
        for end in reversed(range(1, len(messages) + 1)):
            if messages[end - 1]["role"] != "assistant":
                continue
            known = self._known.get(_canonical(messages[:end], columns))
            if known is None:
                continue
            if to.holds_special_tokens(messages[end:]):  # which are to stay text
                break
            conversation, length = known
            ids = [*conversation.prompt, *conversation.tokens][:length]
            if end == len(messages):  # an answer that was cut off is continued
                has_end = not to.tokenizer.decode(ids[-1:], skip_special_tokens=True)
                if has_end or not continues(messages, columns):
                    break
                return ids
            try:
                following = to.turn_tokens.following(
                    messages[: end - 1], messages[end:], ids[-1:], columns
                )
            except ValueError:
                break
            return ids + following
        return chat_ids(messages, to.chat, to.encoder, to.tokenizer, columns=columns, most=to.limit)

    def continued_by(self, prompt: Sequence[int]) -> Conversation:
        """The conversation that an answer to the prompt belongs to, which is asked from here on."""
        content = tuple(prompt)
        begun = [
            each
            for each in self.all
            if not each.is_asked and content[: len(each)] == (*each.prompt, *each.tokens)
        ]
        found = max(begun, key=len, default=None)
        if found is None:
            same = sum(each.prompt == content for each in self.all)
            digest = hashlib.sha256(repr(content).encode()).hexdigest()[:16]
            key: tuple[int | str, ...] = () if content == self.own_prompt else ("prompt", digest)
            found = Conversation(content, (*key, "again", same) if same else key)
            self.all.append(found)
        found.is_asked = True
        return found

    def answered(
        self,
        conversation: Conversation,
        messages: Sequence[Message],
        columns: Mapping[str, Any],
        answer: Message,
    ) -> None:
        """Keep that the conversation now ends in an answer to messages."""
        conversation.is_asked = False
        self.all.remove(conversation)
        self.all.append(conversation)
        conversation.messages = messages
        calls = answer.get("tool_calls") or []
        # A request without parallel_tool_calls got the first call alone.
        for kept in {len(calls), min(1, len(calls))} if messages else ():
            told = [*messages, {**answer, "tool_calls": calls[:kept]}]
            self._known[_canonical(told, columns)] = conversation, len(conversation)


def _canonical(messages: Sequence[Message], columns: Mapping[str, Any]) -> str:
    """The same text for messages that say the same, however a client writes them."""
    said = []
    for message in messages:
        text = content_text(message.get("content"))
        is_answer = message["role"] == "assistant"
        calls = [called_function(call) for call in message.get("tool_calls") or ()]
        parts = [part.strip() for part in _THOUGHT_TAG.split(text)] if is_answer else text
        name = None if is_answer else message.get("name")
        made = [[call["name"], _numbers_alike(call_arguments(call))] for call in calls]
        said.append([message["role"], parts, name, made])
    rest = {name: value for name, value in columns.items() if name not in TURN_FIELDS}
    return json.dumps([said, rest], sort_keys=True, default=str)


def _numbers_alike(value: Any) -> Any:
    """A JSON value with 1 and 1.0 alike, as JavaScript writes them."""
    return json.loads(json.dumps(value), parse_int=float)
