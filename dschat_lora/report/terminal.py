"""Terminal output: lines, tables and error messages, where there is no run to log to."""

import codecs
import io
import json
import os
import re
import shlex
import shutil
import sys
import textwrap
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, redirect_stdout, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from dschat_lora.config.files import naming
from dschat_lora.report.texts import as_written

if TYPE_CHECKING:
    from tqdm import tqdm

# Where the text of a log's line begins, after the name of what it tells.
_TEXT_COLUMN = 15
_CONTINUED = " \\\n"  # of a line of a command
_MOST_INDENT = 32  # of the further lines of a text
_MOST_SHOWN = 1000  # characters of a prompt or an answer
# How messages name it, beside files.
STDOUT = Path("standard output")


def prepare_standard_streams() -> None:
    """Let the standard streams take any text, whoever started this process.

    One that is closed becomes an empty file: else the next file to be opened would be it, and would
    receive what libraries and other processes print. Characters that the encoding of the standard
    output lacks, with which a run would end, are written as JSON has them.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, mode, encoding="utf-8", closefd=False))  # noqa: SIM115
    codecs.register_error("json", _escaped)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="json")


def _escaped(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeEncodeError)
    return json.dumps(error.object[error.start : error.end])[1:-1], error.end


def silence(descriptor: int) -> None:
    """Discard all further output to a standard stream, 1 or 2, as nobody reads it any more."""
    with open(os.devnull, "w", encoding="utf-8") as nowhere:
        os.dup2(nowhere.fileno(), descriptor)


def say_once(text: str) -> None:
    """Print a line of a run, which goes on silently if nobody can read it; see :func:`log_once`."""
    if _viewer is not None:
        _viewer.say(text)
        return
    try:
        if not _is_quiet:
            log_once(text)
    except OSError:
        silence(1)


def note_once(text: str) -> None:
    """Print a note of a run or, where that is to print nothing, warn of it by a Python warning."""
    if not _is_quiet:
        say_once(f"  note         {text}")
    elif os.environ.get("RANK", "0") == "0":
        warnings.warn(text, stacklevel=2)


class Viewer(Protocol):
    """Shows a run of this process, in the place of lines on the standard output."""

    def say(self, text: str) -> None:
        """Show a line that the run would print."""

    def expect(self, total_steps: int, done: int) -> None:
        """Show how far the run is, of whose steps some are ``done``."""

    def add(self, kind: str, metrics: Mapping[str, Any]) -> None:
        """Show a line of metrics.jsonl: train, eval or event."""


_viewer: Viewer | None = None


@contextmanager
def shown_by(viewer: Viewer) -> Iterator[None]:
    """Inside the block runs are shown by ``viewer``, and print nothing."""
    global _viewer
    before, _viewer = _viewer, viewer
    try:
        yield
    finally:
        _viewer = before


def current_viewer() -> Viewer | None:
    """Who shows runs in the place of the standard output; None where lines are printed."""
    return _viewer


_is_quiet = False


@contextmanager
def quiet(on: bool = True) -> Iterator[None]:
    """Inside the block runs print nothing."""
    global _is_quiet
    before, _is_quiet = _is_quiet, on or _is_quiet
    try:
        yield
    finally:
        _is_quiet = before


def is_quiet() -> bool:
    """Whether runs are to print nothing."""
    return _is_quiet


def log_once(text: str) -> None:
    """Print lines from the first rank alone, in the width of the terminal."""
    if os.environ.get("RANK", "0") == "0":
        write_text(fitted(text) + "\n")


def prints_on_stderr() -> AbstractContextManager[object]:
    """A block within which what is printed goes to the standard error."""
    return redirect_stdout(sys.stderr)


# What a terminal may take for a command, but for tabs, ends of lines and the colours that are
# used here; and half a character, which no terminal shows.
_CONTROL = re.compile(r"\x1b(?!\[(?:1;32|0)m)|[\x00-\x08\x0b-\x1a\x1c-\x1f\x7f-\x9f\ud800-\udfff]")


def harmless(text: str) -> str:
    """``text`` with control characters written out, in a way that JSON reads too."""
    return _CONTROL.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def write_text(text: str) -> None:
    """Write text to the standard output at once, its control characters made harmless."""
    with naming(STDOUT):
        sys.stdout.write(harmless(text))
        sys.stdout.flush()


class Screen(io.TextIOBase):
    """The standard output as a file for a person, who reads it in a terminal."""

    def write(self, text: str) -> int:
        """Write text, its control characters made harmless."""
        write_text(text)
        return len(text)


def print_json(value: object, *, indent: int | None = 1) -> None:
    """Print from rank 0 what ``--json`` asks for; what JSON lacks, such as a path, as text."""
    if os.environ.get("RANK", "0") == "0":
        write_text(json.dumps(value, indent=indent, ensure_ascii=False, default=str) + "\n")


def is_terminal() -> bool:
    """Whether a person reads the standard output, in colour."""
    return sys.stdout.isatty() and "NO_COLOR" not in os.environ


def progress(what: str, count: Callable[[], int | None]) -> "tqdm[Any]":
    """A bar with rate and remaining time, for what takes seconds while someone watches.

    ``count`` tells how many there are, or None if that is not known.
    """
    from tqdm import tqdm

    shown = sys.stderr.isatty() and not _is_quiet
    total = count() if shown else None
    return tqdm(desc=what, total=total, delay=2, dynamic_ncols=True, disable=not shown)


def columns() -> int | None:
    """Width of the terminal that shows the standard output, at least 80; None if none does."""
    return max(80, shutil.get_terminal_size().columns) if sys.stdout.isatty() else None


def fitted(text: str, otherwise: int | None = None) -> str:
    """``text`` in lines as wide as the terminal, elsewhere as ``otherwise``; None: unchanged.

    What has a command in several lines is not changed: see :func:`fitted_command`.
    """
    width = columns() or otherwise
    if width is None or _CONTINUED in text:
        return text
    lines = text.split("\n")
    return "\n".join(line if len(line) <= width else wrapped(line, width) for line in lines)


def fitted_command(command: str, prompt: str, otherwise: int | None = None) -> str:
    """A command after ``prompt``, in lines as :func:`fitted` makes, that a shell reads as one."""
    width = columns() or otherwise
    if width is None or len(prompt + command) <= width:
        return prompt + command
    words = (shlex.quote(word).replace(" ", "\0") for word in shlex.split(command))
    lines = wrapped(prompt + " ".join(words), width - 4).split("\n  ")
    return f"{_CONTINUED}    ".join(lines).replace("\0", " ")


def wrapped(text: str, width: int = 80) -> str:
    """A line of a log in lines of ``width`` columns, the further ones below its text.

    A word, such as a path, is not divided.
    """
    label = re.match(r" *\S+(?: \S+)* {2,}| *", text)
    assert label is not None
    indent = max(2, len(label[0])) if len(label[0]) <= _MOST_INDENT else 2
    return textwrap.fill(
        text,
        width,
        subsequent_indent=" " * indent,
        break_on_hyphens=False,
        break_long_words=False,
    )


def sample_lines(label: str, prompt: str, answer: str, suffix: str = "") -> str:
    """A prompt and an answer to it in lines of a log, as people wrote them but for empty lines.

    Long ones are cut, and words that are wider than a terminal are divided. ``suffix`` follows the
    answer, cut or not.
    """
    shown = []
    for name, text, end in (
        (f"  {label}", as_written(prompt), ""),
        ("            ->", answer.strip(), suffix),
    ):
        text = harmless((text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]} ...") + end)
        lines = filter(str.strip, re.sub(r"(\S{60})(?=\S)", r"\1\n", text).splitlines())
        shown.append(f"{name:<{_TEXT_COLUMN}}" + f"\n{'':<{_TEXT_COLUMN}}".join(lines))
    return "\n".join(shown)


def note(text: str) -> None:
    """Print a line to the standard error; one that cannot be written is no reason to fail."""
    with suppress(OSError):
        sys.stderr.write(harmless(text) + "\n")


NO_HOME = "a path begins with ~ and a name that is no user's of this system"
# By parts of messages, for each library raises them as a type of its own.
_LIMITS = {
    "allocate memory": "out of memory: the system gives this process no more (ulimit -v, -d)",
    "bad_alloc": "out of memory: the system gives this process no more (ulimit -v, -d)",
    "start new thread": "the system gives this process no more memory or threads (ulimit -v, -u)",
    "Resource temporarily unavailable": "the system gives this process no more memory or threads "
    "(ulimit -v, -u)",
    "Too many open files": "the system lets this process open no more files (ulimit -n)",
    "determine home directory": NO_HOME,
}


def words_of_limit(error: BaseException) -> str | None:
    """What to say of an error that the system caused; None of any other."""
    if isinstance(error, MemoryError):
        return _LIMITS["allocate memory"]
    return next((words for part, words in _LIMITS.items() if part in str(error)), None)


def error_message(error: BaseException) -> str:
    """The message of an error; an error of the disk begins with its file."""
    if isinstance(error, FileNotFoundError) and error.filename is None and error.errno:
        return "the current directory was removed; change to another one"
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return f"{os.fsdecode(error.filename)}: {error.strerror}"
    return str(error)


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a table: the first column left, the others right, a rule under the header."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]

    def line(row: Sequence[str]) -> str:
        others = (text.rjust(n) for text, n in zip(row[1:], widths[1:], strict=True))
        return "  ".join([row[0].ljust(widths[0]), *others]).rstrip()

    rule = "  ".join("-" * width for width in widths)
    return [line(header), rule, *map(line, rows)]
