"""Empty thoughts: what a chat template writes for an answer that it is given no thought of."""

import re
from collections.abc import Callable
from typing import Any, NamedTuple

from dschat_lora.data.messages import Message, content_text

# Keys under which messages hold a thought.
KEYS = ("reasoning_content", "reasoning", "thinking")
# Tags that name a thought, two side by side or an end alone.
_NAME = r"[^<>\[\]]*(?:think|thought|reason)[^<>\[\]]*[>\]]"
_TAGS = re.compile(rf"([<\[]{_NAME})?\s*([<\[](?(1)|/){_NAME})", re.IGNORECASE)
_LAST_TAG = re.compile(r"[<\[]?[^<\[]*\Z")
_FIRST_TAG = re.compile(r"[<\[][^<\[]*?[>\]]|\S*")


class EmptyThought(NamedTuple):
    """An empty thought in the rendering of an answer; all empty where a template writes none."""

    before: str = ""  # from the question on
    opening: str = ""
    closing: str = ""
    text: str = ""  # opening to closing, with the white space behind it
    after: str = ""  # up to the answer's content

    def find(self, text: str, begin: int) -> tuple[int, int] | None:
        """Start and end of the one that an answer begins with, which is said from ``begin`` on."""
        if not self.text:
            return None
        core = self.text.rstrip()
        start = text.find(core, max(0, begin - len(core) + 1))
        # Only the answer's header may precede it; its opening may be part of the prompt.
        if start < 0 or not (start <= begin or self.before.endswith(text[begin:start])):
            return None
        end = start + len(self.text if text.startswith(self.text, start) else core)
        return max(start, begin), end

    def is_held(self, message: Message) -> bool:
        """Whether the content holds an empty thought; an empty key says that there is none."""
        thought, closing, _ = content_text(message.get("content")).partition(self.closing)
        return bool(closing) and not thought.strip().removeprefix(self.opening).strip()


NO_THOUGHT = EmptyThought()


def find_empty_thought(
    render: Callable[[dict[str, Any]], str], question: str, content: str
) -> EmptyThought:
    """The empty thought that a template writes.

    ``render`` gives what it makes of a question, which ends in ``question``, and of an answer that
    says ``content`` and has further keys; an empty text where it refuses them.
    """
    plain = render({}).rpartition(content)[0].rpartition(question)[2]
    thought = content * 2
    shown = render(dict.fromkeys(KEYS, thought)).rpartition(question)[2]
    before, is_shown, behind = shown.partition(thought)
    match = None
    if is_shown:
        # A pattern matches in any text.
        first, last = _LAST_TAG.findall(before.rstrip())[0], _FIRST_TAG.findall(behind.lstrip())[0]
        tags = rf"({re.escape(first)})\s*({re.escape(last)})"
        match = re.search(tags, plain) if first and last else None
    match = match or _TAGS.search(plain)
    if match is None:
        return NO_THOUGHT
    after = plain[match.end() :]
    blank = len(after) - len(after.lstrip())
    opening, closing = match[1] or match[2].replace("/", "", 1), match[2]
    start = match.start(1 if match[1] else 2)
    text = plain[start : match.end() + blank]
    return EmptyThought(plain[:start], opening, closing, text, after[blank:])
