"""The models that a command line names, found before anything heavy is imported."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dschat_lora.checkpoint.history import CHECKPOINTS
from dschat_lora.data.templates import read_chat_template
from dschat_lora.models.source import ModelSource, find_model
from dschat_lora.runtime.checks import check_can_be_made, find_of_kind, settled_base_bits
from dschat_lora.serving.config import AnswerConfig, ServeConfig

BASE = "base"
# Directories in a run's whose parent has the run's name.
_INNER = ("adapter", "model", "actor")


@dataclass(frozen=True)
class NamedSource:
    """A model and the name that requests know it by."""

    name: str
    source: ModelSource


def find_models(words: Sequence[str], *, with_base: bool) -> list[NamedSource]:
    """The models behind the words of a command line, the base first if it is asked for.

    A name is the run directory's, with ``-2``, ... where an earlier one has it.

    Raises:
        ValueError: if one is not there, or is no language model.
    """
    others = [(word, _find(word)) for word in words if word != BASE]
    first = others[0][1] if others else find_model(None)
    found: dict[str, ModelSource] = {}
    if BASE in words or (with_base and first.adapter is not None):
        found[BASE] = ModelSource(first.base)
    for word, source in others:
        name = model_name(word)
        numbered = (f"{name}-{number}" for number in range(2, len(others) + 3))
        found[name if name not in found else next(n for n in numbered if n not in found)] = source
    return [NamedSource(name, source) for name, source in found.items()]


def model_name(word: str) -> str:
    """The name of the run that a word of the command line leads to."""
    path = Path(word).expanduser()
    if not path.is_dir():
        return path.name  # of a hub name
    path = path.resolve()
    while path.name in _INNER and path.parent.name:
        path = path.parent
    if path.parent.name == CHECKPOINTS:
        return f"{path.parents[1].name}-{path.name}"
    return path.name


def check_answering(config: AnswerConfig) -> None:
    """Refuse models that are not there or of the wrong kind, before torch is imported.

    Raises:
        ValueError: naming the option.
    """
    for each in find_models(config.models, with_base=True):
        settled_base_bits(config.loading.base_bits, each.source)
    if config.reward is not None:
        find_of_kind(config.reward, ("SEQ_CLS",), option="--reward")
    if config.loading.chat_template is not None:
        read_chat_template(config.loading.chat_template)


def votes_path(config: ServeConfig) -> Path:
    """The file of ``--votes``.

    Raises:
        ValueError: if it cannot be made.
    """
    if config.votes is not None:
        path = Path(config.votes).expanduser()
    else:
        first = Path(config.models[0]).expanduser()
        path = (first if first.is_dir() else Path()) / "votes.jsonl"
    if path.is_dir():
        raise ValueError(f"--votes {path} is a directory; give a file")
    check_can_be_made(path.parent, option="votes")
    return path


def _find(word: str) -> ModelSource:
    path = Path(word).expanduser()
    inner = str(path / "actor") if (path / "actor").is_dir() else word
    return find_of_kind(inner, ("CAUSAL_LM",), option="OUT")
