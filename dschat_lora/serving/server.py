"""``dschat-lora serve``: load the models and serve them until Ctrl-C."""

import asyncio
import socket
from contextlib import suppress
from pathlib import Path
from types import FrameType

import uvicorn
from h11 import IDLE
from uvicorn.protocols.http.h11_impl import H11Protocol

from dschat_lora.report.terminal import log_once
from dschat_lora.serving.address import address_of
from dschat_lora.serving.app import Service, make_app
from dschat_lora.serving.config import ServeConfig
from dschat_lora.serving.decoder import Decoder
from dschat_lora.serving.models import open_models
from dschat_lora.serving.reward import AnswerScorer
from dschat_lora.serving.votes import VoteFile

# Seconds that running answers have after Ctrl-C.
PATIENCE = 5.0
# Seconds in which the head of a request must come, and a client must take what it is sent.
CLIENT_SECONDS = 30.0


class Connection(H11Protocol):
    """Closes the connection of a client that neither says what it wants nor reads an answer."""

    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect(True)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        # Idle: a request's head has not come whole. Between two requests uvicorn has its own timer,
        # which what comes of a body that nobody reads would stop.
        answered = self.cycle is not None and self.cycle.response_complete
        if not self.flow.write_paused:
            self._expect(self.conn.their_state is IDLE or answered)

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


class Server(uvicorn.Server):
    """Ends running answers before it waits for their connections, and itself with the decoder."""

    def __init__(self, service: Service) -> None:
        app = make_app(service)
        super().__init__(
            uvicorn.Config(
                app,
                http=Connection,
                ws="none",
                lifespan="off",  # whose end by a second Ctrl-C uvicorn logs with a traceback
                log_level="warning",
                access_log=False,
                server_header=False,
            )
        )
        self._decoder = service.decoder

    def fail(self) -> None:
        """End, as the decoder has."""
        self.should_exit = True

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Refuse new requests; a second signal ends running answers at once."""
        self._decoder.close(0.0 if self.should_exit else PATIENCE)
        super().handle_exit(sig, frame)


def run_server(config: ServeConfig, votes: Path, listening: socket.socket) -> None:
    """Serve on a listening socket until a signal comes.

    Raises:
        ValueError: if a model cannot be loaded.
        OSError: if decoding ends by itself.
    """
    service = make_service(config, votes)
    address, names = address_of(listening), ", ".join(service.models)
    log_once(f"{names} at {address} (a page) and {address}/v1 (OpenAI's interface)")
    log_once(f"votes go to {votes}; Ctrl-C ends")
    server = Server(service)
    service.decoder.start(on_failure=server.fail)
    try:
        with suppress(KeyboardInterrupt):  # that uvicorn may raise once it has ended
            server.run(sockets=[listening])
    finally:
        service.decoder.close()
        service.decoder.join()
    if service.decoder.failure is not None:
        raise OSError(service.decoder.failure)
    log_once("stopped")


def make_service(config: ServeConfig, votes: Path) -> Service:
    """The service with its models, its decoder not started.

    Raises:
        ValueError: if a model cannot be loaded.
    """
    models = open_models(config, with_base=True)
    scorer = AnswerScorer(config, models.values()) if config.reward is not None else None
    decoder = Decoder(
        {model.batch for model in models.values()},
        max_batch_size=config.max_batch_size,
        max_queue=config.max_queue,
    )
    return Service(models, decoder, config, VoteFile(votes), scorer)
