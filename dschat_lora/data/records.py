"""Text records: one form for all row types, before tokenization."""

import hashlib
import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

from dschat_lora.config.files import TOO_DEEP
from dschat_lora.data.chat import Chat, Span
from dschat_lora.data.conversations import Method, answer_spans, prompt_spans, supervise
from dschat_lora.data.left_out import left_out
from dschat_lora.data.media import MediaRun
from dschat_lora.data.messages import WEIGHT
from dschat_lora.data.readers import RowError
from dschat_lora.data.rows import DataKind, ParsedRow, RowType, split_preference

MAX_MARGIN = 1e30  # far within float32, which margins are kept in
# What ends the last answer: an end-of-sequence to be added, a token that the chat template wrote,
# or, behind what its marks leave unsaid, nothing.
End = Literal["eos", "template", "none"]


class TextRecord(NamedTuple):
    """A row as text, or one answer of it: spans of context and answer in turn.

    A preference has its rejected answer beside them. A language-modelling row is one target
    span, a prompt alone one span that is not a target.
    """

    location: str
    kind: RowType
    spans: tuple[Span, ...]
    rejected: str | None = None  # follows ``prompt`` in place of ``completion``
    margin: float | None = None  # by how much the chosen answer is better, if given
    columns: str = ""  # the row as JSON, for a reward function
    end: End = "eos"
    goes_on: bool = False  # an earlier sample of the row holds the beginning of its prompt
    method: Method | None = None  # by which the answers of a conversation were found
    label: bool | None = None  # whether the answer is a good one, if the row says so
    mismatched: str | None = None  # an answer to another prompt
    left_out: tuple[str, ...] = ()  # of the row, by the chat template or from the loss
    media: tuple[MediaRun, ...] = ()  # what its context's placeholders stand for

    @property
    def context(self) -> tuple[Span, ...]:
        """The spans before the last answer."""
        return self.spans[:-1] if self.spans[-1].target else self.spans

    @property
    def prompt(self) -> str:
        """All text before the last answer."""
        return "".join([span.text for span in self.context])

    @property
    def completion(self) -> str | None:
        """The last answer (of a preference: the chosen one), None for a prompt alone."""
        return self.spans[-1].text if self.spans[-1].target else None

    @property
    def group(self) -> bytes:
        """16 bytes, equal for equal prompts; none where there is no prompt."""
        return text_digest(self.prompt + (repr(self.media) if self.media else ""))

    def digest(self, kind: DataKind = "samples") -> bytes:
        """16 bytes, equal for equal prompts and, but of prompts, equal completions or answers."""
        texts = [self.prompt, "" if kind == "prompts" else self.completion or ""]
        texts += [repr(self.media)] if self.media else []
        if kind == "pairs":
            texts.append(self.rejected or "")
        if kind == "unpaired":
            texts += [self.rejected or "", str(self.label)]
        return hashlib.blake2b(repr(texts).encode(), digest_size=16).digest()


def text_digest(text: str) -> bytes:
    """16 bytes, equal for equal texts."""
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def row_digest(records: Sequence[TextRecord], kind: DataKind = "samples") -> bytes:
    """16 bytes of the records of one row, equal where all of theirs are."""
    digests = [record.digest(kind) for record in records]
    if len(digests) == 1:
        return digests[0]
    return hashlib.blake2b(b"".join(digests), digest_size=16).digest()


def answers_of(*records: TextRecord) -> tuple[TextRecord, ...]:
    """The records, of pairs the chosen answer as a desirable one and the rejected one."""
    answers: list[TextRecord] = []
    for record in records:
        if record.rejected is None:
            answers.append(record)
            continue
        answers.append(record._replace(rejected=None, label=True))
        spans = (*record.spans[:-1], record.spans[-1]._replace(text=record.rejected))
        answers.append(record._replace(spans=spans, rejected=None, label=False))
    return tuple(answers)


def to_records(row: ParsedRow, chat: Chat, kind: DataKind = "samples") -> tuple[TextRecord, ...]:
    """The record of a row, or one for each answer where a chat template rewrites the history.

    Of ``prompts`` there is one, whose context is the prompt as the model sees it. Answers to score,
    ``pairs``, end in their end token whatever the template marks.

    Raises:
        RowError: if its messages cannot be rendered or its pair has no shared prompt, or inputs
            beside text are not as many as its places for them.
    """
    records = _records(row, chat, kind)
    return records if chat.media is None else chat.media.fill(records, row)


