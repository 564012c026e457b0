"""Inputs beside text, such as pictures, as runs of token ids above every vocabulary.

An add-on reads them: rows come with them, text has a placeholder for each, and tokens a run of ids
of its own, by which the model that the add-on has prepared finds what the run stands for. All that
handles tokens in between needs to know nothing of them: equal ids are equal inputs.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
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

    kind: str  # what they are called, in the plural
    token_id: int  # of the vocabulary, which text has ``size`` times for a run
    placeholder: str  # what stands for one in a text that no chat template writes

    @property
    def facts(self) -> Mapping[str, str]:
        """What is recorded of how inputs beside text are read."""

    @property
    def identity(self) -> Mapping[str, str]:
        """What the inputs are known by when a run goes on: a digest of each, by its name."""

    def row(
        self, values: dict[str, Any], fields: Sequence[str], folder: Path | None
    ) -> dict[str, Any]:
        """A row whose message parts are text, or ``{"type": KIND}`` alone where one belongs.

        ``fields`` are the columns that are read; paths are relative to ``folder``. None is for a
        request from elsewhere: files are refused, and all is read here, in any thread.

        Raises:
            ValueError: if they hold something that cannot be read, or too many or too few.
        """

    def summary(self) -> str:
        """What the model takes, and by what it is read, in a few words; "" if that is not known."""

    def scan(self, rows: Iterable[Mapping[str, Any]]) -> str | None:
        """A digest of what each row of :meth:`row` holds beside text; None if that is nothing."""

    def number(self, folder: Path, *, workers: int = 1) -> None:
        """Give each a run, and keep in ``folder`` what is needed to read it again."""

    def read(self, folder: Path) -> None:
        """Take the runs that :meth:`number` has kept in ``folder`` for rows of an equal scan."""

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

    def shown(self, text: str, runs: Sequence[Run]) -> str:
        """A text of :meth:`insert` with a few words in place of each of its runs."""

    def describe(self, token: int) -> tuple[str, Run]:
        """What a token of a run stands for, in words, and the run."""

    def attach(self, model: Any, base: str | None = None) -> None:
        """Have a language model take the runs that were numbered or read, as others may too.

        ``base`` is the one that it is on, if not the reader's.
        """


def media_reader(config: Any, tokenizer: Any, base: str) -> MediaReader | None:
    """What reads inputs beside text for the model at ``base``; None where it takes text alone.

    ``config`` is of a command with the options of add-ons; None has their defaults. Without a
    ``tokenizer`` rows alone are read, and nothing of the model but its ``config.json``.
    """
    makers = (load(path) for path in provided("media").values())
    found = (make(config, tokenizer, base) for make in makers)
    return next((reader for reader in found if reader is not None), None)


def has_media(ids: Sequence[int]) -> bool:
    """Whether any of the ids is of a run."""
    return max(ids, default=0) >= FIRST_ID


def shown_tokens(
    ids: Sequence[int], decode: Callable[[list[int]], str], media: MediaReader | None
) -> list[tuple[str, int]]:
    """The text of each token, and its place; of consecutive ones of a run together."""
    found: list[tuple[str, int]] = []
    for place, token in enumerate(ids):
        if token < FIRST_ID or media is None:
            found.append((decode([token]), place))
            continue
        name, run = media.describe(token)
        if token != run.first and place and ids[place - 1] == token - 1:
            continue
        rest = enumerate(ids[place:])
        count = next((n for n, i in rest if i != token + n or i >= sum(run)), len(ids) - place)
        part = "" if count == run.size else f" of {run.size}"
        found.append((f"[{name}, {count}{part} tokens]", place))
    return found


def with_runs(
    pieces: Sequence[list[int]], runs: Sequence[Sequence[int]], token_id: int
) -> list[list[int]]:
    """Tokens of consecutive pieces with the ids of ``runs`` in place of ``token_id``, in order."""
    ids = iter([n for first, size in runs for n in range(first, first + size)])
    return [[next(ids, i) if i == token_id else i for i in piece] for piece in pieces]
