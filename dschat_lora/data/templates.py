"""Chat templates as text: the built-in one, and files that the user names."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dschat_lora.config.files import MOST_TYPED_BYTES, read_text
from dschat_lora.data.messages import Message

if TYPE_CHECKING:
    from jinja2 import Environment

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


def render_built_in(
    messages: Sequence[Message], eos_text: str, *, add_generation_prompt: bool
) -> str | None:
    """As ``BUILT_IN_TEMPLATE``, in a tenth of the time; None for messages that need more of it."""
    text = ""
    for message in messages:
        turn, content = _TURNS.get(message["role"]), message.get("content")
        if turn is None or not isinstance(content, str) or message.get("tool_calls"):
            return None
        heading, ends = turn
        text += heading + content + (eos_text if ends else "")
    return text + ASSISTANT if add_generation_prompt else text


def read_chat_template(path: str) -> str:
    """The text of the Jinja file that ``--chat_template`` names.

    Raises:
        ValueError: in one line, if it cannot be read or is no template.
    """
    from jinja2 import TemplateSyntaxError
    from jinja2.meta import find_undeclared_variables

    try:
        text = read_text(Path(path).expanduser(), most=MOST_TYPED_BYTES)
    except UnicodeDecodeError as error:
        raise ValueError(f"--chat_template {path} is not UTF-8 text") from error
    except ValueError as error:
        raise ValueError(f"--chat_template {path} cannot be read: {error}") from error
    except OSError as error:
        raise ValueError(f"--chat_template {path} cannot be read: {error.strerror}") from error
    try:
        variables = find_undeclared_variables(_environment().parse(text))
    except TemplateSyntaxError as error:
        reason = f"line {error.lineno}: {error.message}"
        raise ValueError(f"--chat_template {path} is no Jinja template: {reason}") from error
    except RecursionError:
        reason = "it is nested too deeply"
        raise ValueError(f"--chat_template {path} is no Jinja template: {reason}") from None
    if "messages" not in variables:
        raise ValueError(f"--chat_template {path} must be a Jinja template that renders `messages`")
    return text


def _environment() -> "Environment":
    """One that knows the tags of transformers: loop controls and generation marks."""
    from jinja2 import Environment, nodes
    from jinja2.ext import Extension
    from jinja2.parser import Parser

    class Generation(Extension):
        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Parser) -> list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    return Environment(extensions=[Generation, "jinja2.ext.loopcontrols"])
