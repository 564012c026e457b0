"""Bodies of requests to OpenAI's interface, checked."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dschat_lora.data.messages import Message, check_message
from dschat_lora.generation.sampling import MIN_TEMPERATURE, Sampling
from dschat_lora.serving.config import ServeConfig
from dschat_lora.serving.decoder import AnswerOptions
from dschat_lora.serving.errors import ApiError, invalid
from dschat_lora.serving.models import ServedModel

MAX_CHOICES = 16
_MAX_STOPS = 16
# Fields without effect on an answer.
_IGNORED = {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"}
# Fields that are taken with a value that asks for nothing.
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logit_bias": ({},),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
}


@dataclass(frozen=True)
class AnswerRequest:
    """A request for answers: ``n`` to each prompt."""

    model: ServedModel
    prompts: tuple[tuple[int, ...], ...]  # tokens
    options: AnswerOptions
    n: int
    stream: bool
    include_usage: bool  # at the end of a stream


class Fields:
    """The fields of a body, each taken once; what is left over is refused."""

    def __init__(self, body: object) -> None:
        if not isinstance(body, dict):
            raise invalid("the body must be a JSON object")
        # As OpenAI: null is the same as absent.
        self._left = {name: value for name, value in body.items() if value is not None}

    def take(self, name: str, kinds: type | tuple[type, ...], words: str) -> Any:
        """The value of a field, None where it is absent; ``words`` say what it must be."""
        value = self._left.pop(name, None)
        is_kind = isinstance(value, kinds) and (kinds is bool or not isinstance(value, bool))
        if value is not None and not is_kind:
            raise invalid(f"{name} must be {words}, found {_shown(value)}", name)
        return value

    def number(self, name: str, low: float, high: float, *, whole: bool = False) -> Any:
        """A number in [low, high], None where it is absent."""
        words = f"{'a whole number' if whole else 'a number'} in [{low:g}, {high:g}]"
        value = self.take(name, int if whole else (int, float), words)
        if value is not None and not low <= value <= high:
            raise invalid(f"{name} must be {words}, found {_shown(value)}", name)
        return value

    def finish(self) -> None:
        """Refuse fields that nothing has taken, but for those that ask for nothing."""
        for name, value in self._left.items():
            if name in _IGNORED or value in _NEUTRAL.get(name, ()):
                continue
            if name in _NEUTRAL:
                raise invalid(f"{name} {_shown(value)} is not supported here", name)
            raise invalid(f"{name:.80} is no known field", name)


def chat_request(
    body: object, models: Mapping[str, ServedModel], config: ServeConfig
) -> AnswerRequest:
    """The request of ``/v1/chat/completions``.

    Raises:
        ApiError: naming the field that is wrong.
    """
    fields = Fields(body)
    model = _model(fields, models)
    messages = checked_messages(fields.take("messages", list, "a list of messages"))
    try:
        prompt = tuple(model.chat_ids(messages))
    except ValueError as error:
        raise invalid(str(error), "messages") from error
    return _request(fields, model, (prompt,), config, default_tokens=None)


def text_request(
    body: object, models: Mapping[str, ServedModel], config: ServeConfig
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
    prompts = tuple(tuple(_tokens(each, model, words)) for each in several)
    return _request(fields, model, prompts, config, default_tokens=16)


def checked_messages(messages: object, param: str = "messages") -> list[Message]:
    """A list of at least one message.

    Raises:
        ApiError: naming ``param`` and what is wrong.
    """
    if not isinstance(messages, list) or not messages:
        raise invalid(f"{param} must be a list of one message or more", param)
    for number, message in enumerate(messages, start=1):
        try:
            check_message(param, f"message {number}", message)
        except ValueError as error:
            raise invalid(str(error), param) from error
    return messages


def _request(
    fields: Fields,
    model: ServedModel,
    prompts: tuple[tuple[int, ...], ...],
    config: ServeConfig,
    *,
    default_tokens: int | None,
) -> AnswerRequest:
    n = fields.number("n", 1, MAX_CHOICES, whole=True) or 1
    _check_number(n * len(prompts))
    stream = bool(fields.take("stream", bool, "true or false"))
    stream_options = fields.take("stream_options", dict, "an object") or {}
    if stream_options and not stream:
        raise invalid("stream_options is for stream: true", "stream_options")
    options = _options(fields, model, config, default_tokens=default_tokens)
    fields.finish()
    usage = bool(stream_options.get("include_usage"))
    return AnswerRequest(model, prompts, options, n, stream, usage)


def _check_number(answers: int) -> None:
    if answers > MAX_CHOICES:
        raise invalid(f"{answers} answers are asked for, at most {MAX_CHOICES} are given")


def _options(
    fields: Fields, model: ServedModel, config: ServeConfig, *, default_tokens: int | None
) -> AnswerOptions:
    limit = model.batch.limit
    asked = fields.number("max_completion_tokens", 1, limit, whole=True)
    asked = fields.number("max_tokens", 1, limit, whole=True) or asked
    stop = fields.take("stop", (str, list), "text or a list of texts") or []
    stop = [stop] if isinstance(stop, str) else stop
    if len(stop) > _MAX_STOPS or not all(isinstance(each, str) and each for each in stop):
        raise invalid(f"stop must be up to {_MAX_STOPS} texts, none empty", "stop")
    return AnswerOptions(
        _sampling(fields, config),
        asked or default_tokens or config.max_new_tokens,
        stop=tuple(stop),
        seed=fields.take("seed", int, "a whole number"),
        strip=default_tokens is None,
        cut=asked is None,
    )


def _sampling(fields: Fields, config: ServeConfig) -> Sampling:
    temperature = fields.number("temperature", 0, 2)
    top_p = fields.number("top_p", 0, 1)
    top_k = fields.number("top_k", 0, 2**31, whole=True)
    temperature = config.temperature if temperature is None else float(temperature)
    if temperature == 0:
        return Sampling(1, do_sample=False)
    if temperature < MIN_TEMPERATURE:
        words = f"0 (greedy) or at least {MIN_TEMPERATURE:g}, found {temperature}"
        raise invalid(f"temperature must be {words}", "temperature")
    try:
        return Sampling(
            1,
            temperature=temperature,
            top_p=config.top_p if top_p is None else float(top_p),
            top_k=config.top_k if top_k is None else top_k,
        )
    except ValueError as error:
        raise invalid(str(error)) from error


def _model(fields: Fields, models: Mapping[str, ServedModel]) -> ServedModel:
    name = fields.take("model", str, "text")
    if name is None:
        raise invalid(f"model is missing; it is one of {', '.join(models)}", "model")
    if name not in models:
        message = f"there is no model {_shown(name)}; there are {', '.join(models)}"
        raise ApiError(404, message, param="model", code="model_not_found")
    return models[name]


def _is_tokens(prompt: list[object]) -> bool:
    return all(isinstance(each, int) and not isinstance(each, bool) for each in prompt)


def _tokens(prompt: object, model: ServedModel, words: str) -> list[int]:
    if isinstance(prompt, str):
        return model.prompt_ids(prompt)
    if not isinstance(prompt, list) or not _is_tokens(prompt):
        raise invalid(f"prompt must be {words}, found {_shown(prompt)}", "prompt")
    size = model.batch.base.get_input_embeddings().num_embeddings
    if not all(0 <= token < size for token in prompt):
        raise invalid(f"tokens of prompt must be in [0, {size - 1}]", "prompt")
    return prompt


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."
