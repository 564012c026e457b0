"""The one HTTP server of this package: what clients may send, keep open, and for how long."""

import asyncio
import resource
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

import uvicorn
from h11 import IDLE, SEND_BODY
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.routing import Route
from uvicorn.protocols.http.h11_impl import H11Protocol

from dschat_lora.addons.serving.endpoint.guard import HANDLERS, MAX_BODY_BYTES, Guard

# Seconds in which the head of a request must come, and a client must take what it is sent.
CLIENT_SECONDS = 30.0
MAX_CONNECTIONS = 4096
_SPARE_FILES = 128  # for what a server opens besides connections
# Of uvicorn's configuration: HTTP alone, and nothing written but what goes wrong.
_QUIET: Mapping[str, Any] = {
    "ws": "none",
    "lifespan": "off",  # whose end by a second Ctrl-C uvicorn logs with a traceback
    "log_level": "warning",
    "access_log": False,
    "server_header": False,
}


def make_app(
    routes: Sequence[Route],
    *,
    host: str,
    token: str | None,
    public: Container[str] = (),
    handlers: Mapping[Any, Any] = HANDLERS,
    most: Callable[[str], int] = lambda path: MAX_BODY_BYTES,
) -> Starlette:
    """The application of routes behind a :class:`Guard`, whose arguments the others are."""
    guard = Middleware(Guard, host=host, token=token, public=public, most=most)
    app = Starlette(routes=routes, middleware=[guard], exception_handlers=handlers)
    app.router.redirect_slashes = False  # no addresses made of a request's Host
    return app


class HttpServer(uvicorn.Server):
    """Serves an application of :func:`make_app`; ``options`` are of uvicorn's configuration."""

    def __init__(self, app: Starlette, **options: int) -> None:
        super().__init__(uvicorn.Config(app, http=HttpConnection, **{**_QUIET, **options}))


class HttpConnection(H11Protocol):
    """Closes the connection of a client that neither says what it wants nor reads an answer.

    Where there are too many, the oldest one that waits for its client makes room.
    """

    _timer: asyncio.TimerHandle | None = None
    _since = 0.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._since = self.loop.time()
        self._expect(True)
        most = min(MAX_CONNECTIONS, resource.getrlimit(resource.RLIMIT_NOFILE)[0] - _SPARE_FILES)
        if len(self.connections) > max(8, most):
            others = (each for each in self.connections if isinstance(each, HttpConnection))
            waiting = [each for each in others if each is not self and each._waits()]
            oldest = min(waiting, key=lambda each: each._since, default=self)
            self.connections.discard(oldest)
            oldest.transport.abort()

    def _waits(self) -> bool:
        """Whether nothing is done here until the client sends more."""
        answered = self.cycle is None or self.cycle.response_complete
        return answered or self.conn.their_state is SEND_BODY

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        # Idle: a request's head has not come whole. Between two requests uvicorn has its own timer,
        # which what comes of a body that nobody reads would stop.
        answered = self.cycle is not None and self.cycle.response_complete
        if not self.flow.write_paused:
            self._expect(self.conn.their_state is IDLE or answered)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.conn.their_state is SEND_BODY:  # of a body that is refused, or that nobody reads
            self._expect(True)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._expect(True)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._expect(False)

    def connection_lost(self, exc: Exception | None) -> None:
        self._expect(False)
        super().connection_lost(exc)

    def _expect(self, something: bool) -> None:
        """Give the client its time, from the first call on, or stop counting."""
        if something and self._timer is None:
            self._timer = self.loop.call_later(CLIENT_SECONDS, self.transport.abort)
        elif not something and self._timer is not None:
            self._timer.cancel()
            self._timer = None
