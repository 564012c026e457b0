"""Options in Python: signatures and docstrings that name each, and objects as their values.

The objects are models, rows of data, functions, and what scores responses of step 3.
"""

import inspect
import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast, get_args

from dschat_lora.api.tracebacks import api_boundary
from dschat_lora.config.groups import ModelConfig
from dschat_lora.config.held import held
from dschat_lora.config.options import option_fields, options_that_run
from dschat_lora.config.parser import by_section, everyday_options
from dschat_lora.config.plurals import counted
from dschat_lora.config.values import is_switch, number_words, value_shape
from dschat_lora.rl.options.algorithms import ALGORITHMS
from dschat_lora.rl.options.engines import known_engines
from dschat_lora.rl.options.names import of_addons
from dschat_lora.runtime.stage_main import late

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    from dschat_lora.supervised.scorer import LoadedRewardModel


class EarlierRun(Protocol):
    """A run that has ended, such as :class:`dschat_lora.api.stages.Run`."""

    path: Path


class DataFrame(Protocol):
    """A table of pandas or polars."""

    @property
    def columns(self) -> Iterable[Any]:
        """Names of the columns."""


PathLike = str | os.PathLike[str]
# A name or path, an earlier run, or a transformers model with its tokenizer.
Model = str | os.PathLike[str] | EarlierRun | tuple[Any, Any]
# A path, several, texts, rows, or rows that an iterable gives again and again.
Data = PathLike | Iterable[PathLike] | Iterable[Mapping[str, Any]] | DataFrame
# What scores responses: a function, the name of one, or a reward model.
Reward = Callable[..., Any] | str | os.PathLike[str] | EarlierRun
FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])
OptionRow = tuple[str, str, object, str]  # name, type, default, help
Paths = "str | os.PathLike[str]"
_DATA = ("data_path", "eval_data_path", "sft_only_data_path", "against")
_MODELS = ("model_name_or_path", "reward_model")
# Options whose objects in Python are more than the text of the command line.
_TYPES = {
    "algorithm": (
        f"Literal{[*ALGORITHMS, *of_addons('algorithm')]} | str | Callable[..., Any] | Algorithm"
    ),
    "columns": "Sequence[str] | Mapping[str, str]",
    "deepspeed_config": f"{Paths} | Mapping[str, Any] | None",
    "chat_template_kwargs": "str | Mapping[str, Any] | None",
    "reward_function": "str | Callable[..., Any] | Sequence[str | Callable[..., Any]]",
    "reward_model": "Model | None",
    "rollout_engine": f"Literal{[n for n in known_engines() if n[-1] != ':']} | str | object",
}


class Sections(dict[str, list[OptionRow]]):
    """Options by section, which ``print`` shows one a line."""

    def __str__(self) -> str:
        parts = (
            "\n".join([f"{title}:", *(f"    {row[0]}={row[2]!r}: {row[3]}" for row in rows)])
            for title, rows in self.items()
        )
        return "\n\n".join(parts)


class AllOptions(inspect.Signature):
    """A signature that editors read whole, and that ``help`` shows without rare options."""

    shown: inspect.Signature | None = None

    def __str__(self) -> str:
        return super().__str__() if self.shown is None else str(self.shown)

    def format(self, **width: Any) -> str:
        """The text of ``help`` from Python 3.13 on."""
        whole = super() if self.shown is None else self.shown
        text: str = whole.format(**width)  # type: ignore[union-attr]
        return text


def with_options(
    config_class: "type[DataclassInstance]", *named: str, only: Collection[str] | None = None
) -> Callable[[FunctionT], FunctionT]:
    """A decorator that gives a public function the options of ``config_class``.

    Its signature has all, its help the everyday ones, and its attribute ``options`` all by section,
    but for ``named`` ones, which have an argument of their own. ``only`` some of them may be taken.
    """

    def decorate(function: FunctionT) -> FunctionT:
        whole = inspect.signature(function)
        *own, others = whole.parameters.values()
        assert others.kind is others.VAR_KEYWORD
        taken, rows = {*whole.parameters, *named}, dict[str, OptionRow]()
        fields, sections = option_fields(config_class), dict[str, str]()
        for name, (field, annotation) in fields.items():
            if name in taken or (only is not None and name not in only):
                continue
            default = field.default
            kind = type_text(name, annotation)
            if field.metadata["runs"] == "object" and name not in _TYPES:
                many = value_shape(annotation)[2]
                kind = "Any | Sequence[Any]" if many else "str | object | None"
            if default is None and not kind.endswith("None"):
                kind += " | None"
            rows[name] = (name, kind, default, field.metadata["help"].replace("\n", "; "))
            sections[name] = field.metadata["section"]
        first = getattr(config_class, "everyday", None) if only is None else None
        by_title = by_section(sections, first or ())
        function.options = Sections(  # type: ignore[attr-defined]
            {title: [rows[name] for name in names] for title, names in by_title.items()}
        )
        everyday = rows if first is None else everyday_options(rows, first)
        shown = [name for names in by_title.values() for name in names if name in everyday]
        added = {
            name: inspect.Parameter(name, others.KEYWORD_ONLY, default=default, annotation=kind)
            for name, kind, default, _ in map(rows.__getitem__, dict.fromkeys([*shown, *rows]))
        }
        signature = AllOptions([*own, *added.values()], return_annotation=whole.return_annotation)
        lines = ["", "", "Options:"]
        for name in shown:
            text = fields[name][0].metadata["help"].partition("\n")[0]
            lines.append(f"    {name}={rows[name][2]!r}: {text}")
        if more := len(rows) - len(shown):
            signature.shown = whole.replace(
                parameters=[*own, *map(added.__getitem__, shown), others]
            )
            lines[2] = "Everyday options:"
            name = function.__name__
            lines += ["", f"{more} more: `print(dl.{name}.options)` lists all, by section, as"]
            lines += [f"`dschat-lora {name} --help all` does in a terminal."]
        function.__signature__ = signature  # type: ignore[attr-defined]
        function.__doc__ = inspect.cleandoc(function.__doc__ or "") + "\n".join(lines)
        return api_boundary(function)

    return decorate


