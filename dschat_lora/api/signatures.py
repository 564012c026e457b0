"""Signatures and docstrings that name every option, for editors, notebooks and type checkers."""

import inspect
from collections.abc import Callable
from itertools import chain
from typing import Any, TypeVar, get_args

from dschat_lora.config.help import by_section
from dschat_lora.config.options import option_fields
from dschat_lora.config.values import is_switch, value_shape

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])
Paths = "str | os.PathLike[str]"
# Options whose objects in Python are more than the text of the command line.
_TYPES = {
    "columns": "Sequence[str] | Mapping[str, str]",
    "deepspeed_config": f"{Paths} | Mapping[str, Any] | None",
    "chat_template_kwargs": "str | Mapping[str, Any] | None",
    "judge_function": "str | Callable[..., Any] | None",
    "reward_function": "str | Callable[..., Any] | Sequence[str | Callable[..., Any]]",
    "reward_model": "Model | None",
}


def with_options(config_class: Any, *named: str) -> Callable[[FunctionT], FunctionT]:
    """A decorator that names the options of ``config_class`` in a function's signature and help.

    They stand in place of ``**options``, but for ``named`` ones, which have an argument of their
    own.
    """

    def decorate(function: FunctionT) -> FunctionT:
        whole = inspect.signature(function)
        *own, options = whole.parameters.values()
        assert options.kind is options.VAR_KEYWORD
        taken, parameters, lines = {*whole.parameters, *named}, list(own), list[str]()
        fields = dict(option_fields(config_class))
        sections = by_section(
            (name, field.metadata["section"]) for name, (field, _) in fields.items()
        )
        for name in chain.from_iterable(sections.values()):
            if name in taken:
                continue
            field, annotation = fields[name]
            default = field.default
            kind = type_text(name, annotation)
            if default is None and not kind.endswith("None"):
                kind += " | None"
            parameters.append(
                inspect.Parameter(
                    name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind
                )
            )
            lines.append(f"    {name} ({kind}): {field.metadata['help']}")
        function.__signature__ = whole.replace(parameters=parameters)  # type: ignore[attr-defined]
        about = inspect.cleandoc(function.__doc__ or "")
        function.__doc__ = "\n".join([about, "", "Options:", *lines])
        return function

    return decorate


def type_text(name: str, annotation: Any) -> str:
    """What an option takes in Python, as it is written in a signature."""
    if name in _TYPES:
        return _TYPES[name]
    optional = type(None) in get_args(annotation)
    if is_switch(annotation):
        words = [word for other in get_args(annotation) for word in get_args(other)]
        return "bool" + (f" | Literal{words}" if words else "")
    kind, choices, many = value_shape(annotation)
    text = f"Literal{[*choices]}" if choices else kind.__name__
    if kind is str and not choices and name.endswith(("_path", "_dir", "_file")):
        text = Paths
    if many:
        text = f"{text} | Sequence[{text}]"
    return f"{text} | None" if optional else text
