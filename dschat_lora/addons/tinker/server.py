"""``dschat-lora tinker``: the Tinker API over HTTP, until Ctrl-C."""

import os
import signal
import socket
from collections.abc import Mapping
from pathlib import Path

from dschat_lora.addons.serving.endpoint.http_server import HttpServer
from dschat_lora.addons.serving.endpoint.sockets import address_of, run_until_signal
from dschat_lora.addons.tinker.bases import Base, open_base
from dschat_lora.addons.tinker.config import TinkerConfig
from dschat_lora.addons.tinker.processes import follow
from dschat_lora.addons.tinker.routes import make_app
from dschat_lora.addons.tinker.service import TinkerService
from dschat_lora.addons.tinker.store import (
    Store,
    now,
)
from dschat_lora.addons.tinker.worker import Worker
from dschat_lora.config.staging import alone
from dschat_lora.engine.failure_detection import on_loss
from dschat_lora.engine.process_group import init_distributed, shutdown
from dschat_lora.models.source import ModelSource
from dschat_lora.report.terminal import log_once


def run_server(
    config: TinkerConfig, sources: Mapping[str, ModelSource], listening: socket.socket | None
) -> None:
    """Serve on a listening socket until a signal comes; call on every rank of a launch.

    Rank 0 has the socket; the others compute what it asks for.

    Raises:
        ValueError: if a base cannot be loaded, or another server has the directory.
        OSError: if the thread that computes ends by itself.
    """
    if os.environ.get("WORLD_SIZE", "1") != "1":
        init_distributed()
        on_loss(lambda _: "start it again with the same --state_dir, and it goes on")
    bases = {
        source.base: open_base(
            source.base, source, config.model, recomputes=config.gradient_checkpointing
        )
        for source in sources.values()
    }
    directory = Path(config.state_dir).expanduser().resolve()
    if listening is None:
        # A launcher sends them to all. Rank 0's server ends by them, the others when it says so.
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        follow(_worker(config, bases, directory))
    else:
        with alone(directory, "server", option="state_dir"):
            aliases = {word: source.base for word, source in sources.items()}
            _serve(config, _worker(config, bases, directory), aliases, listening)
    shutdown()


def _worker(config: TinkerConfig, bases: Mapping[str, Base], directory: Path) -> Worker:
    most, zero_stage = config.tokens_per_device, config.zero_stage
    return Worker(bases, Store(directory), tokens_per_device=most, zero_stage=zero_stage)


def _serve(
    config: TinkerConfig, worker: Worker, aliases: Mapping[str, str], listening: socket.socket
) -> None:
    service = TinkerService(
        worker,
        max_adapters=config.max_adapters,
        max_queue=config.max_queue,
        max_batch_size=config.max_batch_size,
        state_every=config.state_every,
        aliases=aliases,
    )
    address, waiting = address_of(listening), sum(len(r.waiting) for r in service.runs.values())

    def say() -> None:
        log_once(f"{', '.join(worker.bases)} at {address} (the Tinker API); Ctrl-C ends")
        key = "tml-local" if config.token is None else "the --token"
        log_once(f"clients: TINKER_BASE_URL={address} and {key} as TINKER_API_KEY")
        if service.runs:
            log_once(
                f"{worker.store.directory}: {len(service.runs)} runs go on, {waiting} requests wait"
            )

    app = make_app(service, host=config.host, token=config.token)
    server = HttpServer(app, timeout_graceful_shutdown=2)
    service.start(on_failure=lambda: setattr(server, "should_exit", True))
    try:
        run_until_signal(server, listening, say)
    finally:
        service.close()
    if service.failure is not None:
        raise OSError(service.failure)
    worker.channel.send()
    log_once(f"stopped at {now()[:19]}")
