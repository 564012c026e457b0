"""Inputs beside text, such as pictures, as runs of token ids above every vocabulary.

An add-on reads them: rows come with them, text has a placeholder for each, and tokens a run of ids
of its own, by which the model that the add-on has prepared finds what the run stands for. All that
handles tokens in between needs to know nothing of them: equal ids are equal inputs.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from dschat_lora.config.addons import load, provided

FIRST_ID = 2**24  # of runs; no vocabulary is as large


class Run(NamedTuple):
    """Consecutive ids from ``first`` on, ``size`` of them."""

    first: int
    size: int


class MediaReader(Protocol):
    """Reads what rows hold beside text, for one model."""

    token_id: int  # of the vocabulary, which text has ``size`` times for a run
    digest: str  # of all that was scanned, and of what reads it
    placeholder: str  # what stands for one in a text that no chat template writes

    @property
    def facts(self) -> Mapping[str, str]:
        """What is recorded of how inputs beside text are read."""

    def row(self, values: dict[str, Any], fields: Sequence[str], folder: Path) -> dict[str, Any]:
        """A row whose message parts are text, or ``{"type": KIND}`` alone where one belongs.

        ``fields`` are the columns that are read; paths are relative to ``folder``.

        Raises:
            ValueError: if they hold something that cannot be read, or too many or too few.
        """

    def scan(self, rows: Iterable[Mapping[str, Any]]) -> str | None:
        """A digest of all that rows of :meth:`row` hold beside text; None where that is nothing."""

    def number(self, folder: Path, *, workers: int = 1) -> None:
        """Give each a run, and keep in ``folder`` what is needed to read it again."""

    def read(self, folder: Path) -> None:
        """Take the runs that :meth:`number` has kept in ``folder``."""

    def insert(
        self, texts: Sequence[str], values: Mapping[str, Any], *, whole: bool
    ) -> tuple[list[str], tuple[Run, ...]]:
        """Texts of a row of :meth:`row`, one after another, with ``token_id``'s text for each run.

        Raises:
            ValueError: if their placeholders are not as many as the row has inputs, or more where
                the texts are not the ``whole`` row.
        """

    def columns(self, values: Mapping[str, Any], row: Mapping[str, Any]) -> dict[str, Any]:
        """The columns of a row as JSON holds them, of which :meth:`row` made ``row``."""

    def restored(self, columns: Mapping[str, Any], ids: Sequence[int]) -> dict[str, Any]:
        """Such columns with what the ids of the row's prompt stand for in its places."""

    def described(self, ids: Sequence[int]) -> list[dict[str, str]]:
        """Of each input beside text its ``digest``, and its ``path`` if it has one."""

    def attach(self, model: Any) -> None:
        """Have a language model take the runs that were numbered or read, as others may too."""


def media_reader(config: Any, tokenizer: Any, base: str) -> MediaReader | None:
    """What reads inputs beside text for the model at ``base``; None where it takes text alone.

    ``config`` is of a command with the options of add-ons. Without a ``tokenizer`` rows alone are
    read, and nothing of the model but its ``config.json``.
    """
    makers = (load(path) for path in provided("media").values())
    found = (make(config, tokenizer, base) for make in makers)
    return next((reader for reader in found if reader is not None), None)


def has_media(ids: Sequence[int]) -> bool:
    """Whether any of the ids is of a run."""
    return max(ids, default=0) >= FIRST_ID


def with_runs(
    pieces: Sequence[list[int]], runs: Sequence[Sequence[int]], token_id: int
) -> list[list[int]]:
    """Tokens of consecutive pieces with the ids of ``runs`` in place of ``token_id``, in order."""
    ids = iter([n for first, size in runs for n in range(first, first + size)])
    return [[next(ids, i) if i == token_id else i for i in piece] for piece in pieces]
