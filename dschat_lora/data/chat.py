"""Chat templates: messages as text, by the tokenizer's or a built-in Human / Assistant format."""

from collections.abc import Sequence
from dataclasses import dataclass

from dschat_lora.data.encoder import Message, Tokenizer

HUMAN = "\n\nHuman:"
ASSISTANT = "\n\nAssistant:"


@dataclass(frozen=True)
class Span:
    """A stretch of text that is trained on (``target``) or only read."""

    text: str
    target: bool


@dataclass(frozen=True)
class Chat:
    """The tokenizer's chat template if it has one, else the built-in format."""

    tokenizer: Tokenizer
    eos_text: str  # of the run's end-of-sequence token

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool) -> str:
        """Text of messages; with ``add_generation_prompt``, up to the assistant's turn.

        Raises:
            ValueError: if the template refuses them, or for a role that the format lacks.
        """
        if self.tokenizer.chat_template is None:
            turn = ASSISTANT if add_generation_prompt else ""
            return _built_in(messages, self.eos_text) + turn
        from jinja2 import TemplateError

        try:
            return self.tokenizer.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=add_generation_prompt
            )
        except TemplateError as error:
            raise ValueError(
                f"the tokenizer's chat template refuses the messages: {error}"
            ) from error


def _built_in(messages: Sequence[Message], eos_text: str) -> str:
    """Turns headed Human and Assistant, end-of-sequence after each answer."""
    forms = {"system": "{}", "user": HUMAN + " {}", "assistant": ASSISTANT + " {}" + eos_text}
    text = ""
    for message in messages:
        role, content = message["role"], message["content"]
        if role not in forms:
            raise ValueError(
                f"role {role!r} has no place in the built-in chat format; use system, user or "
                "assistant, or a tokenizer with a chat template"
            )
        text += forms[role].replace("{}", content)
    return text


def conversation_spans(
    messages: Sequence[Message], chat: Chat, *, first_target: int = 0
) -> tuple[Span, ...]:
    """Text of a conversation up to its last answer; the assistant's turns are targets.

    A turn is what rendering it adds to the rendering of all before it, up to and including
    its end-of-sequence where the template writes one. Answers before message ``first_target``
    are read, not trained on.

    Raises:
        ValueError: if there is no answer to train on, or the template does not render
            earlier messages the same once later ones follow.
    """
    answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    answers = [index for index in answers if index >= first_target]
    if not answers:
        raise ValueError("no message of role 'assistant' to train on")
    if answers[0] == 0:
        raise ValueError("the first message is the assistant's; it answers nothing")
    spans: list[Span] = []
    rendered, used = "", 0  # text up to the previous answer, and how much of it spans cover
    for index in answers:
        before = chat.render(messages[:index], add_generation_prompt=True)
        after = chat.render(messages[: index + 1], add_generation_prompt=False)
        if not (before.startswith(rendered) and after.startswith(before)):
            raise ValueError(
                f"the chat template renders what precedes message {index + 1} differently once "
                "that message follows, so its tokens cannot be told apart; give such rows as "
                "`prompt`, `completion`"
            )
        spans.append(Span(before[used:], target=False))
        used = len(before) + _answer_length(after[len(before) :], chat.eos_text)
        spans.append(Span(after[len(before) : used], target=True))
        rendered = after
    return tuple(spans)


def _answer_length(turn: str, eos_text: str) -> int:
    """Characters of a turn without the white space that a template adds after the end token."""
    end = turn.rfind(eos_text) + len(eos_text) if eos_text and eos_text in turn else 0
    return end if end and not turn[end:].strip() else len(turn)
