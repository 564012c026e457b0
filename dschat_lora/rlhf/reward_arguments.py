"""Arguments of reward functions: texts, message lists and columns of data."""

import inspect
import json
from collections.abc import Callable, Sequence
from typing import Any

from dschat_lora.models.causal_lm import Tokenizer
from dschat_lora.rlhf.batch import Response

OWN = ("prompts", "responses", "ended", "rows", "token_ids")
TRL = ("prompts", "completions", "completion_ids")
# Of a function that is called with one response at a time.
SINGULAR = {
    "prompts": "prompt",
    "responses": "response",
    "completions": "completion",
    "rows": "row",
}
# Columns that are other arguments' matter, as in TRL.
_NOT_OFFERED = {"prompt", "completion", "messages", "chosen", "rejected"}
_OPEN = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def named_parameters(function: Callable[..., object]) -> dict[str, inspect.Parameter]:
    """Parameters of the function but ``*more`` and ``**others``."""
    parameters = inspect.signature(function).parameters.values()
    return {p.name: p for p in parameters if p.kind not in _OPEN}


def is_singular(function: Callable[..., object]) -> bool:
    """Whether the function scores one response at a time, by its parameters' names."""
    return bool({"response", "completion"} & named_parameters(function).keys())


def required_columns(function: Callable[..., object]) -> list[str]:
    """Parameters without default that only columns of the data can fill."""
    known = {*OWN, *TRL} if not is_singular(function) else {*map(_singular, (*OWN, *TRL))}
    parameters = named_parameters(function).values()
    return [p.name for p in parameters if p.default is p.empty and p.name not in known]


def calls_of(
    function: Callable[..., object], responses: Sequence[Response], tokenizer: Tokenizer
) -> list[dict[str, Any]]:
    """Keyword arguments of each call that scores the responses, with what the function takes.

    All in one call, unless the function takes one at a time. A function of TRL's, which takes
    ``completions`` and no ``responses``, gets prompts and completions as its data has them: text,
    or lists of messages.
    """
    names = named_parameters(function)
    offered = _offered(responses, tokenizer, like_trl=not {"responses", "response"} & names.keys())
    if is_singular(function):
        whole = {_singular(name): values for name, values in offered.items()}
        calls = [{name: v[i] for name, v in whole.items()} for i in range(len(responses))]
    else:
        calls = [offered]
    kinds = [p.kind for p in inspect.signature(function).parameters.values()]
    if inspect.Parameter.VAR_KEYWORD in kinds:
        return calls
    return [{name: v for name, v in call.items() if name in names} for call in calls]


def _singular(name: str) -> str:
    return SINGULAR.get(name, name)


def _offered(
    responses: Sequence[Response], tokenizer: Tokenizer, *, like_trl: bool
) -> dict[str, list[Any]]:
    rows: list[dict[str, Any]] = [json.loads(each.columns or b"{}") for each in responses]
    names = dict.fromkeys(name for row in rows for name in row if name not in _NOT_OFFERED)
    texts = [tokenizer.decode(list(each.tokens), skip_special_tokens=True) for each in responses]
    prompts = [tokenizer.decode(each.prompt) for each in responses]
    ids = [list(each.tokens) for each in responses]
    offered = {name: [row.get(name) for row in rows] for name in names} | {
        "prompts": prompts,
        "responses": texts,
        "completions": texts,
        "ended": [each.ended for each in responses],
        "rows": rows,
        "token_ids": ids,
        "completion_ids": ids,
    }
    if like_trl:
        found = [_prompt_of(row, text) for row, text in zip(rows, prompts, strict=True)]
        offered["prompts"] = found
        offered["completions"] = [
            text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]
            for prompt, text in zip(found, texts, strict=True)
        ]
    return offered


def _prompt_of(row: dict[str, Any], text: str) -> Any:
    """The prompt as the row has it, text or messages; ``text`` where it has another shape."""
    if isinstance(row.get("prompt"), str | list):
        return row["prompt"]
    messages = row.get("messages")
    if not isinstance(messages, list):
        return text
    # The answers at the end are not read: the model gives its own.
    count = len(messages)
    while count and messages[count - 1].get("role") == "assistant":
        count -= 1
    return messages[:count]