def _records(row: ParsedRow, chat: Chat, kind: DataKind) -> tuple[TextRecord, ...]:
    values = row.values
    label = values["label"] if row.kind == "unpaired preference" else None
    try:
        if row.kind == "text":
            spans: tuple[Span, ...] = (Span(values["text"], target=True),)
        elif row.is_encoded:
            texts = row.with_texts(chat.tokenizer)
            spans = _pair(texts["prompt"], texts["completion"])
        elif row.kind == "preference":
            return (_preference(row, chat, kind),)
        elif row.kind == "conversation" or not isinstance(values["prompt"], str):
            return _rendered(row, chat.with_columns(values), kind, label)
        elif "completion" in values:
            spans = _pair(values["prompt"], values["completion"])
        else:
            spans = (Span(values["prompt"], target=False),)
        return (TextRecord(row.location, row.kind, spans, label=label),)
    except ValueError as error:
        raise RowError(row.location, str(error)) from error
    except RecursionError:
        raise RowError(row.location, TOO_DEEP) from None


def _rendered(
    row: ParsedRow, chat: Chat, kind: DataKind, label: bool | None
) -> tuple[TextRecord, ...]:
    """Records of a row of messages."""
    prompt = row.values["prompt"] if row.kind != "conversation" else []
    if row.kind == "prompt":
        text = chat.render_prompt(prompt)
        lost = left_out(prompt, chat, asks=True)
        return (TextRecord(row.location, row.kind, (Span(text, target=False),), left_out=lost),)
    messages = [*prompt, *row.values["messages" if row.kind == "conversation" else "completion"]]
    if kind == "prompts":
        last, spans = prompt_spans(messages, chat, first_target=len(prompt))
        lost = left_out(messages[:last], chat, asks=True)
        return (TextRecord(row.location, row.kind, spans, left_out=lost),)
    by_marks = kind == "samples"
    method, samples, answers = supervise(
        messages, chat, first_target=len(prompt), by_marks=by_marks
    )
    alone = answers if method == "answers" else ()
    lost = left_out(messages[: answers[-1] + 1], chat, answers=alone)
    if any(WEIGHT in message for message in messages[len(prompt) :]):
        lost = (*lost, "answers of weight 0, from the loss")
    unended: End = "none" if method == "marks" else "eos"
    return tuple(
        TextRecord(
            row.location,
            row.kind,
            spans,
            label=label,
            end="template" if chat.is_ended(spans[-1].text) else unended,
            method=method,
            goes_on=number > 0,
            left_out=lost,
        )
        for number, spans in enumerate(samples)
    )


def _preference(row: ParsedRow, chat: Chat, kind: DataKind) -> TextRecord:
    prompt, chosen, rejected = split_preference(row.values)
    margin = _margin(row.values.get("margin"))
    if isinstance(prompt, str):
        return TextRecord(row.location, row.kind, _pair(prompt, chosen), rejected, margin)
    chat, pair = chat.with_columns(row.values), []
    lost: dict[str, None] = {}
    for name, answer in (("chosen", chosen), ("rejected", rejected)):
        roles = [message["role"] for message in answer]
        if roles != ["assistant"]:
            raise ValueError(
                f"`{name}` must add one assistant message to the prompt, but adds {roles}"
            )
        if not prompt:
            raise ValueError("the first message is from the assistant, without a prompt")
        pair.append(answer_spans([*prompt, *answer], len(prompt), chat))
        lost |= dict.fromkeys(left_out([*prompt, *answer], chat))
    # What a template opens an answer with may depend on it: both follow the shorter prompt.
    shared = min((context.text for context, _ in pair), key=len)
    texts = [context.text[len(shared) :] + answer.text for context, answer in pair]
    # An empty thought of one answer alone tells it from the other.
    thoughts = [
        answer.empty_thoughts for context, answer in pair if len(context.text) == len(shared)
    ]
    alike = len(thoughts) == 2 and thoughts[0] == thoughts[1]
    if kind == "prompts":
        shared = chat.render(prompt, add_generation_prompt=True)
    end: End = "template" if all(map(chat.is_ended, texts)) else "eos"
    chosen_span = Span(texts[0], True, thoughts[0] if alike else ())
    spans = Span(shared, target=False), chosen_span
    return TextRecord(
        row.location, row.kind, spans, texts[1], margin, end=end, left_out=tuple(lost)
    )


def _pair(prompt: str, completion: str) -> tuple[Span, ...]:
    return Span(prompt, target=False), Span(completion, target=True)


def _margin(margin: object) -> float | None:
    if margin is None or margin == "":
        return None
    try:
        # A cell of a CSV file is text.
        number = math.nan if isinstance(margin, bool) else float(margin)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not abs(number) <= MAX_MARGIN:
        raise ValueError(f"`margin` must be a finite number, found {margin!r}")
    return number
