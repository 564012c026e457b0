"""Runs in the process of a Python program: what it finds, it finds again afterwards."""

import json
import os
import signal
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from dschat_lora.engine import failure_detection
from dschat_lora.engine.rendezvous import LAUNCHED, check_launch_variables
from dschat_lora.report.terminal import quiet as nothing_said
from dschat_lora.runtime.stage_main import hush_libraries, tell_others


class Interrupted(KeyboardInterrupt):
    """Ctrl-C, or the stop button of a notebook, which shows the message and no stack."""

    def __init__(self, directory: Path | None) -> None:
        """``directory`` is where a checkpoint is saved."""
        when = "before the first step; " if _training.locked() else ""
        words = f"{when}nothing was saved"
        if directory is not None:
            place = json.dumps(str(directory), ensure_ascii=False)
            words = (
                "a checkpoint is saved; go on by the same call with "
                f'resume="latest", output_dir={place}'
            )
        super().__init__(words)

    def _render_traceback_(self) -> list[str]:
        return [f"Interrupted: {self}"]


def on_first_process(program: Callable[[], object]) -> None:
    """Call ``program`` on the first process of a launch; the others wait until it has ended."""
    failure_detection.wait_until_all_are_ready()  # each has checked what it was given
    if os.environ.get("RANK", "0") == "0":
        program()
    failure_detection.wait_until_all_are_ready()


def variables_kept() -> Callable[[], None]:
    """Gives back a launcher's variables as they are now, unless there is a launch.

    A run of a single process sets them, and commands that are started later are no part of it.
    """
    before = {name: os.environ.get(name) for name in LAUNCHED}

    def restore() -> None:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value

    return restore if before["WORLD_SIZE"] is None else lambda: None


_training = threading.Lock()


@contextmanager
def only_run() -> Iterator[None]:
    """A block for the one run of a stage that a process can have at a time.

    Raises:
        RuntimeError: if there is one, which a function or a thread of the caller's is part of.
    """
    if not _training.acquire(blocking=False):
        raise RuntimeError(
            "a run goes on in this process, which can have one at a time: begin another one when "
            "it has ended, or in a process of its own"
        )
    try:
        yield
    finally:
        _training.release()


@contextmanager
def run_in_process(*, quiet: bool = False) -> Iterator[None]:
    """A block for one run, alone or on every process of a launch.

    Errors come out as they are, and Ctrl-C as KeyboardInterrupt; of several processes all end.
    """
    restore = variables_kept()
    hush_libraries()
    try:
        check_launch_variables()
        # Libraries that are imported in Jupyter, where its bars are missing, say so.
        warnings.filterwarnings("ignore", "IProgress not found")
        failure_detection.join()
        with nothing_said(quiet):
            yield
    except BaseException as error:
        tell_others(error)
        code = error.code if isinstance(error, SystemExit) else None
        interrupted = isinstance(error, KeyboardInterrupt) or code == 128 + signal.SIGINT
        if interrupted and not os.environ.get("DSCHAT_LORA_TRACEBACK"):
            raise Interrupted(getattr(error, "directory", None)) from None
        raise
    finally:
        restore()
