"""The address that a server listens on, and what is the same of all servers."""

import os
import signal
import socket
from collections.abc import Callable
from types import FrameType
from typing import Protocol


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens; port 0 takes a free one.

    Raises:
        ValueError: naming the options, if the address is not to be had.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listening = socket.create_server((host, port), family=family, backlog=4096)
    except (OSError, UnicodeError) as error:  # the second of what is no name of a host
        # The socket's own text names the address once more.
        number = getattr(error, "errno", None) or 0
        reason = os.strerror(number) if number > 0 else str(error)
        raise ValueError(
            f"--host {host} --port {port} cannot be used: {reason}; --port 0 takes a free port"
        ) from error
    # Connections inherit it. Without it the body of an answer waits 40 ms for the client's word
    # that it has the head; asyncio sets it on sockets of its own alone.
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listening


def address_of(listening: socket.socket) -> str:
    """The URL of a listening socket."""
    host, port = listening.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


class SignalledServer(Protocol):
    """What is used of a uvicorn server."""

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """End soon."""

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve."""


def run_until_signal(
    server: SignalledServer, listening: socket.socket, say: Callable[[], object] = lambda: None
) -> None:
    """Serve until SIGINT or SIGTERM comes, also one that comes before the server runs; then return.

    ``say`` is called when these signals end the server, to say so.
    uvicorn raises the signal once more when it has ended, for the handler that it found: with the
    system's own the process would be gone before what follows, such as waiting for what runs.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, server.handle_exit)
    say()
    server.run(sockets=[listening])
