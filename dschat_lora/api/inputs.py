"""Objects of a Python program as values of options: models, rows of data, functions."""

import os
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

from dschat_lora.config.held import held
from dschat_lora.runtime.stage_main import late


class EarlierRun(Protocol):
    """A run that has ended, such as :class:`dschat_lora.api.runs.Run`."""

    path: Path


PathLike = str | os.PathLike[str]
# A name or path, an earlier run, or a transformers model with its tokenizer.
Model = str | os.PathLike[str] | EarlierRun | tuple[Any, Any]
# A path, several, rows, or rows that an iterable gives again and again.
Data = PathLike | Iterable[PathLike] | Iterable[Mapping[str, Any]]
_FUNCTIONS = ("reward_function", "judge_function", "environment")
_DATA = ("data_path", "eval_data_path", "sft_only_data_path")
_MODELS = ("model_name_or_path", "reward_model")


def option_values(values: Mapping[str, Any], stack: ExitStack) -> dict[str, Any]:
    """The values with a name for each object, which ``stack`` holds.

    Raises:
        TypeError: for an object of another kind.
        ValueError: for rows that cannot be gone through twice.
    """
    found = {}
    for name, value in values.items():
        if name in _FUNCTIONS:
            value = _functions(value, stack)
        elif name in _DATA:
            value = data_value(value, name.removesuffix("_path"), stack)
        elif name.endswith(_MODELS):
            value = model_value(value, name)
        found[name] = value
    return found


def model_value(model: Any, option: str = "model") -> str | None:
    """The name or path of a model; one that is loaded is written to the cache of data.

    It has the same name there whenever it has the same weights, and is itself not changed.
    """
    if model is None or isinstance(model, str):
        return model
    if isinstance(model, os.PathLike):
        return os.fspath(model)
    if (path := getattr(model, "path", None)) is not None:
        return str(path)
    if isinstance(model, tuple | list) and len(model) == 2:
        saved: Path = late("models.fingerprint:saved_model")(*model)
        return str(saved)
    raise TypeError(
        f"{option} must be a name, a path, a Run, or (model, tokenizer), got a "
        f"{type(model).__name__}"
    )


def data_value(data: Any, name: str, stack: ExitStack) -> Any:
    """Paths as they are, and rows by the name under which ``stack`` holds them."""
    if data is None or isinstance(data, str | os.PathLike):
        return data
    if _is_table(data):
        raise TypeError(f"{name} is a table; give its rows: data.to_dict('records')")
    if not isinstance(data, Iterable) and hasattr(data, "__getitem__") and hasattr(data, "__len__"):
        data = [data[number] for number in range(len(data))]  # a Dataset of torch
    if not isinstance(data, Iterable) or isinstance(data, Mapping | bytes):
        raise TypeError(
            f"{name} must be a path, rows (dicts), a Dataset or another iterable of dicts, got a "
            f"{type(data).__name__}{_way_to_rows(data)}"
        )
    if iter(data) is data:
        raise ValueError(
            f"{name} is a {type(data).__name__}, which can be gone through once; give a list, or "
            "an object whose __iter__ begins anew"
        )
    if not isinstance(data, list | tuple):
        return stack.enter_context(held(data, name))
    if not data:
        raise ValueError(f"{name} has no rows")
    if all(isinstance(each, Mapping) for each in data):
        return stack.enter_context(held(data, name))
    texts = [each for each in data if isinstance(each, str) and len(each.split()) > 1]
    if texts and not any(Path(each).exists() for each in texts):
        raise TypeError(
            f"{name} is a list of texts; rows are dicts, such as {{'prompt': {texts[0]!r:.60}}}"
        )
    return [data_value(each, name, stack) for each in data]


def _is_table(data: Any) -> bool:
    """Whether it is a DataFrame, which iterates over names of columns."""
    return hasattr(data, "to_dict") and hasattr(data, "columns")


def _way_to_rows(data: object) -> str:
    """How what is no rows, but has some, gives them."""
    if not isinstance(data, Mapping):
        return ""
    if any(isinstance(value, str) for value in data.values()):
        return "; a single row goes into a list"
    if "DatasetDict" in type(data).__name__:
        return "; give one of its splits, such as data['train']"
    return "; of lists by column datasets.Dataset.from_dict(data) makes rows"


def _functions(value: Any, stack: ExitStack) -> Any:
    if isinstance(value, list | tuple):
        return [_functions(each, stack) for each in value]
    if callable(value):
        return stack.enter_context(held(value, function_name(value)))
    return value


def function_name(function: Callable[..., Any]) -> str:
    """A name for metrics: that of the function, or of its object's class."""
    own = getattr(function, "__name__", None) or type(function).__name__
    return re.sub(r"\W", "", own) or "function"
