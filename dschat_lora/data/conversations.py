"""Samples of a conversation: which text the model reads, and what of it the assistant said."""

from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

from dschat_lora.data.chat import Chat, Span
from dschat_lora.data.messages import WEIGHT, Message, called_function, content_text
from dschat_lora.data.templates import PROBE, common_prefix

# How the assistant's text is found: by the template's own marks, turn by turn in one rendering, or
# answer by answer, each in a rendering of its own.
Method = Literal["marks", "turns", "answers"]


class ConversationSamples(NamedTuple):
    """Spans of each sample that a conversation becomes, in order."""

    method: Method
    samples: tuple[tuple[Span, ...], ...]
    answers: Sequence[int]  # numbers of the messages that are learnt


def supervise(
    messages: Sequence[Message], chat: Chat, *, first_target: int = 0, by_marks: bool = True
) -> ConversationSamples:
    """Text of a conversation up to its last answer; what the assistant says is the target.

    A template with ``{% generation %}`` marks says itself what that is. Else a turn is what
    rendering it adds to the rendering of all before it, up to and including its end token, or the
    marker of the next role where that alone ends it; where the template then renders earlier turns
    otherwise, each answer is a sample of its own, as the model sees it when it speaks. Answers
    before message ``first_target``, and those with ``WEIGHT`` 0, are read, not trained on. Each
    other answer is the target of exactly one sample. Without ``by_marks`` marks are passed over,
    and each answer ends in its end token.

    Raises:
        ValueError: if there is no answer to train on, or the template leaves out what it says.
    """
    answers = _learnt_answers(messages, first_target)
    if by_marks and chat.has_marks:
        marked = _by_marks(messages, answers, chat, first_target)
        return ConversationSamples("marks", (marked,), answers)
    renderings = [_render_around(messages, index, chat) for index in answers]
    spans = _turn_by_turn(messages, answers, renderings, chat)
    if spans is not None:
        return ConversationSamples("turns", (spans,), answers)
    pairs = zip(answers, renderings, strict=True)
    samples = tuple(_alone(messages, i, *texts, chat) for i, texts in pairs)
    return ConversationSamples("answers", samples, answers)


def prompt_spans(
    messages: Sequence[Message], chat: Chat, *, first_target: int = 0
) -> tuple[int, tuple[Span, ...]]:
    """The number of the last answer that is learnt, and all before it as the model sees it."""
    answers = _learnt_answers(messages, first_target)
    renderings = (_render_around(messages, index, chat) for index in answers)
    spans = None if chat.has_marks else _turn_by_turn(messages, answers, renderings, chat)
    if spans is not None:
        return answers[-1], spans[:-1]
    text = chat.render(messages[: answers[-1]], add_generation_prompt=True)
    return answers[-1], (Span(text, target=False),)


def _learnt_answers(messages: Sequence[Message], first_target: int) -> list[int]:
    """Numbers of the answers from ``first_target`` on that are trained on.

    Raises:
        ValueError: if there is none, or one that answers nothing.
    """
    said = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    said = [index for index in said if index >= first_target]
    if not said:
        raise ValueError("no message of role 'assistant' to train on")
    answers = [index for index in said if messages[index].get(WEIGHT) != 0]
    if not answers:
        raise ValueError("every answer has weight 0; there is nothing to train on")
    if answers[0] == 0:
        raise ValueError("the first message is from the assistant, without a prompt")
    return answers


def answer_spans(messages: Sequence[Message], index: int, chat: Chat) -> tuple[Span, Span]:
    """What the model reads before it says message ``index``, and what it then says.

    Raises:
        ValueError: if the template does not tell the two apart.
    """
    return _alone(messages, index, *_render_around(messages, index, chat), chat)


def _render_around(messages: Sequence[Message], index: int, chat: Chat) -> tuple[str, str]:
    """Text up to where the model says message ``index``, and up to its end."""
    before = chat.render(messages[:index], add_generation_prompt=True)
    return before, chat.render(messages[: index + 1], add_generation_prompt=False)


def _alone(
    messages: Sequence[Message], index: int, before: str, after: str, chat: Chat
) -> tuple[Span, Span]:
    """:func:`answer_spans` from the renderings around the message."""
    if not after.startswith(before):
        before, after = _realigned(messages, index, chat, before, after)
    turn = after[len(before) :]
    _check_said(messages, index, turn)
    end = len(before) + _answer_length(turn, chat)
    return Span(before, target=False), _answer(messages, index, after, len(before), end, chat)


def _answer(
    messages: Sequence[Message], index: int, text: str, begin: int, end: int, chat: Chat
) -> Span:
    """The span of message ``index``, which the template writes from ``begin`` to ``end``."""
    empty = chat.facts.empty_thought
    place = empty.find(text, begin)
    if place is None or place[1] > end or empty.is_held(messages[index]):
        return Span(text[begin:end], target=True)
    return Span(text[begin:end], True, ((place[0] - begin, place[1] - begin),))


def _realigned(
    messages: Sequence[Message], index: int, chat: Chat, before: str, after: str
) -> tuple[str, str]:
    """(prompt, prompt and answer) where the answer's rendering does not begin with the prompt's."""
    other = [*messages[:index], {"role": "assistant", "content": PROBE}]
    # Text before anything that the answer itself says.
    header = common_prefix(after, chat.render(other, add_generation_prompt=False))
    shared = chat.whole_tokens(before, min(header, common_prefix(before, after)))
    asked = chat.render(messages[:index], add_generation_prompt=False)
    end = chat.whole_tokens(before, common_prefix(before, asked))
    if shared >= end:
        # The prompt for an answer of this kind ends sooner: without the opening of a thought.
        return before[:shared], after
    # The answer changes how what precedes it is rendered; a token at its end may open the answer.
    opening = before[end:] or next(filter(before.endswith, chat.special_tokens), "")
    start = after.rfind(opening, 0, header) if opening else -1
    if start < 0:
        raise ValueError(
            f"the chat template renders what precedes message {index + 1} differently when that "
            "message follows, so its tokens cannot be identified; give such rows as `prompt`, "
            "`completion`"
        )
    return before, before + after[start + len(opening) :]


