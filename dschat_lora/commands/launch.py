"""Launch of a stage by DeepSpeed's launcher, with signals forwarded to its processes."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from itertools import islice, pairwise
from pathlib import Path
from types import FrameType
from typing import NoReturn

import psutil

from dschat_lora.config.groups import require
from dschat_lora.config.options import command_line, option, option_names, parse_config

PACKAGE = "dschat_lora"
DEFAULT_HOSTFILE = "/job/hostfile"  # of DeepSpeed's launcher
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@dataclass(frozen=True)
class LauncherConfig:
    """Arguments of the deepspeed launcher."""

    num_gpus: int | None = option(None, help="number of processes per machine, one per GPU")
    master_port: int | None = option(None, help="port for communication between processes")
    include: str | None = option(None, help="machines and GPUs to use, such as host:0,1")
    hostfile: str | None = option(None, help="file with the machines and their numbers of GPUs")

    def __post_init__(self) -> None:
        require(self.num_gpus is None or self.num_gpus >= 1, "num_gpus", self.num_gpus, ">= 1")
        port = self.master_port
        require(port is None or 0 < port < 2**16, "master_port", port, "in 1 to 65535")

    @property
    def processes(self) -> int | None:
        """Of a stage; None where the launcher decides."""
        return None if self.include or self.hostfile else self.num_gpus

    @property
    def meets_here(self) -> bool:
        """Whether all processes are certain to be on this machine."""
        return not (self.include or self.hostfile or Path(DEFAULT_HOSTFILE).exists())


def launcher_command() -> str:
    """The launcher that belongs to this interpreter."""
    return str(Path(sys.executable).with_name("deepspeed"))


def launch_command(
    stage: str, launcher: LauncherConfig, argv: Sequence[str], *, program: str
) -> list[str]:
    """The command that starts a stage in the launcher's processes: ``dschat-lora STAGE`` in each.

    Processes of this machine alone meet at a free port: two runs that start at once would find the
    default one free both. ``program`` is the path of the launcher.
    """
    if launcher.meets_here and launcher.master_port is None:
        with socket.socket() as server:
            server.bind(("", 0))
            launcher = replace(launcher, master_port=server.getsockname()[1])
    return [program, *command_line(asdict(launcher)), "--module", PACKAGE, stage, *argv]


def typed_command(
    stage: str, launcher: LauncherConfig | None, options: Mapping[str, object]
) -> list[str]:
    """The command that a user types for the same."""
    of_launcher = {} if launcher is None else asdict(launcher)
    return ["dschat-lora", *stage.split(), *command_line({**of_launcher, **options})]


def launch_stage(stage: str, launcher: LauncherConfig, argv: Sequence[str]) -> NoReturn:
    """Run a stage in the launcher's processes, and end this one with their exit code."""
    raise SystemExit(run_or_end(launch_command(stage, launcher, argv, program=launcher_command())))


def run_or_end(command: Sequence[str], *, stdout: int | None = None) -> int:
    """Exit code of a command that gets the signals of this process, which then ends by them."""
    relay = Relay()
    with relay.listening():
        code = relay.run(command, stdout=stdout)
    if relay.received:
        raise SystemExit(128 + relay.received)
    return code


def split_launcher_options(argv: Sequence[str]) -> tuple[LauncherConfig | None, list[str]]:
    """The launcher's options on a command line, None where there are none, and all others.

    Raises:
        ValueError: naming the option, its value and what is allowed.
    """
    names = option_names(LauncherConfig)
    own: list[str] = []
    others: list[str] = []
    words = iter(argv)
    for word in words:
        flag, equals, _ = word.removeprefix("--").partition("=")
        if not word.startswith("--") or flag not in names:
            others.append(word)
            continue
        own += [word] if equals else [word, *islice(words, 1)]
    return (parse_config(LauncherConfig, own) if own else None), others


@contextmanager
def receiving(receive: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Inside the block signals call ``receive`` in place of ending the process."""
    # Signals that are ignored, as SIGHUP is under nohup, stay so.
    numbers = [n for n in SIGNALS if signal.getsignal(n) is not signal.SIG_IGN]
    before = {number: signal.signal(number, receive) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Relay:
    """Runs one command of the launcher at a time and passes signals on to its processes.

    The launcher itself must not get them: it would kill the training processes before they have
    saved, or leave them behind. A stage therefore has a session of its own, out of Ctrl-C's reach.
    """

    def __init__(self) -> None:
        #: the first signal received; 0 for none
        self.received = 0
        self._running: subprocess.Popen[bytes] | None = None

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Inside the block signals are recorded and forwarded; they do not end this process."""
        with receiving(self._receive):
            yield

    def run(self, command: Sequence[str], *, stdout: int | None = None) -> int:
        """Exit code of the command by a shell's convention."""
        with subprocess.Popen(command, stdout=stdout, start_new_session=True) as process:
            self._running = process
            if self.received:
                self._pass_on(self.received)
            code = process.wait()
        self._running = None
        return code if code >= 0 else 128 - code

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.received = self.received or number
        self._pass_on(number)

    def _pass_on(self, number: int) -> None:
        if self._running is not None and self._running.poll() is None:
            signal_ranks(self._running, number)


def signal_ranks(launcher: "subprocess.Popen[bytes]", number: int) -> None:
    """Send a signal to the ranks below a launcher or, before there are any, end it."""
    ranks = training_processes(launcher.pid)
    for rank in ranks:
        with suppress(psutil.NoSuchProcess):
            rank.send_signal(number)
    if not ranks:  # nothing to be saved yet
        os.killpg(launcher.pid, signal.SIGTERM)


def training_processes(launcher: int) -> list[psutil.Process]:
    """The ranks below a launcher: not it, not its helper, not the workers of a rank.

    A rank was started as ``python -u -m dschat_lora --local_rank=N ...``.
    """
    ranks, parents = dict[int, psutil.Process](), dict[int, int]()  # by number
    with suppress(psutil.NoSuchProcess):
        for process in psutil.Process(launcher).children(recursive=True):
            with suppress(psutil.Error):
                if any(
                    word == PACKAGE and following.startswith("--local_rank=")
                    for word, following in pairwise(process.cmdline())
                ):
                    ranks[process.pid] = process
                    parents[process.pid] = process.ppid()
    return [process for pid, process in ranks.items() if parents.get(pid) not in ranks]
