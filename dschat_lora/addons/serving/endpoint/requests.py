"""Bodies of requests for answers, in OpenAI's interface, checked."""

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

from dschat_lora.addons.serving.endpoint.errors import ApiError, check_value, invalid
from dschat_lora.addons.serving.endpoint.grammars import (
    Grammar,
    request_grammar,
    response_schema,
    tool_choice,
)
from dschat_lora.addons.serving.endpoint.text import TURN_FIELDS, ReadMessages, read_messages
from dschat_lora.addons.serving.endpoint.turns import Kind
from dschat_lora.data.chat import ends_in_words
from dschat_lora.data.messages import Message, check_message, medium_of, with_arguments
from dschat_lora.models.loading import Tokenizer

T = TypeVar("T")
NumberT = TypeVar("NumberT", int, float)
MAX_CHOICES = 16
# Logits of up to 1e32 divided by it are finite in fp32.
MIN_TEMPERATURE = 1e-6
_MAX_STOPS = 16
_MAX_LOGPROBS = 20
# Fields without effect on an answer.
_IGNORED = {
    *("reasoning_effort", "verbosity", "user", "metadata", "store", "service_tier"),
    *("safety_identifier", "prompt_cache_key"),
}
# Fields that are taken with a value that asks for nothing.
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logit_bias": ({},),
    "modalities": (["text"],),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "min_p": (0,),
    "repetition_penalty": (1,),
}


class AnswerDefaults(Protocol):
    """Options of answers to requests that do not say them."""

    @property
    def temperature(self) -> float:
        """Of sampling; 0 is greedy."""

    @property
    def top_p(self) -> float:
        """In (0, 1]."""

    @property
    def top_k(self) -> int:
        """0 is all."""

    @property
    def max_new_tokens(self) -> int:
        """At least 1."""


class AnsweringModel(Protocol):
    """A model as requests name it."""

    @property
    def name(self) -> str:
        """That requests give."""

    @property
    def limit(self) -> int:
        """Most tokens of prompt and answer."""

    @property
    def vocabulary_size(self) -> int:
        """Tokens are below it."""

    @property
    def tokenizer(self) -> Tokenizer:
        """Of prompts and answers."""

    def prompt_ids(self, prompt: str) -> list[int]:
        """Tokens of a prompt as a text."""

    def chat_ids(self, messages: Sequence[Message], columns: Mapping[str, Any]) -> list[int]:
        """Tokens of messages up to the assistant's turn.

        ``columns`` holds ``tools`` and ``chat_template_kwargs`` where the request has them.

        Raises:
            ValueError: if the chat template refuses them.
        """


@dataclass(frozen=True)
class AnswerOptions:
    """How a request wants its answer."""

    max_new_tokens: int
    temperature: float = 1.0  # 0 is greedy
    top_p: float = 1.0
    top_k: int = 0  # 0 is all
    stop: tuple[str, ...] = ()
    seed: int | None = None
    strip: bool = False  # leave out white space in front
    cut: bool = False  # take fewer tokens where the model has no room for ``max_new_tokens``
    # Give log-probabilities of the answer's tokens, and of so many of the most probable ones.
    logprobs: int | None = None
    grammar: Grammar | None = None  # that the answer follows
    stop_token_ids: tuple[int, ...] = ()  # that end it, beside the model's own ends
    ignore_eos: bool = False  # the model's own ends do not
    return_token_ids: bool = False
    prompt_logprobs: bool = False  # log-probabilities of the prompt's tokens, at temperature 1
    # Log-probabilities in what tokens are drawn from; else at temperature 1, of all tokens.
    processed_logprobs: bool = False


@dataclass(frozen=True)
class AnswerRequest:
    """A request for answers: ``n`` to each prompt."""

    model: AnsweringModel
    prompts: tuple[Sequence[int], ...]  # tokens
    options: AnswerOptions
    n: int
    stream: bool
    include_usage: bool  # at the end of a stream
    reads_calls: bool = False  # tool calls in the text become calls
    parallel_calls: bool = True  # False keeps the first one


class Fields:
    """The fields of a body, each taken once; what is left over is refused."""

    def __init__(self, body: object) -> None:
        if not isinstance(body, dict):
            raise invalid("the body must be a JSON object")
        # As OpenAI: null is the same as absent.
        self._left = {name: value for name, value in body.items() if value is not None}

    def take(self, name: str, kinds: type[T] | tuple[type[T], ...], words: str) -> T | None:
        """The value of a field, None where it is absent; ``words`` say what it must be."""
        value = self._left.pop(name, None)
        is_kind = isinstance(value, kinds) and (kinds is bool or not isinstance(value, bool))
        if value is not None and not is_kind:
            raise invalid(f"{name} must be {words}, found {_shown(value)}", name)
        return value

    def number(self, name: str, low: float, high: float, kind: type[NumberT]) -> NumberT | None:
        """A number in [low, high], whole where ``kind`` is int; None where it is absent."""
        whole = kind is int
        words = f"{'a whole number' if whole else 'a number'} in [{low:g}, {high:g}]"
        value = self.take(name, (int,) if whole else (int, float), words)
        if value is not None and not low <= value <= high:
            raise invalid(f"{name} must be {words}, found {_shown(value)}", name)
        return None if value is None else kind(value)

    def finish(self) -> None:
        """Refuse fields that nothing has taken, but for those that ask for nothing."""
        for name, value in self._left.items():
            if name in _IGNORED or value in _NEUTRAL.get(name, ()):
                continue
            if name in _NEUTRAL:
                raise invalid(f"{name} {_shown(value)} is not supported here", name)
            raise invalid(f"{name:.80} is no known field", name)


