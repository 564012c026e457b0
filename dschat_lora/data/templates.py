"""Chat templates: the built-in one, files that the user names, and probing of what one takes."""

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal

from dschat_lora.config.files import MOST_TYPED_BYTES, read_text
from dschat_lora.data.media import MediaReader
from dschat_lora.data.messages import WEIGHT, Message, content_text, is_medium, with_arguments
from dschat_lora.data.thoughts import NO_THOUGHT, EmptyThought, find_empty_thought

# A letter for private use: no template knows it, none trims it.
PROBE = "\ue0ff"
CALL_ID = "call00001"  # of nine characters, as Mistral's templates want it
# Names of one role in templates and data sets.
SAME_ROLES = (("system", "developer"), ("tool", "observation", "ipython", "environment"))
HUMAN = "\n\nHuman:"
ASSISTANT = "\n\nAssistant:"
# What a turn begins with, and whether it ends in end-of-sequence.
_TURNS = {"system": ("", False), "user": (HUMAN + " ", False), "assistant": (ASSISTANT + " ", True)}
# Turns headed Human and Assistant, end-of-sequence after each answer.
BUILT_IN_TEMPLATE = r"""
{%- if tools -%}
  {{- raise_exception("the built-in chat format has no place for tools") -}}
{%- endif -%}
{%- for message in messages -%}
  {%- if message.role not in ("system", "user", "assistant") -%}
    {{- raise_exception("role '" ~ message.role ~ "' has no place in the built-in chat format; use "
        "system, user or assistant, or a tokenizer with a chat template") -}}
  {%- elif message.tool_calls -%}
    {{- raise_exception("the built-in chat format has no place for tool calls") -}}
  {%- elif message.role == "system" -%}
    {{- message.content -}}
  {%- elif message.role == "user" -%}
    {{- "\n\nHuman: " ~ message.content -}}
  {%- else -%}
    {{- "\n\nAssistant: " ~ message.content ~ eos_token -}}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
  {{- "\n\nAssistant:" -}}
{%- endif -%}
"""


def render_built_in(messages: Sequence[Message], eos_text: str, *, asks: bool) -> str | None:
    """As ``BUILT_IN_TEMPLATE``, in a tenth of the time; None for messages that need more of it."""
    text = ""
    for message in messages:
        turn, content = _TURNS.get(message["role"]), message.get("content")
        if turn is None or not isinstance(content, str) or message.get("tool_calls"):
            return None
        heading, ends = turn
        text += heading + content + (eos_text if ends else "")
    return text + ASSISTANT if asks else text


def read_chat_template(path: str) -> str:
    """The text of the Jinja file that ``--chat_template`` names.

    Raises:
        ValueError: in one line, if it cannot be read or is no template.
    """
    import jinja2
    from jinja2 import nodes
    from jinja2.ext import Extension
    from jinja2.meta import find_undeclared_variables
    from jinja2.parser import Parser

    class Generation(Extension):  # a tag that transformers knows, as it does loop controls
        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Parser) -> list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    try:
        text = read_text(Path(path).expanduser(), most=MOST_TYPED_BYTES)
    except UnicodeDecodeError as error:
        raise ValueError(f"--chat_template {path} is not UTF-8 text") from error
    except (ValueError, OSError) as error:
        reason = getattr(error, "strerror", error)
        raise ValueError(f"--chat_template {path} cannot be read: {reason}") from error
    try:
        parser = jinja2.Environment(extensions=[Generation, "jinja2.ext.loopcontrols"])
        variables = find_undeclared_variables(parser.parse(text))
    except jinja2.TemplateSyntaxError as error:
        reason = f"line {error.lineno}: {error.message}"
        raise ValueError(f"--chat_template {path} is not a Jinja template: {reason}") from error
    except RecursionError:
        reason = "it is nested too deeply"
        raise ValueError(f"--chat_template {path} is not a Jinja template: {reason}") from None
    if "messages" not in variables:
        raise ValueError(f"--chat_template {path} must be a Jinja template that renders `messages`")
    return text


@dataclass(frozen=True)
class TemplateFacts:
    """The form of messages that a template takes, and the end that it gives an answer."""

    takes_text: bool = True
    takes_parts: bool = False
    takes_no_content: bool = True  # beside tool calls
    arguments: Literal["object", "text"] = "object"  # of calls; text where no object is taken
    # Of a role that it does not know, the one that it knows for the same
    roles: Mapping[str, str] = field(default_factory=dict)
    header: str = ""  # of the next answer, where it ends every text, whether asked for or not
    after_answer: str = ""  # what follows an answer that is the last message, without that header
    after_earlier: str = ""  # what follows one that is not
    after_call: str = ""  # what follows the last argument of a call that is the last message
    after_earlier_call: str = ""  # what follows that of one whose result is the next message
    empty_thought: EmptyThought = NO_THOUGHT


