"""Bodies of requests for answers, in OpenAI's interface, and of votes, checked."""

import errno
import json
import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dschat_lora.data.messages import Message, check_message
from dschat_lora.generation.sampling import MIN_TEMPERATURE, Sampling
from dschat_lora.serving.config import ServeConfig
from dschat_lora.serving.decoder import AnswerOptions, sampling_of
from dschat_lora.serving.guard import ApiError, invalid
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
    size = model.batch.base.get_input_embeddings().num_embeddings
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
    return _request(fields, model, tuple(prompts), config, default_tokens=16)


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
    limit = model.batch.limit
    asked = fields.number("max_completion_tokens", 1, limit, whole=True)
    asked = fields.number("max_tokens", 1, limit, whole=True) or asked
    stop = fields.take("stop", (str, list), "text or a list of texts") or []
    stop = [stop] if isinstance(stop, str) else stop
    if len(stop) > _MAX_STOPS or not all(isinstance(each, str) and each for each in stop):
        raise invalid(f"stop must be up to {_MAX_STOPS} texts, none empty", "stop")
    options = AnswerOptions(
        _sampling(fields, config),
        asked or default_tokens or config.max_new_tokens,
        stop=tuple(stop),
        seed=fields.take("seed", int, "a whole number"),
        strip=default_tokens is None,
        cut=asked is None,
    )
    fields.finish()
    usage = bool(stream_options.get("include_usage"))
    return AnswerRequest(model, prompts, options, n, stream, usage)


def _check_number(answers: int) -> None:
    if answers > MAX_CHOICES:
        raise invalid(f"{answers} answers are asked for, at most {MAX_CHOICES} are given")


def _sampling(fields: Fields, config: ServeConfig) -> Sampling:
    temperature = fields.number("temperature", 0, 2)
    top_p = fields.number("top_p", 0, 1)
    top_k = fields.number("top_k", 0, 2**31, whole=True)
    temperature = config.temperature if temperature is None else float(temperature)
    if 0 < temperature < MIN_TEMPERATURE:
        words = f"0 (greedy) or at least {MIN_TEMPERATURE:g}, found {temperature}"
        raise invalid(f"temperature must be {words}", "temperature")
    try:
        return sampling_of(
            temperature,
            config.top_p if top_p is None else float(top_p),
            config.top_k if top_k is None else top_k,
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


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."


class VoteFile:
    """A JSONL file with a row for each answer that another one was preferred to."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()

    def append(self, body: object) -> int:
        """Write the rows of a vote, all or none; returns how many.

        Raises:
            ApiError: naming the field that is wrong.
            OSError: if the file cannot be written.
        """
        rows = _vote_rows(body)
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        with self._lock:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("ab+", buffering=0) as file:
                size = file.tell()
                if size:  # a line that a crash left unfinished stays a line of its own
                    file.seek(-1, os.SEEK_END)
                    text = text if file.read(1) == b"\n" else f"\n{text}"
                try:
                    # A disk that is nearly full takes a part.
                    if file.write(text.encode()) < len(text.encode()):
                        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))
                    os.fsync(file.fileno())
                except OSError:
                    file.truncate(size)
                    raise
        return len(rows)


def _vote_rows(body: object) -> list[dict[str, Any]]:
    """Rows of ``prompt``, ``chosen`` and ``rejected``, one for each answer that was not chosen.

    Answers that are equal to the chosen one, or empty, say nothing and are left out.
    """
    fields = Fields(body)
    prompt = checked_messages(fields.take("prompt", list, "a list of messages"), "prompt")
    chosen_model, chosen = _model_and_text(fields.take("chosen", dict, "an object"), "chosen")
    others = fields.take("rejected", list, "a list of objects") or []
    fields.finish()
    rejected = [_model_and_text(each, "rejected") for each in others]
    rows = [
        {
            "prompt": prompt,
            "chosen": [{"role": "assistant", "content": chosen}],
            "rejected": [{"role": "assistant", "content": text}],
            "chosen_model": chosen_model,
            "rejected_model": model,
        }
        for model, text in rejected
        if text.strip() and text.strip() != chosen.strip()
    ]
    if not chosen.strip():
        raise invalid("an empty answer cannot be chosen", "chosen")
    if not rows:
        raise invalid("there is no other answer to compare with", "rejected")
    return rows


def _model_and_text(value: object, param: str) -> tuple[str, str]:
    if isinstance(value, dict) and value.keys() == {"model", "content"}:
        model, content = value["model"], value["content"]
        if isinstance(model, str) and isinstance(content, str):
            return model, content
    raise invalid(f'{param} must be {{"model": TEXT, "content": TEXT}}', param)
