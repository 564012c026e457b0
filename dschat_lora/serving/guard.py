"""Which requests are let in: from this machine's own pages, with the token, of bounded size."""

import asyncio
import hmac
import json
from collections.abc import Collection
from typing import Any
from urllib.parse import urlsplit

from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from dschat_lora.serving.config import LOCAL_HOSTS
from dschat_lora.serving.errors import ApiError, invalid

MAX_BODY_BYTES = 2**20
BODY_SECONDS = 30


class Guard:
    """Refuses requests before anything of them is read.

    A page of another site can make a browser send requests to this machine. Its ``Origin`` gives
    it away, and where it has had its own name resolved to this machine (DNS rebinding), ``Host``.

    Args:
        app: what is guarded.
        host: that the server listens on; on another one than this machine's own, any ``Host`` is
            let in, as the token protects.
        token: that requests must carry, None for no such rule.
        public: paths without secrets, for which no token is asked.
    """

    def __init__(
        self, app: ASGIApp, *, host: str, token: str | None, public: Collection[str]
    ) -> None:
        self._app, self._token, self._public = app, token, public
        self._is_local = host in LOCAL_HOSTS

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or answer with an error."""
        if scope["type"] == "http":
            try:
                self._check(Request(scope))
            except ApiError as error:
                await JSONResponse(error.body, error.status)(scope, receive, send)
                return
        elif scope["type"] != "lifespan":
            return  # a web socket, of which there is none
        await self._app(scope, receive, send)

    def _check(self, request: Request) -> None:
        host = request.headers.get("host", "")
        if self._is_local and _name_of(host) not in LOCAL_HOSTS:
            raise ApiError(403, f"this server is no host {host!r:.80}", code="wrong_host")
        origin = request.headers.get("origin")
        if origin is not None and urlsplit(origin).netloc.lower() != host.lower():
            raise ApiError(403, f"pages of {origin!r:.80} are not let in", code="wrong_origin")
        if self._token is not None and request.url.path not in self._public:
            given = request.headers.get("authorization", "").encode()
            if not hmac.compare_digest(given, f"Bearer {self._token}".encode()):
                message = "the token is missing or wrong; send Authorization: Bearer TOKEN"
                raise ApiError(401, message, code="invalid_api_key")


async def read_json(request: Request) -> Any:
    """The JSON that a request holds.

    Raises:
        ApiError: if it is none, is too large, or does not come in time.
    """
    kind = request.headers.get("content-type", "").split(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError(415, f"Content-Type must be application/json, found {kind!r:.80}")
    try:
        body = await asyncio.wait_for(_body(request), BODY_SECONDS)
    except asyncio.TimeoutError as error:
        raise ApiError(408, f"the body did not come within {BODY_SECONDS} seconds") from error
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise invalid(f"the body is no JSON: {error}") from error


async def _body(request: Request) -> bytes:
    body = b""
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_BODY_BYTES:
            raise ApiError(413, f"the body is larger than {MAX_BODY_BYTES:,} bytes")
    return body


def _name_of(host: str) -> str:
    """The name in a ``Host`` header, without its port."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""
