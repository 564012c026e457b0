"""``dschat-lora serve``: OpenAI's interface, the page, scores and votes, until Ctrl-C."""

import asyncio
import math
import socket
import threading
import time
from collections.abc import MutableMapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Route

from dschat_lora.addons.serving.config import ServeConfig
from dschat_lora.addons.serving.decoder import AnswerDecoder
from dschat_lora.addons.serving.endpoint.answers import AnswerResponse, RequestAnswers
from dschat_lora.addons.serving.endpoint.errors import ApiError, UnsupportedError, invalid
from dschat_lora.addons.serving.endpoint.guard import MAX_BODY_BYTES, read_json
from dschat_lora.addons.serving.endpoint.http_server import HttpServer
from dschat_lora.addons.serving.endpoint.http_server import make_app as guarded_app
from dschat_lora.addons.serving.endpoint.requests import Fields, checked_messages, parsed_request
from dschat_lora.addons.serving.endpoint.sockets import address_of, run_until_signal
from dschat_lora.addons.serving.endpoint.turns import Kind
from dschat_lora.addons.serving.models import AnswerScorer, ServedModel, open_adapter, open_models
from dschat_lora.addons.serving.votes import VoteFile
from dschat_lora.checkpoint.adapter_config import is_adapter_directory
from dschat_lora.checkpoint.history import checkpoints_of, is_checkpoint
from dschat_lora.report.terminal import log_once

# Seconds that running answers have after Ctrl-C.
PATIENCE = 5.0
HEALTH = "/healthz"
CHAT = "/v1/chat/completions"
MAX_MEDIA_BYTES = 2**25  # of the body of a chat with inputs beside text
PAGE = {"/": "index.html", "/page.css": "page.css", "/page.js": "page.js"}
_PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


@dataclass(frozen=True)
class Service:
    """What answers requests."""

    models: MutableMapping[str, ServedModel]
    decoder: AnswerDecoder
    config: ServeConfig
    votes: VoteFile
    scorer: AnswerScorer | None = None
    # That came later, the one that was asked longest ago first.
    adapters: MutableMapping[str, ServedModel] = field(default_factory=dict)
    # Tokenizers are for one thread at a time.
    lock: threading.Lock = field(default_factory=threading.Lock)
    loading: threading.Lock = field(default_factory=threading.Lock)  # of adapters
    started: int = field(default_factory=lambda: int(time.time()))

    async def list_models(self, request: Request) -> Response:
        """``/v1/models``."""
        return JSONResponse({"object": "list", "data": [*map(self._described, list(self.models))]})

    async def show_model(self, request: Request) -> Response:
        """``/v1/models/NAME``."""
        name = request.path_params["name"]
        if name not in self.models:
            names = ", ".join(list(self.models))
            message = f"there is no model {name!r:.80}; there are {names}"
            raise ApiError(404, message, param="model", code="model_not_found")
        return JSONResponse(self._described(name))

    def _described(self, name: str) -> dict[str, Any]:
        known = {"id": name, "object": "model", "created": self.started, "owned_by": "dschat_lora"}
        return {**known, "max_model_len": self.models[name].limit}

    async def load_adapter(self, request: Request) -> Response:
        """``/v1/load_lora_adapter``, as vLLM has it."""
        fields = Fields(await read_json(request))
        name, path = (fields.take(each, str, "text") for each in ("lora_name", "lora_path"))
        fields.finish()
        if not name or not path:
            raise invalid(
                "lora_name and lora_path are wanted", "lora_path" if name else "lora_name"
            )

        def open_alone() -> None:
            with self.loading:
                if name in self.models:
                    raise invalid(f"the model {name!r:.80} has already been loaded", "lora_name")
                _check_adapter(path)
                model = open_adapter(name, path, list(self.models.values()), self.config)
                self.decoder.add(model.batch)
                self.models[name] = self.adapters[name] = model
                while len(self.adapters) > self.config.max_loras:
                    self._forget(next(iter(self.adapters)))

        try:
            await asyncio.to_thread(open_alone)
        except (OSError, ValueError) as error:
            raise invalid(str(error), "lora_path") from error
        return JSONResponse({"loaded": name})

    async def unload_adapter(self, request: Request) -> Response:
        """``/v1/unload_lora_adapter``: forget an adapter that came at run time."""
        fields = Fields(await read_json(request))
        name = fields.take("lora_name", str, "text")
        fields.finish()
        if name is None or name not in self.adapters:
            message = f"no adapter {name!r:.80} came at run time"
            raise ApiError(404, message, param="lora_name", code="model_not_found")
        self._forget(name)
        return JSONResponse({"unloaded": name})

    def _forget(self, name: str) -> None:
        """Take no more requests for an adapter that came at run time; running answers end."""
        model = self.adapters.pop(name, None)
        if model is not None:  # else another thread was faster
            del self.models[name]
            self.decoder.remove(model.batch)

    async def answer(self, request: Request, kind: Kind) -> Response:
        """``/v1/chat/completions`` and ``/v1/completions``."""
        body = await read_json(request)
        parsed = await parsed_request(body, kind, self.models, self.config, self.lock)
        if (adapter := self.adapters.pop(parsed.model.name, None)) is not None:
            self.adapters[adapter.name] = adapter
        processed = self.config.logprobs_mode == "processed_logprobs"
        parsed = replace(parsed, options=replace(parsed.options, processed_logprobs=processed))
        if (grammar := parsed.options.grammar) is not None:
            model = self.models[parsed.model.name]
            try:  # compiled here, found by the decoder
                await asyncio.to_thread(model.grammars.start, grammar)
            except UnsupportedError as error:
                raise invalid(str(error), error.param) from error
        return AnswerResponse(RequestAnswers(parsed, self.decoder), kind)

    async def health(self, request: Request) -> Response:
        """Whether requests are answered, and how many wait; 503 where they are not."""
        alive, (running, waiting) = self.decoder.is_alive, self.decoder.load
        state = "ok" if alive else "stopping" if self.decoder.failure is None else "failed"
        content = {"status": state, "running": running, "waiting": waiting}
        return JSONResponse(content, 200 if alive else 503)

    async def settings(self, request: Request) -> Response:
        """What the page shows."""
        return JSONResponse(
            {
                "models": list(self.models),
                "reward": self.scorer is not None,
                "temperature": self.config.temperature,
                "max_tokens": self.config.max_new_tokens,
            }
        )

    async def score(self, request: Request) -> Response:
        """The reward model's score of the last one of messages; null where they are too long."""
        body = await read_json(request)
        if self.scorer is None:
            raise ApiError(404, "there is not a reward model; start the server with --reward")
        fields, scorer = Fields(body), self.scorer
        messages = checked_messages(fields.take("messages", list, "a list of messages"))
        fields.finish()
        try:
            score = await asyncio.to_thread(scorer.score, messages)
        except ValueError as error:
            raise invalid(str(error), "messages") from error
        if score is not None and not math.isfinite(score):
            raise ApiError(500, f"the reward model's score is not finite: {score}")
        return JSONResponse({"score": score})

    async def vote(self, request: Request) -> Response:
        """Append a vote to the file of votes."""
        body = await read_json(request)
        try:
            rows = await asyncio.to_thread(self.votes.append, body)
        except OSError as error:
            reason = error.strerror or error
            raise ApiError(507, f"the vote is not saved: {reason}") from error
        return JSONResponse({"rows": rows}, status_code=201)


