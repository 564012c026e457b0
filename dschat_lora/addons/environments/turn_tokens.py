"""Tokens of messages that follow a turn of the actor."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dschat_lora.data.chat import Chat
from dschat_lora.data.encoder import call
from dschat_lora.data.messages import Message
from dschat_lora.data.templates import PROBE
from dschat_lora.models.loading import Tokenizer
from dschat_lora.rl.response.response import Response, as_messages, prompt_of

_QUESTION: Message = {"role": "user", "content": "?"}
_THOUGHT = f"<think>\n{PROBE}\n</think>\n\n{PROBE}"


@dataclass(frozen=True)
class TurnTokens:
    """Renders what follows a turn of the actor, as tokens that go on from the actor's own.

    The actor's tokens are never made anew from text: later turns, and the update, read those that
    were sampled.
    """

    chat: Chat
    tokenizer: Tokenizer
    _checked: set[tuple[str, ...]] = field(default_factory=set, compare=False, repr=False)

    def __call__(self, response: Response, reply: Sequence[Message]) -> list[int]:
        """Tokens of the messages that answer a response, up to where the actor speaks again.

        Raises:
            ValueError: if the chat template refuses the messages, or does not append them to what
                it made of earlier ones.
        """
        before = [
            *prompt_messages(response, self.tokenizer),
            *json.loads(response.episode.earlier or b"[]"),
        ]
        return self.following(before, reply, response.last_turn[-1:], response.row)

    def following(
        self,
        before: Sequence[Message],
        reply: Sequence[Message],
        last_token: Sequence[int],
        columns: Mapping[str, Any],
    ) -> list[int]:
        """Tokens of messages after an answer to those ``before``, which ended in ``last_token``.

        ``columns`` may have ``tools`` and ``chat_template_kwargs``.

        Raises:
            ValueError: as above.
        """
        self._check_appends(reply)
        messages, tokenizer = [*before, _turn(PROBE), *reply], self.tokenizer
        text = self.chat.with_columns(columns).render(messages, add_generation_prompt=True)
        following = text.rpartition(PROBE)[2]
        last = tokenizer.decode(list(last_token))
        # The end that the template writes was sampled already.
        if last.strip():
            following = following.removeprefix(last)
        alone, whole = call(tokenizer, [last, last + following], add_special_tokens=False)
        if whole[: len(alone)] == alone:
            return whole[len(alone) :]
        return call(tokenizer, [following], add_special_tokens=False)[0]

    def _check_appends(self, reply: Sequence[Message]) -> None:
        """Refuse a template that renders earlier turns otherwise once messages of a role follow."""
        roles = tuple(message["role"] for message in reply)
        if roles in self._checked:
            return
        opening = self.chat.render([_QUESTION], add_generation_prompt=True)
        for answer in (PROBE, *([] if "</think>" in opening else [_THOUGHT])):
            exchange = [_turn(answer), *reply]
            once = self.chat.render([_QUESTION, *exchange], add_generation_prompt=True)
            twice = self.chat.render([_QUESTION, *exchange, *exchange], add_generation_prompt=True)
            if not (_begins(once, opening + answer) and _begins(twice, once + answer)):
                raise ValueError(
                    "the chat template renders an earlier answer differently once a message of "
                    f"role {' and '.join(map(repr, roles))} follows, so a turn does not continue "
                    "the earlier tokens: let --environment return another role, or use another "
                    "--chat_template"
                )
        self._checked.add(roles)


def prompt_messages(response: Response, tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """The prompt as messages; a text is one of a user's."""
    return as_messages(prompt_of(response.row, tokenizer.decode(response.prompt)))


def _turn(content: str) -> Message:
    return {"role": "assistant", "content": content}


def _begins(text: str, start: str) -> bool:
    """Whether a text begins so, white space aside: templates trim what they are given."""
    return "".join(text.split()).startswith("".join(start.split()))
