"""Who starts a run and who follows it, and what it does for them besides its options."""

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any, Protocol

# Told of a line of metrics.jsonl: its kind, its step and all its fields. "stop" ends the run.
Callback = Callable[[str, int, dict[str, Any]], object]


@dataclass(frozen=True)
class Caller:
    """What is done for a Python program that starts a run."""

    callbacks: Sequence[Callback] = ()  # called on rank 0
    # Whether it is a Python program: without --output_dir a run writes to a temporary directory,
    # and not to output/, and says what is next in Python.
    in_python: bool = False
    # Whether a command does: how to resume is said as one.
    of_command: bool = False


NOBODY = Caller()


def is_callers(frame: FrameType) -> bool:
    """Whether the code is neither this package's nor a library's."""
    module = str(frame.f_globals.get("__name__")).partition(".")[0]
    path = frame.f_code.co_filename
    of_library = module in sys.stdlib_module_names or re.search("/(site|dist)-packages/", path)
    return not (module == __name__.partition(".")[0] or of_library)


class Observer(Protocol):
    """Follows a run on rank 0; add-ons provide what makes one of its directory and its log."""

    #: said when the run ends: what it leaves
    words: str

    def __call__(self, event: str, step: int, metrics: Mapping[str, Any]) -> object:
        """Take a line of metrics.jsonl, as a :data:`Callback` does."""

    def end(self, *, quiet: bool = False) -> None:
        """Take that the record says how the run ended; ``quiet`` after a failure that is told."""
