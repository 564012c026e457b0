"""Which requests are let in, and how refusals are said: as OpenAI's interface says them."""

import asyncio
import hmac
import json
import math
import re
import traceback
from collections.abc import Callable, Container, Mapping
from contextlib import suppress
from typing import Any

from h11 import LocalProtocolError
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dschat_lora.addons.serving.config import LOCAL_HOSTS
from dschat_lora.addons.serving.endpoint.errors import ApiError, check_value, invalid
from dschat_lora.config.files import json_object
from dschat_lora.report.terminal import note

MAX_BODY_BYTES = 2**20
MAX_BODIES_BYTES = 2**30  # of all requests that are not answered
# A body must come in BODY_SECONDS, and one more for each BODY_RATE bytes of it that came.
BODY_SECONDS, BODY_RATE = 30, 2**18
_HOST = re.compile(r"(?:\[([0-9a-f]*:[0-9a-f:.]*)\]|([0-9a-z._-]+))(?::[0-9]{1,5})?")


class Guard:
    """Refuses requests before anything of them is read, and answers where the application fails.

    What it decides by, it takes from the request as it came, not from a URL that a library made of
    it: the path is the one that requests are routed by.

    A page of another site can make a browser send requests to this machine. Its ``Origin`` gives
    it away, and where it has had its own name resolved to this machine (DNS rebinding), ``Host``.

    Args:
        app: what is guarded.
        host: that the server listens on; on another one than this machine's own, any ``Host`` is
            let in, as the token protects.
        token: that requests must carry, None for no such rule.
        public: paths without secrets, for which no token is asked.
        most: bytes that the body of a request to a path may have.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        host: str,
        token: str | None,
        public: Container[str],
        most: Callable[[str], int],
    ) -> None:
        self._app, self._token, self._public, self._most = app, token, public, most
        self._is_local = host in LOCAL_HOSTS
        self._held = 0  # bytes of bodies

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or answer with an error."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            await self._answer(scope, receive, send)
        # Nothing else is there, such as web sockets.

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        started, size = False, 0

        def take(count: int) -> None:
            nonlocal size
            size += count
            self._held += count
            if size > most:
                raise ApiError(413, f"the body is larger than {most:,} bytes")
            if self._held > MAX_BODIES_BYTES:
                raise ApiError(503, "requests with large bodies wait; ask again later")

        async def watched(message: Message) -> None:
            nonlocal started
            started = True
            # Raised where uvicorn has told the client that the rest of its request is no HTTP.
            with suppress(LocalProtocolError):
                await send(message)

        most = self._most(scope["path"])
        try:
            self._check(Headers(scope=scope), scope["path"])
            await self._app(scope, _bounded(receive, take), watched)
        except ApiError as error:
            await JSONResponse(error.body, error.status)(scope, receive, watched)
        except Exception as error:  # noqa: BLE001 - whatever it is, the client gets an answer
            # Where it happened, and nothing of what the request held.
            frame = traceback.extract_tb(error.__traceback__)[-1]
            name, place = type(error).__name__, f"{frame.filename}:{frame.lineno}"
            note(f"error: {scope['method']} {scope['path']!r:.80} failed: {name} at {place}")
            if not started:  # else the server closes the connection of a response without end
                body = ApiError(500, f"the server failed: {name}; its log says where").body
                await JSONResponse(body, 500)(scope, receive, watched)
        finally:
            self._held -= size

    def _check(self, headers: Headers, path: str) -> None:
        host = headers.get("host", "").lower()  # the only one: h11 refuses two
        name = _HOST.fullmatch(host)  # without its port
        if self._is_local and (not name or (name[1] or name[2]) not in LOCAL_HOSTS):
            raise ApiError(403, f"this server is no host {host!r:.80}", code="wrong_host")
        origin = headers.get("origin")
        schemes = ("http",) if self._is_local else ("http", "https")  # of a proxy in front
        if origin is not None and origin.lower() not in [f"{each}://{host}" for each in schemes]:
            raise ApiError(403, f"pages of {origin!r:.80} are not let in", code="wrong_origin")
        if self._token is not None and path not in self._public:
            key = headers.get("x-api-key")  # as clients of other interfaces send it
            given = headers.get("authorization", "") if key is None else f"Bearer {key}"
            if not hmac.compare_digest(given.encode(), f"Bearer {self._token}".encode()):
                message = "the token is missing or wrong; send Authorization: Bearer TOKEN"
                raise ApiError(401, message, code="invalid_api_key")


def _bounded(receive: Receive, take: Callable[[int], None]) -> Receive:
    """``receive``, whose body must come in time; ``take`` is told the bytes that came."""
    size, whole, start = 0, False, math.nan

    async def bounded() -> Message:
        nonlocal size, whole, start
        if whole:
            return await receive()
        now = asyncio.get_running_loop().time()
        start = now if math.isnan(start) else start
        seconds = BODY_SECONDS + size / BODY_RATE
        try:
            message = await asyncio.wait_for(receive(), start + seconds - now)
        except TimeoutError as error:
            raise ApiError(408, f"the body did not come within {seconds:.0f} seconds") from error
        count = len(message.get("body", b""))
        size += count
        take(count)
        whole = not message.get("more_body", False)
        return message

    return bounded


async def _refuse(request: Request, error: ApiError) -> Response:
    headers = {"Retry-After": "1"} if error.status in (429, 503) else None
    return JSONResponse(error.body, error.status, headers=headers)


# What clients of other interfaces ask for, by the end of its path, and what they can do.
_OTHER_INTERFACES = {
    "/responses": "OpenAI's Responses API is not served: have the client use chat completions "
    '(openai-agents: set_default_openai_api("chat_completions") or OpenAIChatCompletionsModel; '
    "pydantic-ai: OpenAIChatModel; LangChain: use_responses_api=False)",
    "/messages": "Anthropic's interface is not served: use a client of OpenAI's chat completions",
    **dict.fromkeys(
        ("/api/chat", "/api/generate", "/api/tags"),
        "Ollama's interface is not served: use a client of OpenAI's, with a base URL that ends in "
        "/v1",
    ),
}


async def _refuse_route(request: Request, error: HTTPException) -> Response:
    path, words = request.scope["path"], error.detail
    if error.status_code == 404:
        there = {each.path_format: None for each in request.app.routes}
        of_version = [each for each in there if "/v1/" in each]
        words = f"there is no such path; there are {', '.join(of_version or there)}"
        hints = (hint for end, hint in _OTHER_INTERFACES.items() if path.endswith(end))
        words = "; ".join([words, *hints])
    elif error.status_code == 405 and error.headers:
        words = f"the method is {error.headers['Allow']}"
    body = ApiError(error.status_code, f"{request.method} {path[:80]}: {words}").body
    return JSONResponse(body, error.status_code, headers=error.headers)


async def _nobody_listens(request: Request, error: ClientDisconnect) -> Response:
    return Response(status_code=499)


# How an application answers what it raises.
HANDLERS: Mapping[Any, Any] = {
    ApiError: _refuse,
    HTTPException: _refuse_route,
    ClientDisconnect: _nobody_listens,
}


async def read_json(request: Request) -> object:
    """The JSON that a request holds: finite numbers, texts of whole characters, each name once.

    Raises:
        ApiError: if it is none.
    """
    kind = request.headers.get("content-type", "").split(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError(415, f"Content-Type must be application/json, found {kind!r:.80}")
    body = await request.body()
    try:
        value: object = json.loads(
            body.decode(),
            parse_constant=_finite,
            parse_float=_finite,
            object_pairs_hook=json_object,
        )
        check_value(value)
    except UnicodeDecodeError as error:
        raise invalid("the body is not JSON: it is not in UTF-8") from error
    except (ValueError, RecursionError) as error:
        raise invalid(f"the body is not JSON: {error}") from error
    return value


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text:.80} is not a finite number")
    return number
