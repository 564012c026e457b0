"""Servers of completions, with adapters that come at run time.

They speak vLLM's OpenAI interface or SGLang's own, which ``/v1/models`` of both tells.
"""

import json
import math
import os
import re
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPSConnection, IncompleteRead
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast
from urllib.parse import urlsplit

from dschat_lora.config.plurals import counted
from dschat_lora.rl.options.engines import EngineError, are_logprobs

Body = Mapping[str, Any]
CONNECT_SECONDS = 5.0
_LARGEST_REPLY = 2**26


class ServerError(Exception):
    """A server gave no answer that can be used; another attempt may."""


class FullServerError(ServerError):
    """A server has no room."""


class LostAdapterError(ServerError):
    """A server does not know the adapter, as one that was started again."""


class DeniedError(ServerError):
    """A server does not take the key."""


class ServerAnswer(NamedTuple):
    """A response as a server drew it."""

    tokens: list[int]  # its end included
    logprobs: list[float]  # of the tokens, in nats
    stopped: bool  # by an end token; False: it was cut off


@dataclass
class CompletionServer:
    """One server.

    Attributes:
        address: without the path ``/v1``.
        timeout: seconds that an answer may take.
        lost: why it is not asked any more; None: it is.
        log: its log, where the run has started it.
    """

    address: str
    timeout: float
    lost: str | None = None
    log: Path | None = None
    is_checked: bool = False  # its log-probabilities, since it was last lost
    is_sglang: bool | None = None  # None: not known yet
    failures: int = 0  # since its last answer
    failing_since: float = math.inf

    def connect(self) -> HTTPConnection:
        """A connection that is opened with the first request."""
        parts = urlsplit(self.address)
        kind = HTTPSConnection if parts.scheme == "https" else HTTPConnection
        return kind(parts.netloc, timeout=CONNECT_SECONDS)

    def ask(
        self,
        connection: HTTPConnection,
        path: str,
        body: Body | None = None,
        seconds: float = math.inf,
    ) -> object:
        """What the server replies within ``seconds``: JSON, or a text that is none.

        Raises:
            ServerError: if it cannot be reached or fails.
            EngineError: if it refuses the request.
        """
        headers = {"Content-Type": "application/json"}
        if key := os.environ.get("ROLLOUT_API_KEY", "").strip():
            headers["Authorization"] = f"Bearer {key}"
        content = None if body is None else json.dumps(body).encode()
        where = urlsplit(self.address).path.rstrip("/") + path
        limit = CONNECT_SECONDS
        try:
            if connection.sock is None:
                connection.connect()
            limit = min(self.timeout, seconds)
            with _deadline(connection.sock, limit):
                connection.request("GET" if body is None else "POST", where, content, headers)
                response = connection.getresponse()
                reply = response.read(_LARGEST_REPLY)
            if response.length:  # of a read with a limit http.client does not say so
                raise IncompleteRead(reply, response.length)
            if response.status >= 300:
                raise _refusal(response.status, reply)
            try:
                return json.loads(reply)
            except ValueError:
                return reply.decode(errors="replace")
        except (ServerError, EngineError):
            raise
        except TimeoutError as error:
            connection.close()
            raise ServerError(f"no answer came within {limit:g} seconds") from error
        except Exception as error:  # of the network, or of a reply such as "[[[[..."
            connection.close()
            raise ServerError(str(error) or type(error).__name__) from error

    def ask_once(self, path: str, body: Body | None = None, seconds: float = math.inf) -> object:
        """:meth:`ask` by a connection of its own."""
        with closing(self.connect()) as connection:
            return self.ask(connection, path, body, seconds)

    def base_limit(self) -> int | None:
        """Most tokens of prompt and response, None where the server does not say; it is reached.

        Raises:
            ServerError: if it is not.
        """
        listed = cast("Body", self.ask_once("/v1/models", seconds=CONNECT_SECONDS))
        try:
            limits = [each.get("max_model_len") for each in listed["data"]]
            self.is_sglang = any(each.get("owned_by") == "sglang" for each in listed["data"])
        except (AttributeError, KeyError, TypeError) as error:
            raise ServerError("/v1/models is not a list of models") from error
        return min((n for n in limits if isinstance(n, int)), default=None)

    def draw(self, connection: HTTPConnection, body: Body) -> object:
        """The reply to a request of ``/v1/completions``, of SGLang in the words of vLLM.

        Raises:
            ServerError, EngineError: as :meth:`ask`.
        """
        if self.is_sglang is None:  # another rank hands adapters over
            self.base_limit()
        if not self.is_sglang:
            return self.ask(connection, "/v1/completions", body)
        try:
            return from_sglang(self.ask(connection, "/generate", to_sglang(body)), body)
        except EngineError as error:
            if "lora" in str(error).lower():
                raise LostAdapterError(str(error)) from error
            raise

    def set_adapter(self, verb: Literal["load", "unload"], body: Body, seconds: float) -> None:
        """Have the server load an adapter or forget it.

        Raises:
            ServerError, EngineError: as :meth:`ask`.
        """
        if self.is_sglang is None:
            self.base_limit()
        where = "" if self.is_sglang else "/v1"
        self.ask_once(f"{where}/{verb}_lora_adapter", body, seconds)

    def last_words(self) -> str:
        """What its log tells of why it ended: the first error, or else the last line."""
        if self.log is None or not self.log.is_file():
            return ""
        text = self.log.read_text(errors="replace").strip() or "nothing"
        # What only warns may name an error too.
        error = re.search(
            r"^(?!.*\b(?:WARNING|INFO)\b).*?\b(\w*(?:[Ee]rror|Exception): .*)", text, re.MULTILINE
        )
        said = text.rpartition("\n")[2] if error is None else error[1]
        return f"; its log {self.log} says: {said.strip():.300}"

    def has_answered(self) -> None:
        """Forget failures."""
        self.failures, self.failing_since = 0, math.inf