def make_app(service: Service) -> Starlette:
    """The application of a service whose decoder is started."""
    routes = [
        Route("/v1/models", service.list_models),
        Route("/v1/models/{name:path}", service.show_model),
        Route(CHAT, partial(service.answer, kind="chat"), methods=["POST"]),
        Route("/v1/completions", partial(service.answer, kind="text"), methods=["POST"]),
        Route(HEALTH, service.health),
        Route("/settings", service.settings),
        Route("/score", service.score, methods=["POST"]),
        Route("/votes", service.vote, methods=["POST"]),
        *(Route(path, partial(_page_file, name=name)) for path, name in PAGE.items()),
    ]
    if service.config.takes_adapters:
        for path, handler in (
            ("/v1/load_lora_adapter", service.load_adapter),
            ("/v1/unload_lora_adapter", service.unload_adapter),
        ):
            routes.append(Route(path, handler, methods=["POST"]))
    config, public = service.config, frozenset((HEALTH, *PAGE))
    takes_media = any(model.media is not None for model in service.models.values())

    def most(path: str) -> int:
        return MAX_MEDIA_BYTES if takes_media and path == CHAT else MAX_BODY_BYTES

    return guarded_app(routes, host=config.host, token=config.token, public=public, most=most)


def _check_adapter(path: str) -> None:
    """Refuse what is not an adapter, and do not tell the client what lies there instead.

    Raises:
        ApiError: if it is none, or cannot be read.
    """
    what, home = "not an adapter that can be read here", Path(path)
    homes = (home, home / "adapter", home / "actor" / "adapter")
    try:
        if any(map(is_adapter_directory, homes)) or is_checkpoint(home) or checkpoints_of(home):
            return
        if (home / "config.json").is_file():
            what = "a full model, not an adapter"
    except (OSError, ValueError):  # a name that is too long, one that may not be read
        pass
    raise invalid(f"lora_path {path!r:.200} is {what}", "lora_path")


async def _page_file(request: Request, name: str) -> Response:
    return FileResponse(Path(__file__).with_name("page") / name, headers=_PAGE_HEADERS)


class Server(HttpServer):
    """Ends running answers before it waits for their connections, and itself with the decoder."""

    def __init__(self, service: Service) -> None:
        super().__init__(make_app(service))
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
    server = Server(service)
    service.decoder.start(on_failure=server.fail)
    try:
        run_until_signal(server, listening, lambda: log_once(f"votes go to {votes}; Ctrl-C ends"))
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
    decoder = AnswerDecoder(
        {model.batch for model in models.values()},
        max_batch_size=config.max_batch_size,
        max_queue=config.max_queue,
    )
    return Service(models, decoder, config, VoteFile(votes), scorer)
