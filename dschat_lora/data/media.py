"""Inputs beside text, such as pictures, as runs of token ids above every vocabulary.

An add-on reads them: rows come with them, text has a placeholder for each, and tokens a run of ids
of its own, by which the model that the add-on has prepared finds what the run stands for. All that
handles tokens in between needs to know nothing of them: equal ids are equal inputs.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from dschat_lora.config.addons import load, provided
from dschat_lora.config.data import DataConfig
from dschat_lora.data.sources import DataSource

if TYPE_CHECKING:
    from torch import nn

FIRST_ID = 2**24  # of runs; no vocabulary is as large
Row = Mapping[str, Any]


class MediaRun(NamedTuple):
    """Consecutive ids from ``first`` on, ``size`` of them, in the place of as many of ``token``."""

    first: int
    size: int
    token: int

    def __repr__(self) -> str:  # part of what digests of rows are made of
        return f"Run(first={self.first}, size={self.size}, token={self.token})"


class MediaReader(Protocol):
    """Reads what rows hold beside text, for one model. All raise ValueErrors of a line."""

    kind: str  # what they are called, in the plural

    @property
    def placeholder(self) -> str:
        """What stands for one in a text that no chat template writes."""

    @property
    def facts(self) -> Mapping[str, str]:
        """What is recorded of how they are read."""

    @property
    def identity(self) -> Mapping[str, str]:
        """What they are known by when a run goes on: a digest of each, by its name."""

    def row(self, values: Row, fields: Sequence[str], folder: Path | None) -> dict[str, Any]:
        """A row whose message parts are text, or ``{"type": KIND}`` alone where one belongs.

        ``fields`` are the columns that are read; paths are relative to ``folder``. None is for a
        request from elsewhere: files are refused, and all is read here, in any thread.
        """

    def summary(self) -> str:
        """What the model takes, and by what it is read, in a few words; "" if that is not known."""

    def scan(self, config: DataConfig, sources: Sequence[DataSource]) -> str | None:
        """A digest of what each row holds beside text; None where that is nothing."""

    def number(self, folder: Path, *, workers: int = 1) -> None:
        """Give each a run, and keep in ``folder`` what is needed to read it again."""

    def read(self, folder: Path) -> None:
        """Take the runs that :meth:`number` has kept in ``folder`` for rows of an equal scan."""

    def insert(
        self, texts: Sequence[str], values: Row, *, whole: bool
    ) -> tuple[list[str], tuple[MediaRun, ...]]:
        """Texts of a row of :meth:`row`, one after another, with ``token``'s text for each run.

        Unless they are the ``whole`` row they may have fewer placeholders than it has inputs.
        """

    def fill(self, records: tuple[Any, ...], row: Any) -> tuple[Any, ...]:
        """``TextRecord``s of a ``ParsedRow`` of :meth:`row` with what it holds in their places."""

    def columns(self, values: Row, row: Row) -> dict[str, Any]:
        """The columns of a row as JSON holds them, of which :meth:`row` made ``row``."""

    def restored(
        self, rows: Sequence[Row], prompts: Sequence[Sequence[int]]
    ) -> list[dict[str, Any]]:
        """Such columns with what the ids of each row's prompt stand for in its places."""

    def described(self, ids: Sequence[int]) -> list[dict[str, str]]:
        """Of each input beside text its ``digest``, and its ``path`` if it has one."""

    def shown(self, text: str, runs: Sequence[MediaRun]) -> str:
        """A text of :meth:`insert` with a few words in place of each of its runs."""

    def tokens(self, ids: Sequence[int]) -> list[tuple[str, int]]:
        """Text and place of each token; of consecutive ones of a run together, in a few words."""

    def plain(self, ids: Sequence[int]) -> list[int]:
        """The ids with its ``token`` in the place of each of a run."""

    def attach(self, model: "nn.Module", base: str | None = None) -> None:
        """Have a model on ``base``, by default the reader's own, take the runs."""


def media_reader(config: object, tokenizer: object, base: str) -> MediaReader | None:
    """What reads inputs beside text for the model at ``base``; None where it takes text alone.

    ``config`` is of a command with the options of add-ons; None has their defaults. Without a
    ``tokenizer`` rows alone are read, and nothing of the model but its ``config.json``; else it is
    that of the tokenizer from here on.
    """
    made = (load(path)(config, tokenizer, base) for path in provided("media").values())
    reader: MediaReader | None = next((each for each in made if each is not None), None)
    if tokenizer is not None:
        tokenizer.media = reader  # type: ignore[attr-defined]
    return reader


def media_of(tokenizer: object) -> MediaReader | None:
    """What reads inputs beside text for a tokenizer's model; None where it takes text alone."""
    return getattr(tokenizer, "media", None)


def has_media(ids: Sequence[int]) -> bool:
    """Whether any of the ids is of a run."""
    return max(ids, default=0) >= FIRST_ID


def with_runs(pieces: list[list[int]], runs: Sequence[MediaRun]) -> list[list[int]]:
    """Tokens of consecutive pieces with the ids of ``runs`` in place of their tokens, in order."""
    ids = iter([n for first, size, _ in runs for n in range(first, first + size)])
    tokens = {token for *_, token in runs}
    return [[next(ids, i) if i in tokens else i for i in piece] for piece in pieces]
