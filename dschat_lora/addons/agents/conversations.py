"""An agent's episode: its calls, of which each that continues an answer goes on from its tokens."""

import concurrent.futures
import hashlib
import json
import re
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from dschat_lora.addons.environments.turn_tokens import TurnTokens
from dschat_lora.addons.serving.endpoint.requests import AnswerOptions
from dschat_lora.addons.serving.endpoint.sources import Emit
from dschat_lora.addons.serving.endpoint.text import TURN_FIELDS, chat_ids, continues
from dschat_lora.addons.serving.endpoint.turns import Piece
from dschat_lora.data.encoder import Encoder
from dschat_lora.data.messages import (
    Message,
    call_arguments,
    called_function,
    content_text,
    with_arguments,
)
from dschat_lora.models.loading import Tokenizer
from dschat_lora.rl.draw.player import Key
from dschat_lora.rl.response.response import (
    DecodedTurn,
    Response,
    TokenSequence,
    as_messages,
    prompt_of,
)

MODEL_NAME = "actor"  # of the actor, as programs know it
OVER = "the episode is over"
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

    encoder: Encoder
    turn_tokens: TurnTokens
    limit: int  # most tokens of prompt and answer

    @cached_property
    def _special_tokens(self) -> list[str]:
        added = self.turn_tokens.tokenizer.added_tokens_decoder.values()
        return [each.content for each in added if each.special]

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
        chat, tokenizer = to.turn_tokens.chat, to.turn_tokens.tokenizer
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
                has_end = not tokenizer.decode(ids[-1:], skip_special_tokens=True)
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
        return chat_ids(messages, chat, to.encoder, tokenizer, columns=columns, most=to.limit)

    def continued_by(self, prompt: Sequence[int]) -> Conversation:
        """The conversation that an answer to the prompt belongs to, which is asked from here on."""
        content = tuple(prompt)
        begun = [
            each
            for each in self.all
            if not each.is_asked and content[: len(each)] == (*each.prompt, *each.tokens)
        ]
        conversation = max(begun, key=len, default=None)
        if conversation is None:
            same = sum(each.prompt == content for each in self.all)
            digest = hashlib.sha256(repr(content).encode()).hexdigest()[:16]
            key: tuple[int | str, ...] = () if content == self.own_prompt else ("prompt", digest)
            conversation = Conversation(content, (*key, "again", same) if same else key)
            self.all.append(conversation)
        conversation.is_asked = True
        return conversation

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
        # With 1 and 1.0 alike, as JavaScript writes them.
        values = [json.loads(json.dumps(call_arguments(c)), parse_int=float) for c in calls]
        made = [[c["name"], own] for c, own in zip(calls, values, strict=True)]
        said.append([message["role"], parts, name, made])
    rest = {name: value for name, value in columns.items() if name not in TURN_FIELDS}
    return json.dumps([said, rest], sort_keys=True, default=str)