def type_text(name: str, annotation: object) -> str:
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
    if also := number_words(annotation):
        text = f"{text} | Literal{[*also]}"
    if many:
        text = f"{text} | Sequence[{text}]"
    return f"{text} | None" if optional else text


def option_values(
    config_class: "type[DataclassInstance]", values: Mapping[str, object], stack: ExitStack
) -> dict[str, object]:
    """Values of options of a class with a name for each object, which ``stack`` holds.

    Raises:
        TypeError: for an object of another kind.
        ValueError: for rows that cannot be gone through twice.
    """
    named, functions = dict[str, object](), options_that_run(config_class, "object", "part")
    for name, value in values.items():
        if name in functions:
            value = _functions(value, name, stack)
        elif name in _DATA:
            column = getattr(config_class, "text_column", None)
            value = data_value(value, name.removesuffix("_path"), stack, column)
        elif name.endswith(_MODELS):
            value = model_value(value, name)
        named[name] = value
    return named


def model_value(model: object, option: str = "model") -> str | None:
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
    name = option.removeprefix("actor_").removesuffix("_name_or_path")
    hint = ""
    if hasattr(model, "save_pretrained"):
        hint = "; give it with its tokenizer, as in (model, tokenizer)"
    elif name == "model" and isinstance(model, Iterable):
        hint = "; rows are the argument data, as in data=rows"
    raise TypeError(
        f"{name} must be a name, a path, a Run, or (model, tokenizer), "
        f"got {type(model).__name__}{hint}"
    )


def data_value(data: object, name: str, stack: ExitStack, column: str | None = None) -> object:
    """Paths as they are, and rows by the name under which ``stack`` holds them.

    A list of texts becomes rows of this ``column``; None: of several columns, which it lacks.
    """
    if data is None or isinstance(data, str | os.PathLike):
        return data
    data = _rows_of(data)
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
    if (number := next((n for n, each in enumerate(data) if each is None), None)) is not None:
        raise TypeError(f"{name}[{number}] is None; rows are dicts")
    if all(isinstance(each, Mapping) for each in data):
        return stack.enter_context(held(data, name))
    texts = [each for each in data if isinstance(each, str) and len(each.split()) > 1]
    if texts and not any(Path(each).exists() for each in texts):
        if column is not None and all(isinstance(each, str) for each in data):
            return stack.enter_context(held([{column: each} for each in data], name))
        raise TypeError(
            f"{name} is a list of texts; rows are dicts, such as {{'prompt': {texts[0]!r:.60}}}"
        )
    return [data_value(each, name, stack) for each in data]


def _rows_of(data: object) -> object:
    """The rows of a DataFrame or of a Dataset of torch; what is neither as it is."""
    table: Any = data
    if hasattr(data, "to_dicts"):  # polars
        return table.to_dicts()
    if hasattr(data, "to_dict") and hasattr(data, "columns"):  # pandas, with NaN where none is
        rows, known = table.to_dict("records"), table.notna().to_dict("records")
        return [
            {
                k: (v.tolist() if hasattr(v, "tolist") else v) if has[k] else None
                for k, v in row.items()
            }
            for row, has in zip(rows, known, strict=True)
        ]
    if not isinstance(data, Iterable) and hasattr(data, "__getitem__") and hasattr(data, "__len__"):
        return [table[number] for number in range(len(table))]
    return data


