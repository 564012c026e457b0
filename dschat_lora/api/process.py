"""Runs in the process of a Python program: what it finds, it finds again afterwards."""

import json
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from dschat_lora.api.notebook import quieten_libraries
from dschat_lora.engine import peers
from dschat_lora.engine.meeting import LAUNCHED, check_environment
from dschat_lora.report.terminal import quiet as nothing_said
from dschat_lora.runtime.stage_main import hush_libraries, tell_others


class Interrupted(KeyboardInterrupt):
    """Ctrl-C, or the stop button of a notebook, which shows the message and no stack."""

    def _render_traceback_(self) -> list[str]:
        return [f"Interrupted: {self}"]


def _is_interrupt(error: BaseException) -> bool:
    return isinstance(error, KeyboardInterrupt) or (
        isinstance(error, SystemExit) and error.code == 128 + signal.SIGINT
    )


def _words(error: BaseException) -> str:
    """What is saved, and how to go on in Python."""
    directory = getattr(error, "directory", None)
    if directory is None:
        return "stopped, and nothing was saved"
    return (
        "a checkpoint is saved; go on by the same call with "
        f'resume="latest", output_dir={json.dumps(str(directory), ensure_ascii=False)}'
    )


def on_first_process(program: Callable[[], object]) -> None:
    """Call ``program`` on the first process of a launch; the others wait until it has ended."""
    peers.wait_until_all_are_ready()  # each has checked what it was given
    if os.environ.get("RANK", "0") == "0":
        program()
    peers.wait_until_all_are_ready()


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
        check_environment()
        quieten_libraries()
        peers.join()
        with nothing_said(quiet):
            yield
    except BaseException as error:
        tell_others(error)
        if _is_interrupt(error) and not os.environ.get("DSCHAT_LORA_TRACEBACK"):
            raise Interrupted(_words(error)) from None
        raise
    finally:
        restore()
