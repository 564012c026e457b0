"""A line for a person before there is a run to log to."""

import os
import sys


def fall_silent() -> None:
    """Send what is still written to the standard streams nowhere: nobody reads them any more."""
    with open(os.devnull, "w", encoding="utf-8") as nowhere:
        for descriptor in (1, 2):
            os.dup2(nowhere.fileno(), descriptor)


def say_once(text: str) -> None:
    """Print a line from the first rank alone."""
    if os.environ.get("RANK", "0") == "0":
        sys.stdout.write(text + "\n")
        sys.stdout.flush()
