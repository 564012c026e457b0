"""The one who starts a run, and what the run is to do for them besides its options."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

# Told of a line of metrics.jsonl: its kind, its step and all its fields. "stop" ends the run.
Callback = Callable[[str, int, dict[str, Any]], object]


@dataclass(frozen=True)
class Caller:
    """What is done for a Python program that starts a run."""

    callbacks: Sequence[Callback] = ()  # called on rank 0
    # Whether it is a Python program: without --output_dir a run writes to a temporary directory,
    # and not to output/, and says what is next in Python.
    in_python: bool = False


NOBODY = Caller()
