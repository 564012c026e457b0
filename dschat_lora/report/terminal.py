"""A line for a person before there is a run to log to."""

import os
import sys


def say_once(text: str) -> None:
    """Print a line from the first rank alone."""
    if os.environ.get("RANK", "0") == "0":
        sys.stdout.write(text + "\n")
        sys.stdout.flush()
