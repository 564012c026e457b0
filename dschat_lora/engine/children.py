"""Processes that this one starts: what they inherit, and that they end with it."""

import ctypes
import os
import signal

from dschat_lora.engine.rendezvous import LAUNCHED

_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of Linux
_OF_LAUNCHERS = {*LAUNCHED, "CROSS_RANK", "CROSS_SIZE", "LOCAL_SIZE"}


def variables_of_no_launch() -> dict[str, str]:
    """Environment variables without what a launcher says of this process, for one of its own."""
    return {name: value for name, value in os.environ.items() if name not in _OF_LAUNCHERS}


def visible_gpu(number: int) -> str:
    """The value of CUDA_VISIBLE_DEVICES by which a child sees the GPU of this number alone."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return visible.split(",")[number] if visible else str(number)


def end_with_parent() -> None:
    """Have the system send SIGTERM to this process when the one that started it is killed.

    For ``preexec_fn`` of :class:`subprocess.Popen`. The thread that starts it must live on.
    """
    ctypes.CDLL(None).prctl(_PARENT_DEATH_SIGNAL, signal.SIGTERM)