def _way_to_rows(data: object) -> str:
    """How what is no rows, but has some, gives them."""
    if not isinstance(data, Mapping):
        return ""
    if any(isinstance(value, str) for value in data.values()):
        return "; a single row goes into a list"
    if "DatasetDict" in type(data).__name__:
        return "; give one of its splits, such as data['train']"
    return "; datasets.Dataset.from_dict(data) turns lists by column into rows"


def _functions(value: object, option: str, stack: ExitStack) -> object:
    if isinstance(value, list | tuple):
        return [_functions(each, option, stack) for each in value]
    if isinstance(value, Mapping):  # several by name
        return stack.enter_context(held(value, f"{option}s"))
    if value is None or isinstance(value, str):
        return value
    return stack.enter_context(held(value, function_name(value)))


def function_name(function: object) -> str:
    """A name for metrics: that of the function, or of its object's class."""
    own = getattr(function, "__name__", None) or type(function).__name__
    return re.sub(r"\W", "", own) or "function"


def reward_options(
    rewards: object, critic: object, weights: object, stack: ExitStack
) -> dict[str, object]:
    """The options of step 3 that say what scores responses; ``stack`` holds the functions.

    The first reward model is the run's own, from which a critic starts; further ones score as
    functions do.

    Raises:
        TypeError: for something that cannot score.
        ValueError: if there is not a weight for each.
    """
    given = [*rewards] if isinstance(rewards, list | tuple) else [rewards]
    if len(given) == 2 and all(hasattr(each, "save_pretrained") for each in given):
        given = [rewards]  # (model, tokenizer) is one reward model
    numbers = None if weights is None else _numbers(weights)
    # A scorer gives several rewards, by its names.
    counts = [len(getattr(each, "names", ())) or 1 for each in given]
    count = sum(counts)
    if numbers is not None and len(numbers) not in (count, count + (critic is not None)):
        raise ValueError(
            f"--reward_weights has {counted(len(numbers), 'weight')} "
            f"for {counted(count, 'reward')}; give one for each"
        )
    left, path = [*(numbers or ())], model_value(critic, "critic")
    functions, scales, own = list[str](), list[float](), list[float]()
    for each, own_count in zip(given, counts, strict=True):
        scale, left = left[:own_count], left[own_count:]
        name = _reward_function(each, stack)
        if name is None:
            other = model_value(each, "rewards")
            if path in (None, other):
                path, own = other, scale
                continue
            name = stack.enter_context(held(ModelReward(str(other)), Path(str(other)).name))
        functions.append(name)
        scales += scale
    scorers: dict[str, object] = {"reward_function": functions or None}
    if path is not None:
        scorers["critic_model_name_or_path"] = path
    if numbers is not None:
        scorers["reward_weights"] = [*scales, *((own or left or [1.0]) if path is not None else [])]
    return scorers


def _numbers(weights: object) -> list[float]:
    try:
        return [float(each) for each in cast(Iterable[float], weights)]
    except (TypeError, ValueError) as error:
        raise ValueError(f"--reward_weights must be a list of numbers, got {weights!r}") from error


def _reward_function(reward: object, stack: ExitStack) -> str | None:
    """The name of a function, which ``stack`` holds; None of a reward model."""
    if isinstance(reward, str):
        exists = Path(reward).expanduser().exists()
        if reward.isidentifier() and not exists:
            raise ValueError(
                f"rewards has the text {reward!r}, and there is no directory of that name; give a "
                "function itself, not its name"
            )
        return reward if ":" in reward and not exists else None
    if isinstance(reward, os.PathLike) or getattr(reward, "path", None) is not None:
        return None
    if isinstance(reward, tuple):
        return None  # (model, tokenizer)
    if callable(reward):
        return stack.enter_context(held(reward, function_name(reward)))
    raise TypeError(
        "rewards must be functions, runs of dschat_lora.reward, paths of reward models or names "
        f"such as 'builtin:length=12', got a {type(reward).__name__}"
    )


class ModelReward:
    """Scores prompts with their responses by a reward model, which is loaded when it is needed."""

    def __init__(self, path: str) -> None:
        """``path`` is the directory of the reward model, or its hub name."""
        self._path = path
        self._scorer: LoadedRewardModel | None = None

    def __call__(self, prompts: Sequence[str], responses: Sequence[str]) -> list[float | None]:
        """A score of each response; None for one that is too long for the model."""
        from dschat_lora.data.chat import Span
        from dschat_lora.data.records import TextRecord
        from dschat_lora.supervised.scorer import LoadedRewardModel

        if self._scorer is None:
            self._scorer = LoadedRewardModel(ModelConfig(model_name_or_path=self._path))
        records = [
            TextRecord(
                f"response {number}",
                "prompt-completion",
                (Span(prompt, target=False), Span(response, target=True)),
            )
            for number, (prompt, response) in enumerate(zip(prompts, responses, strict=True))
        ]
        scores: list[float | None] = self._scorer.scores(records)
        return scores
