"""Chat templates: messages as text, by the tokenizer's or a built-in Human / Assistant format."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

from dschat_lora.config.data import parse_variables
from dschat_lora.data.encoder import Tokenizer
from dschat_lora.data.media import MediaReader, media_of
from dschat_lora.data.messages import Message, tool_schemas
from dschat_lora.data.template_process import template_process
from dschat_lora.data.templates import (
    BUILT_IN_TEMPLATE,
    PROBE,
    TemplateFacts,
    common_prefix,
    fit_messages,
    probe_template,
    render_built_in,
)

_MOST_FACTS = 64
_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")


class Span(NamedTuple):
    """A stretch of text that is trained on (``target``) or only read."""

    text: str
    target: bool
    # Start and end of each empty thought in a target that the chat template added.
    empty_thoughts: tuple[tuple[int, int], ...] = ()


class AddedTokens(NamedTuple):
    """The tokens that a tokenizer finds in a text before all others."""

    special: tuple[str, ...]  # text of each special token
    pattern: re.Pattern[str]  # any of the tokens
    longest: int  # characters of the longest one


@dataclass(frozen=True)
class Chat:
    """The tokenizer's chat template if it has one, else the built-in format."""

    tokenizer: Tokenizer
    eos_text: str  # of the run's end-of-sequence token
    variables: Mapping[str, Any] = field(default_factory=dict)  # further ones of the template
    tools: Sequence[Any] | None = None  # JSON schemas that the messages come with
    # What reads inputs beside text, and has a placeholder where the template takes text alone.
    media: MediaReader | None = field(default=None, compare=False, repr=False)
    # Shared with the copies for rows that bring columns of their own.
    _facts: dict[str, TemplateFacts] = field(default_factory=dict, compare=False, repr=False)
    # By conversations of a shape, what the template leaves out of them.
    unwritten: dict[Any, set[tuple[int, str]]] = field(
        default_factory=dict, compare=False, repr=False
    )
    _found_tokens: list[AddedTokens] = field(default_factory=list, compare=False, repr=False)

    @property
    def _tokens(self) -> AddedTokens:
        if not self._found_tokens:
            added = self.tokenizer.added_tokens_decoder.values()
            texts = [token.content for token in added]
            longest_first = sorted(filter(str.strip, texts), key=len, reverse=True)
            pattern = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
            special = tuple(token.content for token in added if token.special)
            self._found_tokens.append(
                AddedTokens(special, pattern, max(map(len, texts), default=1))
            )
        return self._found_tokens[0]

    def with_columns(self, values: Mapping[str, Any]) -> "Chat":
        """With a row's ``tools`` and ``chat_template_kwargs``, which win over the option's.

        Raises:
            ValueError: if one is not a list of objects, or an object.
        """
        if not values.keys() & {"tools", "chat_template_kwargs"}:
            return self
        own = parse_variables(values.get("chat_template_kwargs"), "`chat_template_kwargs`")
        own = {name: value for name, value in own.items() if value is not None}
        variables = {**self.variables, **own}
        return replace(self, variables=variables, tools=tool_schemas(values.get("tools")))

    def render_prompt(self, messages: Sequence[Message]) -> str:
        """Text up to where the model speaks: up to its turn, or to the end of its own last words.

        Raises:
            ValueError: as :meth:`render`.
        """
        goes_on = ends_in_words(messages)
        return self.render(
            messages, add_generation_prompt=not goes_on, continue_final_message=goes_on
        )

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool,
        continue_final_message: bool = False,
    ) -> str:
        """Text of messages; with ``add_generation_prompt``, up to the assistant's turn.

        With ``continue_final_message``, up to the end of the last one's content, as transformers
        cut it.

        Raises:
            ValueError: if the template refuses them, or for a role that the format lacks.
        """
        if self.is_built_in and not continue_final_message:
            text = render_built_in(messages, self.eos_text, asks=add_generation_prompt)
            if text is not None:
                return text
        fitted = fit_messages(messages, self.facts, self.media)
        text = self._render(fitted, add_generation_prompt, continue_final_message)
        asked = add_generation_prompt or continue_final_message
        return text if asked else text.removesuffix(self.facts.header)

    def render_marked(self, messages: Sequence[Message]) -> tuple[str, list[tuple[int, int]]]:
        """Text of messages and the (start, end) of each ``{% generation %}`` block in it."""
        fitted = fit_messages(messages, self.facts, self.media)
        text, marks = self._in_process(fitted, return_assistant_tokens_mask=True)
        return text, [(start, end) for start, end in marks if end > start]

    @cached_property
    def template(self) -> str:
        """The Jinja template that renders these messages."""
        if self.tokenizer.chat_template is None:
            return BUILT_IN_TEMPLATE
        return self.tokenizer.get_chat_template(tools=self.tools)

    @cached_property
    def is_built_in(self) -> bool:
        """Whether the built-in format is used, and without tools, which it refuses."""
        return self.template == BUILT_IN_TEMPLATE and not self.tools

    @property
    def special_tokens(self) -> tuple[str, ...]:
        """The text of each of the tokenizer's special tokens."""
        return self._tokens.special

    @cached_property
    def has_marks(self) -> bool:
        """Whether the template marks what the assistant generates."""
        return _MARK.search(self.template) is not None

    @cached_property
    def facts(self) -> TemplateFacts:
        """What rendering a probe tells of the template."""
        key = json.dumps([self.template, self.variables], sort_keys=True, default=str)
        if key not in self._facts:
            if len(self._facts) >= _MOST_FACTS:  # variables may come from clients
                self._facts.clear()
            self._facts[key] = probe_template(self.template, self._render, self._tokens.special)
        return self._facts[key]

    @cached_property
    def closing(self) -> str:
        """What the template adds behind an answer only where it is the last message.

        Empty where it adds nothing, and where nothing else would end an earlier answer.
        """
        last = self.facts.after_answer
        stays = self.whole_tokens(last, common_prefix(last, self.facts.after_earlier))
        return last[stays:] if last[:stays].strip() else ""

    @property
    def end_tokens(self) -> tuple[str, ...]:
        """Special tokens that end an answer in this template, beside end-of-sequence."""
        facts = self.facts
        last, call = facts.after_answer, facts.after_call
        texts = [last.removesuffix(self.closing), last, *([] if self._ends_in_marker else [call])]
        for text, behind in ((last, facts.after_earlier), (call, facts.after_earlier_call)):
            texts.append(self.marker_behind(text, behind.removeprefix(text)))
        ends: dict[str, None] = {}
        # Of the tokens in a row the last: those before it close parts of an answer.
        for text in texts:
            ends |= dict.fromkeys(
                [t for t in self._tokens.pattern.findall(text) if t in self._tokens.special][-1:]
            )
        return tuple(token for token in ends if token != self.eos_text)

    @cached_property
    def _ends_in_marker(self) -> bool:
        """Whether nothing ends an answer but the marker of the next role."""
        last, earlier = self.facts.after_answer, self.facts.after_earlier
        return not self._has_end(last) and bool(self._marker(earlier.removeprefix(last)))

    def marker_behind(self, turn: str, following: str) -> str:
        """The marker of the next role where nothing else ends a turn: what follows it begins so."""
        if self._has_end(turn) and not self._ends_in_marker:
            return ""
        return self._marker(following)

    def _marker(self, text: str) -> str:
        """The special token that a text begins with, white space before it included."""
        token = self._tokens.pattern.match(text, len(text) - len(text.lstrip()))
        return text[: token.end()] if token and token[0] in self._tokens.special else ""

    def _has_end(self, text: str) -> bool:
        """Whether a special token ends a text, white space aside."""
        return text.rstrip().endswith((*self._tokens.special, self.eos_text or PROBE))

    def is_ended(self, text: str) -> bool:
        """Whether a token other than end-of-sequence, white space aside, ends an answer's text."""
        text = text.rstrip()
        return text.endswith(self._tokens.special) and not (
            self.eos_text and text.endswith(self.eos_text)
        )

    def whole_tokens(self, text: str, length: int) -> int:
        """``length``, or less if it would cut through an added token of ``text``."""
        start = max(0, length - self._tokens.longest)
        for match in self._tokens.pattern.finditer(text, start, length + self._tokens.longest):
            if match.start() < length < match.end():
                return match.start()
        return length

    def _render(
        self,
        messages: list[Message],
        add_generation_prompt: bool,
        continue_final_message: bool = False,
    ) -> str:
        options = {
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
        }
        if self.template != BUILT_IN_TEMPLATE:
            return self._in_process(messages, **options)[0]
        from jinja2 import TemplateError

        try:
            return self.tokenizer.apply_chat_template(
                messages,
                tools=self.tools,
                chat_template=self.template,
                tokenize=False,
                **options,
                **self.variables,
            )
        except (TemplateError, TypeError, LookupError, AttributeError) as error:
            raise ValueError(str(error)) from error
        except RecursionError:
            raise ValueError("lists or objects are nested too deeply") from None

    def _in_process(self, messages: list[Message], **options: bool) -> tuple[str, list[list[int]]]:
        """What the tokenizer's own template makes of messages."""
        # As apply_chat_template has it: many templates write out what is None.
        given = [{k: v for k, v in message.items() if v is not None} for message in messages]
        variables = {**self.tokenizer.special_tokens_map, **self.variables}
        request = {"messages": given, "tools": self.tools, "variables": variables, **options}
        try:
            return template_process().render(self.template, request)
        except ValueError as error:
            raise ValueError(
                f"the tokenizer's chat template rejects the messages: {error}"
            ) from error


def ends_in_words(messages: Sequence[Message]) -> bool:
    """Whether the last message is the assistant's, with a content that may be continued."""
    last = messages[-1] if messages else {}
    content = last.get("content")
    return last.get("role") == "assistant" and bool(content) and not last.get("tool_calls")


def make_chat(
    tokenizer: Tokenizer, chat_template_kwargs: str | None = None, *, eos_id: int | None = None
) -> Chat:
    """How messages become text; ``eos_id`` ends an answer, by default the tokenizer's own token.

    Raises:
        ValueError: if ``chat_template_kwargs`` is not a JSON object.
    """
    end = tokenizer.eos_token_id if eos_id is None else eos_id
    assert end is not None
    variables = parse_variables(chat_template_kwargs)
    token = tokenizer.convert_ids_to_tokens(end)
    return Chat(tokenizer, token, variables, media=media_of(tokenizer))


def end_tokens(tokenizer: Tokenizer) -> tuple[str, ...]:
    """Special tokens that end an answer in the tokenizer's chat template, beside its own end."""
    return make_chat(tokenizer).end_tokens