async def parsed_request(
    body: object,
    kind: Kind,
    models: Mapping[str, AnsweringModel],
    defaults: AnswerDefaults,
    lock: AbstractContextManager[Any],
) -> AnswerRequest:
    """The request of a body, read beside the event loop; tokenizers are used under the ``lock``.

    Raises:
        ApiError: naming the field that is wrong.
    """
    parse = chat_request if kind == "chat" else text_request

    def alone() -> AnswerRequest:
        read = _with_read_messages(body, models) if kind == "chat" else body
        with lock:
            return parse(read, models, defaults)

    return await asyncio.to_thread(alone)


def _with_read_messages(body: object, models: Mapping[str, AnsweringModel]) -> object:
    """The body with what its messages hold beside text read, where its model takes such."""
    name, messages = (
        body.get(each) if isinstance(body, dict) else None for each in ("model", "messages")
    )
    model = models.get(name) if isinstance(name, str) else None
    if model is None or not isinstance(body, dict) or not isinstance(messages, list):
        return body  # refused below
    try:
        return {**body, "messages": read_messages(messages, getattr(model, "media", None))}
    except ValueError as error:
        raise invalid(str(error), "messages") from error


def chat_request(
    body: object, models: Mapping[str, AnsweringModel], defaults: AnswerDefaults
) -> AnswerRequest:
    """The request of ``/v1/chat/completions``.

    Raises:
        ApiError: naming the field that is wrong.
    """
    fields = Fields(body)
    model = _model(fields, models)
    messages = checked_messages(fields.take("messages", list, "a list of messages"))
    parallel = fields.take("parallel_tool_calls", bool, "true or false")
    tools = tool_choice(
        fields.take("tools", list, "a list of tools"),
        fields.take("tool_choice", (str, dict), "text or an object"),
        parallel=parallel is not False,
    )
    schema = response_schema(fields.take("response_format", dict, "an object"))
    template = getattr(model.tokenizer, "chat_template", None)
    grammar = request_grammar(tools, schema, template)
    given = {
        "tools": list(tools.shown),
        "chat_template_kwargs": fields.take("chat_template_kwargs", dict, "an object"),
    }
    columns = {name: value for name, value in given.items() if value} | _turn(fields, messages)
    try:
        prompt = model.chat_ids(messages, columns)
    except ValueError as error:
        raise invalid(str(error), "messages") from error
    top = fields.number("top_logprobs", 0, _MAX_LOGPROBS, int)
    asked = fields.take("logprobs", bool, "true or false")
    if top and not asked:
        raise invalid("top_logprobs is for logprobs: true", "top_logprobs")
    request = _request(fields, model, (prompt,), defaults, default_tokens=None)
    options = replace(request.options, logprobs=(top or 0) if asked else None, grammar=grammar)
    return replace(
        request, options=options, reads_calls=bool(tools.shown), parallel_calls=tools.parallel
    )


def _turn(fields: Fields, messages: Sequence[Message]) -> dict[str, bool]:
    """Whose turn it is after the messages, where the request says so, in vLLM's fields."""
    given = {name: fields.take(name, bool, "true or false") for name in TURN_FIELDS}
    asked = {name: value for name, value in given.items() if value is not None}
    if not asked.get(field := "continue_final_message"):
        return asked
    if asked.get("add_generation_prompt"):
        raise invalid(f"{field} is for add_generation_prompt: false", field)
    if not ends_in_words(messages):
        raise invalid(f"{field} is for a last message of the assistant's, with text", field)
    return asked


def text_request(
    body: object, models: Mapping[str, AnsweringModel], defaults: AnswerDefaults
) -> AnswerRequest:
    """The request of ``/v1/completions``.

    Raises:
        ApiError: naming the field that is wrong.
    """
    fields = Fields(body)
    model = _model(fields, models)
    words = "text, a list of texts, or tokens or lists of them"
    prompt = fields.take("prompt", (str, list), words)
    if prompt is None or prompt == []:
        raise invalid("prompt is missing", "prompt")
    several = prompt if isinstance(prompt, list) and not _is_tokens(prompt) else [prompt]
    _check_number(len(several))  # before any of them is tokenised
    size = model.vocabulary_size
    prompts = []
    for each in several:
        if isinstance(each, str):
            prompts.append(tuple(model.prompt_ids(each)))
            continue
        if not isinstance(each, list) or not _is_tokens(each):
            raise invalid(f"prompt must be {words}, found {_shown(each)}", "prompt")
        if not all(0 <= token < size for token in each):
            raise invalid(f"tokens of prompt must be in [0, {size - 1}]", "prompt")
        prompts.append(tuple(each))
    logprobs = fields.number("logprobs", 0, _MAX_LOGPROBS, int)
    scores = fields.number("prompt_logprobs", 0, 0, int) is not None
    request = _request(fields, model, tuple(prompts), defaults, default_tokens=16)
    if scores and request.stream:
        raise invalid("prompt_logprobs is for stream: false", "prompt_logprobs")
    options = replace(request.options, logprobs=logprobs, prompt_logprobs=scores)
    return replace(request, options=options)


