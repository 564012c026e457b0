"""The port of the process group: a free one that all processes of a launcher know."""

import json
import os
import socket
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import psutil

# Other ranks wait for rank 0 to tokenise the data or load the model.
TIMEOUT = timedelta(hours=2)


# Rank 0 may verify a large checkpoint before it chooses the port.
PORT_WAIT_SECONDS = TIMEOUT.total_seconds()


def _settle_port() -> None:
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return  # torchrun itself serves the store on this port
    wanted = os.environ.get("MASTER_PORT")
    if int(os.environ["WORLD_SIZE"]) == 1:
        os.environ["MASTER_PORT"] = str(_usable_port(wanted))
    elif os.environ["WORLD_SIZE"] == os.environ["LOCAL_WORLD_SIZE"]:
        os.environ["MASTER_PORT"] = str(_agreed_port(wanted))
    elif os.environ["RANK"] == "0" and not _is_free(int(wanted or 29500)):
        raise ValueError(
            f"port {wanted} of {os.environ['MASTER_ADDR']} is in use, probably by another run; "
            "choose one with: deepspeed --master_port PORT ..."
        )


def _port_note() -> Path:
    """A file that only processes of one parent know."""
    parent = psutil.Process(os.getppid())
    return Path(tempfile.gettempdir()) / f"dschat_lora-{parent.pid}-{parent.create_time():.2f}.json"


def _agreed_port(wanted: str | None) -> int:
    """The port rank 0 chose, passed on through a file that :func:`_forget_port` removes."""
    note = _port_note()
    if os.environ["RANK"] == "0":
        port = _usable_port(wanted)
        staged = note.with_suffix(f".{os.getpid()}")
        with os.fdopen(os.open(staged, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w") as file:
            json.dump({"port": port, "pid": os.getpid(), "started": _started(os.getpid())}, file)
        staged.replace(note)
        return port
    deadline = time.monotonic() + PORT_WAIT_SECONDS
    while (noted := _noted_port(note)) is None:
        if time.monotonic() > deadline:
            raise ValueError(f"the first process chose no port within {PORT_WAIT_SECONDS:g} s")
        time.sleep(0.02)
    return noted


def _noted_port(note: Path) -> int | None:
    """The port in ``note`` if a living rank 0 wrote it, and not that of a crashed launch."""
    try:
        if note.stat().st_uid != os.getuid():
            return None
        content = json.loads(note.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    return int(content["port"]) if _started(content["pid"]) == content["started"] else None


def _started(pid: int) -> float | None:
    """When the process began; None where there is none."""
    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else process.create_time()
    except psutil.NoSuchProcess:
        return None


def _forget_port() -> None:
    """Remove rank 0's note once every process has met: the next launch must not read it."""
    if os.environ["RANK"] == "0" and os.environ["WORLD_SIZE"] != "1":
        _port_note().unlink(missing_ok=True)


def _usable_port(wanted: str | None) -> int:
    if wanted is not None and _is_free(int(wanted)):
        return int(wanted)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True
