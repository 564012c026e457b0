"""Runs in the process of a Python program: what it finds, it finds again afterwards."""

import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

from dschat_lora.api.notebook import quieten_libraries
from dschat_lora.engine import peers
from dschat_lora.engine.meeting import check_environment
from dschat_lora.report.terminal import quiet as nothing_said
from dschat_lora.runtime.stage_main import hush_libraries, tell_others

# Set for a single process, as by a launcher; commands that it starts later are no part of a run.
_LAUNCHED = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


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


@contextmanager
def run_in_process(*, quiet: bool = False) -> Iterator[None]:
    """A block for one run, alone or on every process of a launch.

    Errors come out as they are, and Ctrl-C as KeyboardInterrupt; of several processes all end.
    """
    is_launched = "WORLD_SIZE" in os.environ
    before = {name: os.environ.get(name) for name in _LAUNCHED}
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
        if not is_launched:
            for name, value in before.items():
                os.environ.pop(name, None)
                if value is not None:
                    os.environ[name] = value
