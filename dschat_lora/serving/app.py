"""The web application: OpenAI's interface, the page, scores and votes."""

import asyncio
import math
import threading
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Route

from dschat_lora.serving.answers import AnswerResponse, Kind, RunningAnswers
from dschat_lora.serving.config import ServeConfig
from dschat_lora.serving.decoder import Decoder
from dschat_lora.serving.errors import ApiError, invalid
from dschat_lora.serving.guard import Guard, read_json
from dschat_lora.serving.models import ServedModel
from dschat_lora.serving.requests import Fields, chat_request, checked_messages, text_request
from dschat_lora.serving.reward import AnswerScorer
from dschat_lora.serving.votes import VoteFile

T = TypeVar("T")
HEALTH = "/healthz"
PAGE = {
    "/": "index.html",
    "/page.css": "page.css",
    "/page.js": "page.js",
}
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

    models: Mapping[str, ServedModel]
    decoder: Decoder
    config: ServeConfig
    votes: VoteFile
    scorer: AnswerScorer | None = None
    # Tokenizers are for one thread at a time.
    lock: threading.Lock = field(default_factory=threading.Lock)
    started: int = field(default_factory=lambda: int(time.time()))

    async def list_models(self, request: Request) -> Response:
        """``/v1/models``."""
        return JSONResponse({"object": "list", "data": [*map(self._described, self.models)]})

    async def show_model(self, request: Request) -> Response:
        """``/v1/models/NAME``."""
        name = request.path_params["name"]
        if name not in self.models:
            names = ", ".join(self.models)
            message = f"there is no model {name!r:.80}; there are {names}"
            raise ApiError(404, message, param="model", code="model_not_found")
        return JSONResponse(self._described(name))

    def _described(self, name: str) -> dict[str, Any]:
        return {"id": name, "object": "model", "created": self.started, "owned_by": "dschat_lora"}

    async def complete_chat(self, request: Request) -> Response:
        """``/v1/chat/completions``."""
        return await self._answer(request, "chat")

    async def complete_text(self, request: Request) -> Response:
        """``/v1/completions``."""
        return await self._answer(request, "text")

    async def _answer(self, request: Request, kind: Kind) -> Response:
        body = await read_json(request)
        parse = chat_request if kind == "chat" else text_request
        parsed = await self._alone(lambda: parse(body, self.models, self.config))
        return AnswerResponse(RunningAnswers(parsed, self.decoder), kind)

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
            raise ApiError(404, "there is no reward model; start the server with --reward")
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
            raise ApiError(507, f"the vote is not saved: {error.strerror}") from error
        return JSONResponse({"rows": rows}, status_code=201)

    async def _alone(self, work: Callable[[], T]) -> T:
        """Do what uses tokenizers, beside the event loop."""

        def locked() -> T:
            with self.lock:
                return work()

        return await asyncio.to_thread(locked)


def make_app(service: Service) -> Starlette:
    """The application of a service whose decoder is started."""
    routes = [
        Route("/v1/models", service.list_models),
        Route("/v1/models/{name:path}", service.show_model),
        Route("/v1/chat/completions", service.complete_chat, methods=["POST"]),
        Route("/v1/completions", service.complete_text, methods=["POST"]),
        Route(HEALTH, service.health),
        Route("/settings", service.settings),
        Route("/score", service.score, methods=["POST"]),
        Route("/votes", service.vote, methods=["POST"]),
        *(Route(path, _page(name)) for path, name in PAGE.items()),
    ]
    guard = Middleware(
        Guard,
        host=service.config.host,
        token=service.config.token,
        public=frozenset((HEALTH, *PAGE)),
    )
    handlers: Mapping[Any, Any] = {
        ApiError: _refuse,
        HTTPException: _refuse_route,
        ClientDisconnect: _nobody_listens,
    }
    app = Starlette(routes=routes, middleware=[guard], exception_handlers=handlers)
    app.router.redirect_slashes = False  # no addresses made of a request's Host
    return app


def _page(name: str) -> Callable[[Request], Awaitable[Response]]:
    path = Path(__file__).with_name("page") / name

    async def respond(request: Request) -> Response:
        return FileResponse(path, headers=_PAGE_HEADERS)

    return respond


async def _refuse(request: Request, error: ApiError) -> Response:
    headers = {"Retry-After": "1"} if error.status in (429, 503) else None
    return JSONResponse(error.body, error.status, headers=headers)


async def _refuse_route(request: Request, error: HTTPException) -> Response:
    message = f"{request.method} {request.scope['path'][:80]}: {error.detail}"
    return JSONResponse(ApiError(error.status_code, message).body, error.status_code)


async def _nobody_listens(request: Request, error: ClientDisconnect) -> Response:
    return Response(status_code=499)