def probe_template(
    template: str, render: Callable[[list[Message], bool], str], special: Collection[str]
) -> TemplateFacts:
    """What a template and its renderings of a letter tell.

    ``render`` gives the text of messages, up to the assistant's turn if the flag says so, and
    raises ValueError where a template refuses them. ``special`` are the special tokens.
    """

    def rendered(*messages: Message, ask: bool = False) -> str:
        try:
            return render(list(messages), ask)
        except ValueError:
            return ""

    part = {"type": "text", "text": PROBE}
    plain, by_part = (rendered({"role": "user", "content": each}) for each in (PROBE, [part]))
    takes_text = PROBE in plain
    # Some write a list out as it is.
    takes_parts = PROBE in by_part and (not takes_text or by_part == plain)
    by_parts = takes_parts and not takes_text
    question, answer, silent = (
        {"role": role, "content": [{"type": "text", "text": text}] if by_parts else text}
        for role, text in (("user", "?"), ("assistant", PROBE), ("assistant", ""))
    )
    calls = {
        (form, bool(content)): {**content, **_calling(given)}
        for form, given in (("object", {"x": PROBE}), ("text", f'{{"x": "{PROBE}"}}'))
        for content in ({}, silent)
    }
    texts = {key: rendered(question, said) for key, said in calls.items()}
    # Not where arguments were written as a text in quotes, their own ones escaped.
    good = {
        key
        for key, text in texts.items()
        if (at := text.rfind(PROBE)) >= 0 and '\\"' not in text[max(0, at - 2) : at + 3]
    }

    def writes(role: str) -> bool:
        said = {**question, "role": role, "content": answer["content"]}
        if role in SAME_ROLES[0]:
            return PROBE in rendered(said, question)
        form, has_content = min(good, default=("object", True))
        call = _calling({"x": "1"} if form == "object" else '{"x": "1"}', id=CALL_ID)
        asking = {**(silent if has_content else {}), **call}
        return PROBE in rendered(question, asking, {**said, "name": "f", "tool_call_id": CALL_ID})

    roles: dict[str, str] = {}
    for names in SAME_ROLES:
        # Many write any role, but know those alone that they name.
        known = [n for n in names if re.search(f"['\"]{n}['\"]", template) and writes(n)]
        roles |= {name: known[0] for name in names if known and name not in known}
    last, earlier = (_behind(rendered(question, answer, *more)) for more in ((), (question,)))
    header = _unasked_header(last, earlier, rendered(question, ask=True), special)
    first = min(good, default=("", False))
    result = {**question, "role": "tool", "name": "f", "tool_call_id": CALL_ID}
    thought = find_empty_thought(lambda keys: rendered(question, {**answer, **keys}), "?", PROBE)
    return TemplateFacts(
        takes_text,
        takes_parts,
        takes_no_content=any(not has_content for _, has_content in good),
        arguments="text" if {form for form, _ in good} == {"text"} else "object",
        roles=roles,
        header=header,
        after_answer=last.removesuffix(header),
        after_earlier=earlier,
        after_call=_behind(texts.get(first, "")).removesuffix(header),
        after_earlier_call=_behind(rendered(question, calls[first], result)) if good else "",
        empty_thought=thought,
    )


def _calling(given: object, **keys: str) -> Message:
    """A message that calls a function; ``keys`` are further ones of the call."""
    call = {"type": "function", "function": {"name": "f", "arguments": given}, **keys}
    return {"role": "assistant", "tool_calls": [call]}


def _unasked_header(last: str, earlier: str, asked: str, special: Collection[str]) -> str:
    """The header of the next answer, which a template writes behind an answer that is the last one.

    ``last`` and ``earlier`` follow an answer that is the last message, and one that is not;
    ``asked`` is the text of a question up to its answer.
    """
    if earlier.startswith(last):
        return ""
    longest_first = sorted(special, key=len, reverse=True)
    tokens = re.compile(rf"\s*({'|'.join(map(re.escape, longest_first)) or '(?!)'})")
    # All headers may begin with one token, as the first does.
    begins, token = set[str](), tokens.search(asked.partition("?")[0])
    while token:
        begins.add(token[1])
        token = tokens.match(asked, token.end())
    shared = last[: common_prefix(last, earlier)]
    ends = [token.end() for token in tokens.finditer(shared) if token[1] not in begins]
    behind = last[ends[-1] if ends else 0 :]
    header = behind[len(behind) - common_prefix(behind[::-1], asked[::-1]) :]
    return header if header.strip() else ""


def common_prefix(left: str, right: str) -> int:
    """Number of leading characters that are equal."""
    low, high = 0, min(len(left), len(right))
    while low < high:
        middle = (low + high + 1) // 2
        if left.startswith(right[:middle]):
            low = middle
        else:
            high = middle - 1
    return low


def fit_messages(
    messages: Sequence[Message], facts: TemplateFacts, media: MediaReader | None = None
) -> list[Message]:
    """Messages without empty keys, of the roles and in the form that the template takes.

    Where that is text, the placeholder of ``media`` stands in it for a part that is none.

    Raises:
        ValueError: if the arguments of a tool call are malformed, or no object.
    """
    by_parts, made = facts.takes_parts and not facts.takes_text, []
    write = partial(json.dumps, ensure_ascii=False) if facts.arguments == "text" else dict
    for message in messages:
        fitted = {k: v for k, v in message.items() if v is not None and v != [] and k != WEIGHT}
        fitted = with_arguments(fitted, write)
        fitted["role"] = facts.roles.get(message["role"], message["role"])
        if "tool_calls" in fitted and not facts.takes_no_content:
            fitted.setdefault("content", "")
        content = fitted.get("content")
        # Some take parts of what the user says alone.
        as_text = facts.takes_text and message["role"] != "user"
        beside = isinstance(content, list) and any(map(is_medium, content))
        if isinstance(content, list) and ((as_text and not beside) or not facts.takes_parts):
            fitted["content"] = content_text(content, media.placeholder if media and beside else "")
        elif isinstance(content, str) and by_parts:
            fitted["content"] = [{"type": "text", "text": content}]
        made.append(fitted)
    return made


def _behind(text: str) -> str:
    return text.rpartition(PROBE)[2] if PROBE in text else ""