def _turn_by_turn(
    messages: Sequence[Message],
    answers: Sequence[int],
    renderings: Iterable[tuple[str, str]],
    chat: Chat,
) -> tuple[Span, ...] | None:
    """One sample with every answer; None where earlier turns do not stay as they are."""
    spans: list[Span] = []
    # text up to the previous answer, how much of it spans cover, and the answer's number
    rendered, used, previous = "", 0, 0
    for index, (before, after) in zip(answers, renderings, strict=True):
        if not (before.startswith(rendered) and after.startswith(before)):
            return None
        # Another message of the assistant goes on with its turn.
        if spans and messages[previous + 1]["role"] != "assistant":
            marker = chat.marker_behind(spans[-1].text, before[used:])
            spans[-1] = spans[-1]._replace(text=spans[-1].text + marker)
            used += len(marker)
        if index != answers[-1]:
            after = after.removesuffix(chat.closing)
        turn = after[len(before) :]
        _check_said(messages, index, turn)
        spans.append(Span(before[used:], target=False))
        used = len(before) + _answer_length(turn, chat)
        spans.append(_answer(messages, index, after, len(before), used, chat))
        rendered, previous = after, index
    return tuple(spans)


def _by_marks(
    messages: Sequence[Message], answers: Sequence[int], chat: Chat, first_target: int
) -> tuple[Span, ...]:
    messages = messages[: answers[-1] + 1]
    text, marks = chat.render_marked(messages)
    for index in range(first_target, len(messages)):
        if messages[index].get(WEIGHT) == 0:
            marks = _without_answer(index, messages, chat, text, marks)
    start = 0
    if first_target:
        prompt = chat.render(messages[:first_target], add_generation_prompt=True)
        start = common_prefix(prompt, text)
    spans: list[Span] = []
    used = 0
    thoughts = _added_thoughts(messages, text, marks, chat)
    for begin, end in marks:
        begin = max(begin, start)
        if end <= begin:
            continue
        if begin > used:
            spans.append(Span(text[used:begin], target=False))
        elif spans:
            begin = used - len(spans.pop().text)
        own = [(max(a - begin, 0), b - begin) for a, b in thoughts if begin < b <= end]
        spans.append(Span(text[begin:end], True, tuple(own)))
        used = end
    said = "".join(span.text for span in spans if span.target)
    for index in answers:
        _check_said(messages, index, said)
    return tuple(spans)


def _without_answer(
    index: int, messages: Sequence[Message], chat: Chat, text: str, marks: list[tuple[int, int]]
) -> list[tuple[int, int]]:
    """The marks that are not in message ``index``."""
    following = next(
        i for i in range(index + 1, len(messages)) if messages[i]["role"] == "assistant"
    )
    ends: list[int] = []
    for answer in (index, following):
        asked = chat.render(messages[:answer], add_generation_prompt=True)
        stays = chat.render(messages[:answer], add_generation_prompt=False)
        ends.append(common_prefix(asked, text))
        if ends[-1] < common_prefix(asked, stays):
            raise ValueError(
                f"message {index + 1} has weight 0, but the chat template renders earlier turns "
                "differently when later ones follow, so its tokens cannot be identified"
            )
    return [(begin, end) for begin, end in marks if not ends[0] < end <= ends[1]]


def _added_thoughts(
    messages: Sequence[Message], text: str, marks: Sequence[tuple[int, int]], chat: Chat
) -> list[tuple[int, int]]:
    """Start and end of each empty thought in marked text that no message holds."""
    empty, added = chat.facts.empty_thought, []
    speakers = iter([message for message in messages if message["role"] == "assistant"])
    for begin, _ in marks:
        if (place := empty.find(text, begin)) is None:
            continue
        said = text[place[1] :].removeprefix(empty.after)
        speaker = next((each for each in speakers if said.lstrip().startswith(_said(each))), None)
        if speaker is None or not empty.is_held(speaker):
            added.append(place)
    return added


def _check_said(messages: Sequence[Message], index: int, text: str) -> None:
    """Refuse a rendering that lacks what the message says; thoughts are the template's choice."""
    message = messages[index]
    content = _said(message)
    names = [called_function(call)["name"] for call in message.get("tool_calls") or []]
    what = next((name for name in names if name not in text), None)
    if what is not None:
        raise ValueError(f"the chat template omits the call of {what!r} in message {index + 1}")
    is_there = content in text or "".join(content.split()) in "".join(text.split())
    if not (names or is_there):
        raise ValueError(f"the chat template omits the content of message {index + 1}")


def _said(message: Message) -> str:
    """A message's content without its thoughts, which templates cut out of it, and white space."""
    return content_text(message.get("content")).rpartition("</think>")[2].strip()


def _answer_length(turn: str, chat: Chat) -> int:
    """Characters of a turn without the white space that a template adds after the end token."""
    eos_text = chat.eos_text
    end = turn.rfind(eos_text) + len(eos_text) if eos_text and eos_text in turn else 0
    if end and not turn[end:].strip():
        return end
    return len(turn.rstrip()) if chat.is_ended(turn) else len(turn)