def checked_messages(messages: object, param: str = "messages") -> list[Message]:
    """A list of at least one message.

    Raises:
        ApiError: naming ``param`` and what is wrong.
    """
    parts = ("image",) if isinstance(messages, ReadMessages) else ()
    if not isinstance(messages, list) or not messages:
        raise invalid(f"{param} must be a list of one message or more", param)
    for number, message in enumerate(messages, start=1):
        where = f"message {number}"
        try:
            check_message(f"{param}: {where}", message, media=parts)
            if (medium := medium_of(message)) is not None:
                raise ValueError(f"{where}: {medium!r} is none of its keys; 'content' has parts")
        except ValueError as error:
            raise invalid(str(error), param) from error
        try:
            check_value(with_arguments(message))  # arguments that are JSON text too
        except ValueError as error:
            raise invalid(f"{param}: {where}: {error}", param) from error
    return messages


def _request(
    fields: Fields,
    model: AnsweringModel,
    prompts: tuple[Sequence[int], ...],
    defaults: AnswerDefaults,
    *,
    default_tokens: int | None,
) -> AnswerRequest:
    n = fields.number("n", 1, MAX_CHOICES, int) or 1
    _check_number(n * len(prompts))
    stream = bool(fields.take("stream", bool, "true or false"))
    stream_options = fields.take("stream_options", dict, "an object") or {}
    if stream_options and not stream:
        raise invalid("stream_options is for stream: true", "stream_options")
    limit = model.limit
    asked = fields.number("max_completion_tokens", 1, limit, int)
    asked = fields.number("max_tokens", 1, limit, int) or asked
    ends = fields.take("stop_token_ids", list, "a list of tokens") or []
    size = model.vocabulary_size
    if len(ends) > _MAX_STOPS or not _is_tokens([0, *ends]) or not all(0 <= n < size for n in ends):
        raise invalid(
            f"stop_token_ids must be up to {_MAX_STOPS} tokens in [0, {size - 1}]", "stop_token_ids"
        )
    with_ids = bool(fields.take("return_token_ids", bool, "true or false"))
    if with_ids and stream:
        raise invalid("return_token_ids is for stream: false", "return_token_ids")
    stop = fields.take("stop", (str, list), "text or a list of texts") or []
    stop = [stop] if isinstance(stop, str) else stop
    if len(stop) > _MAX_STOPS or not all(isinstance(each, str) and each for each in stop):
        raise invalid(f"stop must be up to {_MAX_STOPS} texts, none empty", "stop")
    options = AnswerOptions(
        asked or default_tokens or defaults.max_new_tokens,
        *_sampling(fields, defaults),
        stop=tuple(stop),
        seed=fields.take("seed", int, "a whole number"),
        strip=default_tokens is None,
        cut=asked is None,
        stop_token_ids=tuple(ends),
        ignore_eos=bool(fields.take("ignore_eos", bool, "true or false")),
        return_token_ids=with_ids,
    )
    fields.finish()
    usage = bool(stream_options.get("include_usage"))
    return AnswerRequest(model, prompts, options, n, stream, usage)


def _check_number(answers: int) -> None:
    if answers > MAX_CHOICES:
        raise invalid(f"{answers} answers are asked for, at most {MAX_CHOICES} are given")


def _sampling(fields: Fields, defaults: AnswerDefaults) -> tuple[float, float, int]:
    """Temperature, top-p and top-k."""
    temperature = fields.number("temperature", 0, 2, float)
    if temperature and temperature < MIN_TEMPERATURE:
        words = f"0 (greedy) or at least {MIN_TEMPERATURE:g}, found {temperature}"
        raise invalid(f"temperature must be {words}", "temperature")
    top_p = fields.number("top_p", 0, 1, float)
    if top_p == 0:
        raise invalid("top_p must be in (0, 1], found 0", "top_p")
    top_k = fields.number("top_k", 0, 2**31, int)
    return (
        defaults.temperature if temperature is None else temperature,
        defaults.top_p if top_p is None else top_p,
        defaults.top_k if top_k is None else top_k,
    )


def _model(fields: Fields, models: Mapping[str, AnsweringModel]) -> AnsweringModel:
    name = fields.take("model", str, "text")
    if name is None:
        raise invalid(f"model is missing; it is one of {', '.join(models)}", "model")
    if name not in models:
        message = f"there is no model {_shown(name)}; there are {', '.join(models)}"
        raise ApiError(404, message, param="model", code="model_not_found")
    return models[name]


def _is_tokens(prompt: list[object]) -> bool:
    return all(isinstance(each, int) and not isinstance(each, bool) for each in prompt)


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."
