"""Terminal output: lines, tables and error messages, where there is no run to log to."""

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path


def silence_stdout() -> None:
    """Discard all further output to the standard streams, as nobody reads them any more."""
    with open(os.devnull, "w", encoding="utf-8") as nowhere:
        for descriptor in (1, 2):
            os.dup2(nowhere.fileno(), descriptor)


def log_once(text: str) -> None:
    """Print a line from the first rank alone."""
    if os.environ.get("RANK", "0") == "0":
        sys.stdout.write(text + "\n")
        sys.stdout.flush()


def to_json(value: object) -> str:
    """A value as the JSON that ``--json`` prints; what JSON lacks, such as a path, as text."""
    return json.dumps(value, indent=1, ensure_ascii=False, default=str)


def is_terminal() -> bool:
    """Whether a person reads the standard output, in colour."""
    return sys.stdout.isatty() and "NO_COLOR" not in os.environ


def note(text: str) -> None:
    """Print a line to the standard error."""
    sys.stderr.write(text + "\n")


def named(error: OSError, path: Path) -> OSError:
    """``error`` with the name of its file, which a failed write lacks."""
    if error.filename is not None or error.errno is None:
        return error
    return OSError(error.errno, error.strerror, str(path))


def error_message(error: BaseException) -> str:
    """The message of an error; an error of the disk begins with its file."""
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
