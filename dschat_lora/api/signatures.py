"""Signatures and docstrings that name every option, for editors, notebooks and type checkers."""

import inspect
from collections.abc import Callable, Collection
from typing import Any, TypeVar, get_args

from dschat_lora.config.help import by_section
from dschat_lora.config.options import option_fields
from dschat_lora.config.values import is_switch, value_shape

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])
OptionRow = tuple[str, str, object, str]  # name, type, default, help
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


def with_options(
    config_class: Any, *named: str, only: Collection[str] | None = None
) -> Callable[[FunctionT], FunctionT]:
    """A decorator that names the options of ``config_class`` in a function's signature and help.

    They stand in place of ``**options``, but for ``named`` ones, which have an argument of their
    own. ``only`` some of them may be taken.
    """

    def decorate(function: FunctionT) -> FunctionT:
        whole = inspect.signature(function)
        *own, options = whole.parameters.values()
        assert options.kind is options.VAR_KEYWORD
        taken, rows = {*whole.parameters, *named}, dict[str, OptionRow]()
        sections: dict[str, str] = {}
        for name, (field, annotation) in option_fields(config_class):
            if name in taken or (only is not None and name not in only):
                continue
            default = field.default
            kind = type_text(name, annotation)
            if default is None and not kind.endswith("None"):
                kind += " | None"
            rows[name] = (name, kind, default, field.metadata["help"])
            sections[name] = field.metadata["section"]
        by_title = by_section(sections.items())
        function.options = {  # type: ignore[attr-defined]
            title: [rows[name] for name in names] for title, names in by_title.items()
        }
        ordered = [rows[name] for names in by_title.values() for name in names]
        parameters = [
            inspect.Parameter(name, options.KEYWORD_ONLY, default=default, annotation=kind)
            for name, kind, default, _ in ordered
        ]
        function.__signature__ = whole.replace(  # type: ignore[attr-defined]
            parameters=[*own, *parameters]
        )
        lines = [f"    {name} ({kind}): {text}" for name, kind, _, text in ordered]
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
