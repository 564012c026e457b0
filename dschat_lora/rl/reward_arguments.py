"""Arguments of reward functions: texts, message lists and columns of data."""

import inspect
import json
from collections.abc import Callable, Collection, Sequence
from typing import Any

from dschat_lora.models.causal_lm import Tokenizer
from dschat_lora.rl.batch import Response

OWN = ("prompts", "responses", "messages", "ended", "rows", "token_ids")
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


def takes_responses(names: Collection[str]) -> bool:
    """Whether parameters of these names are what a function needs to see responses."""
    return not {"responses", "completions", "messages", "response", "completion"}.isdisjoint(names)


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
    texts = [last_text(each, tokenizer) for each in responses]
    prompts = [tokenizer.decode(each.prompt) for each in responses]
    found = [_prompt_of(row, text) for row, text in zip(rows, prompts, strict=True)]
    said = [messages_after_prompt(each, tokenizer) for each in responses]
    ids = [list(each.tokens) for each in responses]
    offered = {name: [row.get(name) for row in rows] for name in names} | {
        "prompts": prompts,
        "responses": texts,
        "completions": texts,
        "messages": [[*as_messages(p), *m] for p, m in zip(found, said, strict=True)],
        "ended": [each.ended for each in responses],
        "rows": rows,
        "token_ids": ids,
        "completion_ids": ids,
    }
    if like_trl:
        offered["prompts"] = found
        offered["completions"] = [
            text if isinstance(prompt, str) else messages
            for prompt, text, messages in zip(found, texts, said, strict=True)
        ]
    return offered


def last_text(response: Response, tokenizer: Tokenizer) -> str:
    """Text of the actor's last turn, without special tokens."""
    return tokenizer.decode(list(response.last_turn), skip_special_tokens=True)


def messages_after_prompt(response: Response, tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """The actor's turns and what its environment said between them."""
    last = {"role": "assistant", "content": last_text(response, tokenizer)}
    return [*json.loads(response.earlier or b"[]"), last]


def prompt_messages(response: Response, tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """The prompt as messages; a text is one of a user's."""
    row = json.loads(response.columns or b"{}")
    return as_messages(_prompt_of(row, tokenizer.decode(response.prompt)))


def as_messages(prompt: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The prompt as messages; a text is one of a user's."""
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt


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