@contextmanager
def _deadline(connected: socket.socket, seconds: float) -> Iterator[None]:
    """End what is sent and read within after so long, also where it comes byte by byte.

    Raises:
        TimeoutError: if that was too short.
    """
    late = threading.Event()

    def end() -> None:
        late.set()
        with suppress(OSError):  # it is closed already
            socket.socket.shutdown(connected, socket.SHUT_RDWR)

    connected.settimeout(None)
    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    except Exception as error:
        if late.is_set():
            raise TimeoutError from error
        raise
    finally:
        timer.cancel()
    if late.is_set():
        raise TimeoutError


def _refusal(status: int, reply: bytes) -> ServerError | EngineError:
    """The error that a reply with a status from 300 on is."""
    said = f"{status}: {' '.join(reply.decode(errors='replace').split())[:300]}"
    if status in (401, 403):
        return DeniedError(f"it rejects the key of ROLLOUT_API_KEY, {said}")
    if status < 500 and status not in (404, 429):
        return EngineError(f"it rejects the request, {said}")
    kinds = {404: LostAdapterError, 429: FullServerError}
    return kinds.get(status, ServerError)(f"it answers {said}")


def to_sglang(body: Body) -> dict[str, Any]:
    """A request of vLLM's ``/v1/completions`` for one of SGLang's ``/generate``.

    Without ``ignore_eos``, with which SGLang stops at no token at all.
    """
    same = ("temperature", "top_p", "min_p", "repetition_penalty", "stop_token_ids")
    return {
        "input_ids": body["prompt"],
        "lora_path": body["model"],
        "return_logprob": True,
        "sampling_params": {
            **{name: body[name] for name in same if name in body},
            "top_k": body.get("top_k") or -1,
            "max_new_tokens": body["max_tokens"],
            "sampling_seed": body["seed"] % 2**31,
        },
    }


def from_sglang(reply: object, body: Body) -> dict[str, Any]:
    """A reply of SGLang's ``/generate`` as one of vLLM's ``/v1/completions``.

    Raises:
        ServerError: if it is none.
    """
    try:
        meta = cast("Body", reply)["meta_info"]
        drawn = [(float(logprob), token) for logprob, token, *_ in meta["output_token_logprobs"]]
        finish = meta["finish_reason"]["type"]
    except (KeyError, TypeError, ValueError) as error:
        said = repr(reply)[:200]
        raise ServerError(
            f"its reply lacks SGLang's output_token_logprobs and finish_reason: {said}"
        ) from error
    logprobs = {"token_logprobs": [logprob for logprob, _ in drawn]}
    tokens = [token for _, token in drawn]
    choice = {"token_ids": tokens, "finish_reason": finish, "logprobs": logprobs}
    return {"model": body["model"], "choices": [choice]}


def read_answer(
    reply: object, body: Body, ends: frozenset[int], vocabulary_size: int
) -> ServerAnswer:
    """The response in a server's reply to ``body``.

    Raises:
        ServerError: if it is none, or that of another adapter.
    """
    try:
        content = cast("Body", reply)
        (choice,) = content["choices"]
        name, tokens = content["model"], choice["token_ids"]
        finish, logprobs = choice["finish_reason"], choice["logprobs"]["token_logprobs"]
    except (KeyError, TypeError, ValueError) as error:
        raise ServerError(
            "its reply has no choices with token_ids and logprobs, which vLLM >= 0.10.2 and "
            f"`dschat-lora serve` return: {reply!r:.200}"
        ) from error
    if name != body["model"]:
        raise ServerError(
            f"it answers with the adapter {name!r}, but {body['model']!r} was requested"
        )
    most = body["max_tokens"]
    whole = isinstance(tokens, list) and all(
        type(token) is int and 0 <= token < vocabulary_size for token in tokens
    )
    if not (whole and are_logprobs(logprobs) and 0 < len(tokens) == len(logprobs) <= most):
        raise ServerError(
            f"it must return at most {most} tokens of the actor's vocabulary of "
            f"{vocabulary_size}, each with a log-probability"
        )
    stopped = finish == "stop" and tokens[-1] in ends
    if not stopped and not (finish == "length" and len(tokens) == most):
        raise ServerError(
            f"it ended a response with {finish!r} after {counted(len(tokens), 'token')}, "
            f"at {tokens[-1]}"
        )
    return ServerAnswer(tokens, [float(value) for value in logprobs], stopped)
