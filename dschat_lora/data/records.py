"""Text records: one form for all five row types, before tokenization."""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dschat_lora.data.chat import ASSISTANT, Chat, Span, conversation_spans
from dschat_lora.data.encoder import Message
from dschat_lora.data.readers import RowError
from dschat_lora.data.rows import DataKind, ParsedRow, RowType

MAX_MARGIN = 1e30  # far within float32, which margins are kept in


@dataclass(frozen=True)
class TextRecord:
    """A row as text: spans of context and answer in turn, and a preference's rejected answer.

    A language-modelling row is one target span, a prompt alone one span that is not a target.
    """

    location: str
    kind: RowType
    spans: tuple[Span, ...]
    rejected: str | None = None  # follows ``prompt`` in place of ``completion``
    margin: float | None = None  # by how much the chosen answer is better, if given
    columns: str = ""  # the row as JSON, for a reward function
    label: bool | None = None  # whether the answer is a good one, if the row says so
    mismatched: str | None = None  # an answer to another prompt

    @property
    def context(self) -> tuple[Span, ...]:
        """The spans before the last answer."""
        return self.spans[:-1] if self.spans[-1].target else self.spans

    @property
    def prompt(self) -> str:
        """All text before the last answer."""
        return "".join(span.text for span in self.context)

    @property
    def completion(self) -> str | None:
        """The last answer (of a preference: the chosen one), None for a prompt alone."""
        return self.spans[-1].text if self.spans[-1].target else None

    def digest(self, kind: DataKind = "samples") -> bytes:
        """16 bytes, equal for equal prompts and, but of prompts, equal completions or answers."""
        texts = [self.prompt, "" if kind == "prompts" else self.completion or ""]
        if kind == "pairs":
            texts.append(self.rejected or "")
        if kind == "unpaired":
            texts += [self.rejected or "", str(self.label)]
        return hashlib.blake2b(repr(texts).encode(), digest_size=16).digest()


def to_record(row: ParsedRow, chat: Chat) -> TextRecord:
    """The record of a row.

    Raises:
        RowError: if its messages cannot be rendered or its pair has no shared prompt.
    """
    try:
        if row.kind == "preference":
            return _preference(row, chat)
        label = row.values["label"] if row.kind == "unpaired preference" else None
        return TextRecord(row.location, row.kind, _spans(row, chat), label=label)
    except ValueError as error:
        raise RowError(row.location, str(error)) from error


def _spans(row: ParsedRow, chat: Chat) -> tuple[Span, ...]:
    values = row.values
    if row.kind == "text":
        return (Span(values["text"], target=True),)
    if row.kind == "conversation":
        return conversation_spans(values["messages"], chat)
    prompt = values["prompt"]
    if row.kind == "prompt":
        if not isinstance(prompt, str):
            prompt = chat.render(prompt, add_generation_prompt=True)
        return (Span(prompt, target=False),)
    if isinstance(prompt, str):
        return _pair(prompt, values["completion"])
    messages = [*prompt, *values["completion"]]
    return conversation_spans(messages, chat, first_target=len(prompt))


def _preference(row: ParsedRow, chat: Chat) -> TextRecord:
    prompt, chosen, rejected = _split_preference(row.values)
    if isinstance(prompt, str):
        spans = _pair(prompt, chosen)
        rejected_text: str = rejected
    else:
        spans = _answer_spans("chosen", prompt, chosen, chat)
        rejected_text = _answer_spans("rejected", prompt, rejected, chat)[-1].text
    return TextRecord(row.location, row.kind, spans, rejected_text, _margin(row.values))


def _split_preference(values: dict[str, Any]) -> tuple[Any, Any, Any]:
    """Prompt, chosen and rejected; without a prompt, what both answers begin with."""
    chosen, rejected = values["chosen"], values["rejected"]
    if "prompt" in values:
        return values["prompt"], chosen, rejected
    if isinstance(chosen, str):
        length = _shared_text(chosen, rejected)
    else:  # the answers themselves may be the same
        length = min(shared_length(chosen, rejected), len(chosen) - 1, len(rejected) - 1)
    if length == 0:
        raise ValueError("`chosen` and `rejected` begin differently; give their `prompt`")
    if not (chosen[length:] and rejected[length:]):
        raise ValueError("one of `chosen` and `rejected` adds nothing to the shared prompt")
    return chosen[:length], chosen[length:], rejected[length:]


def _shared_text(chosen: str, rejected: str) -> int:
    """Length of the shared prefix up to the last ``Assistant:``, or else up to a whole word."""
    shared = chosen[: shared_length(chosen, rejected)]
    turn = shared.rfind(ASSISTANT)
    if turn >= 0:
        return turn + len(ASSISTANT)
    # The white space belongs to the answer, as in the Assistant format.
    return max((i for i, character in enumerate(shared) if character.isspace()), default=0)


def shared_length(left: Sequence[Any], right: Sequence[Any]) -> int:
    """Number of leading items, or characters, that are equal."""
    shorter = min(len(left), len(right))
    return next((i for i in range(shorter) if left[i] != right[i]), shorter)


def _answer_spans(
    name: str, prompt: Sequence[Message], answer: Sequence[Message], chat: Chat
) -> tuple[Span, ...]:
    roles = [message["role"] for message in answer]
    if roles != ["assistant"]:
        raise ValueError(f"`{name}` must add one assistant message to the prompt, it adds {roles}")
    return conversation_spans([*prompt, *answer], chat, first_target=len(prompt))


def _pair(prompt: str, completion: str) -> tuple[Span, ...]:
    return Span(prompt, target=False), Span(completion, target=True)


def _margin(values: dict[str, Any]) -> float | None:
    margin = values.get("margin")
    if margin is None or margin == "":
        return None
    try:
        # A cell of a CSV file is text.
        number = math.nan if isinstance(margin, bool) else float(margin)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not abs(number) <= MAX_MARGIN:
        raise ValueError(f"`margin` must be a finite number, found {margin!r}")
    return number