class AgentEpisode:
    """An attempt at an episode: its program, its calls and what has become of it.

    Attributes:
        calls: those that wait for an answer.
        is_over: whether the program has ended, in whatever way.
        ended: whether the last answer ended by itself, of those that were allowed the most tokens:
            a short ``max_tokens`` of a request beside others cuts off no episode.
    """

    def __init__(self, blank: Response, key: Key, attempt: int) -> None:
        self.blank, self.key, self.attempt = blank, key, attempt
        self.secret = secrets.token_hex(16)
        self.conversations = Conversations(blank.prompt)
        self.calls: list[Call] = []
        self.num_calls = 0
        self.posted: object = None  # a reward that came by POST
        self.refusal = ""  # why the last call that was refused was
        self.reward: float | None = None
        self.logged: dict[str, float] = {}
        self.error: BaseException | None = None
        self.failure = ""
        self.undrawn = self.is_over = self.is_slow = self.ended = False
        self.most_allowed = 0  # tokens of an answer
        self.task: concurrent.futures.Future[Any] | None = None
        self._spent, self._since = 0.0, time.monotonic()

    @property
    def seconds(self) -> float:
        """In which the program did not wait for an answer."""
        return self._spent + (0.0 if self.calls else time.monotonic() - self._since)

    @property
    def answered(self) -> list[Conversation]:
        """Conversations that had an answer."""
        return [each for each in self.conversations.all if each.num_answers]

    def ask(self, call: "Call") -> None:
        """Take a call, which waits for its answer from here on."""
        self._spent = self.seconds
        self.calls.append(call)
        self.num_calls += 1
        self.is_slow = False

    def drop(self, call: "Call") -> None:
        """Let go of a call that has its answer, or that nobody waits for."""
        if call in self.calls:
            self.calls.remove(call)
            if not self.calls:
                self._since = time.monotonic()

    def end(self, failure: str = "", error: BaseException | None = None) -> None:
        """Take no further calls; those that wait are refused."""
        if self.is_over:
            return
        self.is_over, self.failure, self.error = True, failure, error
        for call in self.calls:
            call.emit(Piece("", 0, error=OVER, stopped=True))
        self.calls.clear()
        if self.task is not None:
            self.task.cancel()

    def response(self) -> Response:
        """The episode as a response; one that failed has no tokens."""
        episode = replace(
            self.blank.episode,
            num_calls=self.num_calls,
            num_retries=self.attempt,
            failure=self.failure,
        )
        if self.failure:
            return replace(self.blank, undrawn=self.undrawn, episode=episode)
        *earlier, last = self.answered
        before = self._before(last)
        return replace(
            self.blank,
            prompt=last.prompt,
            tokens=tuple(last.tokens),
            actor_mask=tuple(last.actor_mask),
            ended=self.ended,
            logprobs=tuple(x for each in (*earlier, last) for x in each.logprobs),
            sampler_logprobs=tuple(x for each in (*earlier, last) for x in each.sampler_logprobs),
            undrawn=self.undrawn,
            episode=replace(
                episode,
                earlier=json.dumps(before, ensure_ascii=False).encode() if before else b"",
                reward=self.reward,
                earlier_sequences=tuple(each.sequence for each in earlier),
                logged=self.logged,
            ),
        )

    def _before(self, last: Conversation) -> list[Message]:
        """Messages before the last answer, without the prompt of the row."""
        asked = [{n: v for n, v in m.items() if v is not None} for m in last.messages]
        own = as_messages(prompt_of(self.blank.row, None) or [])
        return asked[len(own) :] if asked[: len(own)] == own else asked


@dataclass(eq=False)
class Call:
    """A request of an episode for an answer."""

    episode: AgentEpisode
    model: "AgentModel"
    prompt: tuple[int, ...]
    options: AnswerOptions
    allowed: int  # tokens of the answer, were there any room
    emit: Emit

    def order(self) -> tuple[int, str]:
        """Of calls that came together, in whatever order they were received."""
        return self.model.number, hashlib.sha256(repr(self.prompt).encode()).hexdigest()


@dataclass(frozen=True)
class AgentModel:
    """The actor as a request of one episode sees it."""

    episode: AgentEpisode
    to: PromptTokens
    number: int = 0  # by which calls that came together are put in order
    name: str = MODEL_NAME
    asked: list[tuple[Sequence[Message], Mapping[str, Any]]] = field(default_factory=list)

    @property
    def limit(self) -> int:
        """Most tokens of prompt and answer."""
        return self.to.limit

    @property
    def vocabulary_size(self) -> int:
        """Tokens are below it."""
        return len(self.tokenizer)

    @property
    def tokenizer(self) -> Tokenizer:
        """Of the actor."""
        return self.to.turn_tokens.tokenizer

    def prompt_ids(self, prompt: str) -> list[int]:
        """Tokens of a prompt as a text."""
        return self.to.encoder.encode([prompt])[0]

    def chat_ids(self, messages: Sequence[Message], columns: Mapping[str, Any]) -> list[int]:
        """Tokens of messages, of earlier answers those that were drawn.

        Raises:
            ValueError: if the chat template refuses them.
        """
        self.asked.append((messages, columns))
        return self.episode.conversations.prompt_ids(messages, columns, self.to)
