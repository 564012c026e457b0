"""``dschat-lora serve``: load the models and serve them until Ctrl-C."""

import socket
from contextlib import suppress
from pathlib import Path
from types import FrameType

import uvicorn

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


class Server(uvicorn.Server):
    """Ends running answers before it waits for their connections."""

    def __init__(self, service: Service) -> None:
        app = make_app(service)
        super().__init__(
            uvicorn.Config(app, log_level="warning", access_log=False, server_header=False)
        )
        self._decoder = service.decoder

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Refuse new requests; a second signal ends running answers at once."""
        self._decoder.close(0.0 if self.should_exit else PATIENCE)
        super().handle_exit(sig, frame)


def run_server(config: ServeConfig, votes: Path, listening: socket.socket) -> None:
    """Serve on a listening socket until a signal comes.

    Raises:
        ValueError: if a model cannot be loaded.
    """
    service = make_service(config, votes)
    address, names = address_of(listening), ", ".join(service.models)
    log_once(f"{names} at {address} (a page) and {address}/v1 (OpenAI's interface)")
    log_once(f"votes go to {votes}; Ctrl-C ends")
    service.decoder.start()
    try:
        with suppress(KeyboardInterrupt):  # that uvicorn may raise once it has ended
            Server(service).run(sockets=[listening])
        log_once("stopped")
    finally:
        service.decoder.close()
        service.decoder.join()


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
