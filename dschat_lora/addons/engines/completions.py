"""Servers of completions, with adapters that come at run time.

They speak vLLM's OpenAI interface or SGLang's own, which ``/v1/models`` of both tells.
"""

import json
import math
import os
import re
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPSConnection, IncompleteRead
from pathlib import Path
from typing import Any, Literal, NamedTuple
from urllib.parse import urlsplit

from dschat_lora.rl.options.engines import EngineError, are_logprobs

Body = Mapping[str, Any]
CONNECT_SECONDS = 5.0
# Most that an adapter may take, or --rollout_timeout where that is less.
LOAD_SECONDS, UNLOAD_SECONDS = 120.0, 30.0
# A server that has given no answer for so long since its first failure, and failed so often, is
# lost: others get its prompts.
PATIENCE, MOST_FAILURES = 10.0, 3
_PAUSE = 0.25  # seconds before a request that failed is made again
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
    ) -> Any:
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

    def ask_once(self, path: str, body: Body | None = None, seconds: float = math.inf) -> Any:
        """:meth:`ask` by a connection of its own."""
        with closing(self.connect()) as connection:
            return self.ask(connection, path, body, seconds)

    def base_limit(self) -> int | None:
        """Most tokens of prompt and response, None where the server does not say; it is reached.

        Raises:
            ServerError: if it is not.
        """
        found = self.ask_once("/v1/models", seconds=CONNECT_SECONDS)
        try:
            limits = [each.get("max_model_len") for each in found["data"]]
            self.is_sglang = any(each.get("owned_by") == "sglang" for each in found["data"])
        except (AttributeError, KeyError, TypeError) as error:
            raise ServerError("/v1/models is no list of models") from error
        return min((n for n in limits if isinstance(n, int)), default=None)

    def draw(self, connection: HTTPConnection, body: Body) -> Any:
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
        return DeniedError(f"it refuses the key of ROLLOUT_API_KEY, {said}")
    if status < 500 and status not in (404, 429):
        return EngineError(f"it refuses what is asked, {said}")
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


def from_sglang(reply: Any, body: Body) -> dict[str, Any]:
    """A reply of SGLang's ``/generate`` as one of vLLM's ``/v1/completions``.

    Raises:
        ServerError: if it is none.
    """
    try:
        found = reply["meta_info"]
        drawn = [(float(logprob), token) for logprob, token, *_ in found["output_token_logprobs"]]
        finish = found["finish_reason"]["type"]
    except (KeyError, TypeError, ValueError) as error:
        said = repr(reply)[:200]
        raise ServerError(
            f"its reply has no output_token_logprobs and finish_reason, as SGLang's have: {said}"
        ) from error
    logprobs = {"token_logprobs": [logprob for logprob, _ in drawn]}
    tokens = [token for _, token in drawn]
    choice = {"token_ids": tokens, "finish_reason": finish, "logprobs": logprobs}
    return {"model": body["model"], "choices": [choice]}


def read_answer(reply: Any, body: Body, ends: frozenset[int], vocabulary_size: int) -> ServerAnswer:
    """The response in a server's reply to ``body``.

    Raises:
        ServerError: if it is none, or that of another adapter.
    """
    try:
        (choice,) = reply["choices"]
        name, tokens = reply["model"], choice["token_ids"]
        finish, logprobs = choice["finish_reason"], choice["logprobs"]["token_logprobs"]
    except (KeyError, TypeError, ValueError) as error:
        raise ServerError(
            "its reply has no choices with token_ids and logprobs, as those of vLLM 0.10.2 and "
            f"later and of `dschat-lora serve` have: {reply!r:.200}"
        ) from error
    if name != body["model"]:
        raise ServerError(f"it answers with the adapter {name!r} where {body['model']!r} was asked")
    most = body["max_tokens"]
    whole = isinstance(tokens, list) and all(
        type(token) is int and 0 <= token < vocabulary_size for token in tokens
    )
    if not (whole and are_logprobs(logprobs) and 0 < len(tokens) == len(logprobs) <= most):
        raise ServerError(
            f"its tokens are not up to {most} of the actor's {vocabulary_size}, each with a "
            "log-probability"
        )
    stopped = finish == "stop" and tokens[-1] in ends
    if not stopped and not (finish == "length" and len(tokens) == most):
        raise ServerError(
            f"it ended a response for {finish!r} after {len(tokens)} tokens, at {tokens[-1]}"
        )
    return ServerAnswer(tokens, [float(value) for value in logprobs], stopped)


@dataclass
class CompletionPool:
    """Servers among which prompts are shared out, each taking the next one when it has room.

    Attributes:
        servers: all that were named, lost ones too.
        in_flight: requests that a server has at a time.
        say: told of servers that are lost, and that are back.
        ends: tokens that end a response.
        vocabulary_size: tokens are below it.
        adapters: that the servers have, directories by name.
    """

    servers: Sequence[CompletionServer]
    in_flight: int
    say: Callable[[str], None]
    ends: frozenset[int]
    vocabulary_size: int
    adapters: Mapping[str, str] = field(default_factory=dict)
    _works: list["_Work"] = field(default_factory=list)  # that are waited for

    def load(self, adapters: Mapping[str, str]) -> None:
        """Have all servers, lost ones too, load these adapters, and forget others.

        Args:
            adapters: directories that the servers see, by name.

        Raises:
            EngineError: if none does.
        """
        earlier, self.adapters = self.adapters, dict(adapters)

        def load(server: CompletionServer) -> None:
            known = earlier if server.lost is None else ()
            try:
                if server.lost is not None:
                    server.base_limit()  # fails sooner than loading where nothing answers
                for name in adapters.keys() - known:
                    _load(server, name, adapters[name])
            except (ServerError, EngineError) as error:
                self._lose(server, error)
                return
            if server.lost is not None:
                self.say(f"{server.address} is back")
            server.lost = None
            server.has_answered()
            for name in earlier.keys() - adapters.keys():
                _unload(server, name, UNLOAD_SECONDS)

        self._with_each(load)
        if len(self.lost) == len(self.servers):
            raise self._none_left()

    def adopt(self, adapters: Mapping[str, str], lost: Mapping[str, str]) -> None:
        """Take what another process has loaded; ``lost`` servers by address, and why."""
        self.adapters = adapters
        for server in self.servers:
            server.has_answered()
            server.lost = lost.get(server.address)
            server.is_checked = server.is_checked and server.lost is None

    @property
    def lost(self) -> dict[str, str]:
        """Why servers are lost, by address."""
        return {each.address: each.lost for each in self.servers if each.lost is not None}

    def set_awake(self, awake: bool) -> None:
        """Have vLLM take its memory, or give it back but for what the next adapter needs too.

        Its weights go to the host's memory, and keys and values are forgotten.
        """

        def call(server: CompletionServer) -> None:
            seconds = LOAD_SECONDS if server.lost is None else CONNECT_SECONDS
            try:
                server.ask_once("/wake_up" if awake else "/sleep?level=1", {}, seconds)
            except (ServerError, EngineError) as error:
                self._lose(server, error)

        self._with_each(call)

    def close(self) -> None:
        """End what is being drawn, and have the servers forget adapters; takes some seconds."""
        for work in self._works:
            work.end()
        names, self.adapters = list(self.adapters), {}

        def unload(server: CompletionServer) -> None:
            for name in names if server.lost is None else ():
                _unload(server, name, CONNECT_SECONDS)

        self._with_each(unload)

    def check_logprobs(self, body: Body) -> None:
        """Lose servers whose log-probabilities are not those of what they draw from.

        Of one likeliest token to draw from, the log-probability is 0. Each server is asked once,
        and again when it is back.

        Raises:
            EngineError: if the request is refused.
        """

        def check(server: CompletionServer) -> None:
            if server.lost is not None or server.is_checked:
                return
            (answer,) = self._begin([{**body, "top_k": 1, "max_tokens": 1}], [server])()
            if answer is not None and answer.logprobs[0] < -1e-6:
                words = (
                    "it gives log-probabilities before --temperature, --top_p and --top_k, and "
                    "training needs those of what was drawn from: start it with --logprobs-mode "
                    "processed_logprobs (vLLM) or --logprobs_mode processed_logprobs "
                    "(`dschat-lora serve`), or leave these options out, as SGLang needs it"
                )
                self._lose(server, ServerError(words))
            server.is_checked = server.lost is None

        self._with_each(check)

    def begin(self, bodies: Sequence[Body]) -> Callable[[], list[ServerAnswer]]:
        """Have the servers answer requests for one response each; gives what waits for them.

        That returns answers in the order of the requests, and raises an EngineError if one is
        refused, or no server is left. Servers that were lost and are back take part again.
        """
        wait = self._begin(bodies, self.servers)

        def answers() -> list[ServerAnswer]:
            answered = [each for each in wait() if each is not None]
            if len(answered) < len(bodies):
                raise self._none_left()
            return answered

        return answers

    def _with_each(self, do: Callable[[CompletionServer], None]) -> None:
        """Call with every server, at the same time."""
        with ThreadPoolExecutor(len(self.servers)) as pool:
            list(pool.map(do, self.servers))

    def _begin(
        self, bodies: Sequence[Body], servers: Sequence[CompletionServer]
    ) -> Callable[[], list[ServerAnswer | None]]:
        """:meth:`begin` with these servers; answers are None too where all of them are lost."""
        work = _Work([None] * len(bodies))
        self._works.append(work)

        def begin() -> list[threading.Thread]:
            threads = [
                threading.Thread(target=self._ask_all, args=(server, bodies, work), daemon=True)
                for server in servers
                if server.lost is None
                for _ in range(min(self.in_flight, len(bodies)))
            ]
            for thread in threads:
                thread.start()
            return threads

        threads = begin()

        def wait() -> list[ServerAnswer | None]:
            nonlocal threads
            while threads:
                for thread in threads:
                    thread.join()
                threads = [] if work.is_over else begin()
            self._works.remove(work)
            if work.refused is not None:
                raise work.refused
            return work.answers

        return wait

    def _ask_all(self, server: CompletionServer, bodies: Sequence[Body], work: "_Work") -> None:
        """Answer one request after another until none is left, or the server is lost."""
        with closing(server.connect()) as connection, work.using(connection):
            while (number := work.take(server)) is not None:
                body = bodies[number]
                answer: ServerAnswer | None = None
                failure: ServerError | None = None
                try:
                    answer = self._answer(server, connection, body)
                except ServerError as error:
                    failure = error
                except EngineError as error:
                    # Those that come once the work is given up may be cut short.
                    work.refused = work.refused or EngineError(f"{server.address}: {error}")
                except Exception as error:  # noqa: BLE001 - no reply may end this thread
                    failure = ServerError(f"its reply cannot be read: {error!r}"[:300])
                finally:
                    with work.changed:
                        work.give(number, answer)
                        if answer is not None:
                            server.has_answered()
                        elif failure is not None and server.lost is None and not work.is_over:
                            self._count_failure(server, failure)
                if failure is not None and server.lost is None and not work.is_over:
                    time.sleep(_PAUSE)

    def _answer(
        self, server: CompletionServer, connection: HTTPConnection, body: Body
    ) -> ServerAnswer:
        """The answer of a server, which loads the adapter again where it does not know it."""
        try:
            reply = server.draw(connection, body)
        except LostAdapterError:
            server.is_checked = False
            try:
                if (name := body["model"]) in self.adapters:  # else the run is at its end
                    _load(server, name, self.adapters[name])
            except (ServerError, EngineError) as error:
                raise ServerError(str(error)) from error
            raise
        return read_answer(reply, body, self.ends, self.vocabulary_size)

    def _count_failure(self, server: CompletionServer, failure: ServerError) -> None:
        now = time.monotonic()
        server.failures += 1
        server.failing_since = min(server.failing_since, now)
        # One that is full is waited for as long as for an answer.
        patience = server.timeout if isinstance(failure, FullServerError) else PATIENCE
        lasts = server.failures >= MOST_FAILURES and now - server.failing_since >= patience
        if lasts or isinstance(failure, DeniedError):
            self._lose(server, failure)

    def _lose(self, server: CompletionServer, why: Exception) -> None:
        is_news = server.lost is None
        server.lost, server.is_checked = f"{why}{server.last_words()}", False
        if is_news:
            self.say(f"{server.address} is lost: {server.lost}")

    def _none_left(self) -> EngineError:
        reasons = "; ".join(f"{address}: {why}" for address, why in self.lost.items())
        return EngineError(f"--rollout_engine: no server is left that draws responses ({reasons})")


@dataclass
class _Work:
    """Requests that wait, and answers that came; shared by the threads of one call."""

    answers: list[ServerAnswer | None]
    refused: EngineError | None = None
    ended: bool = False
    changed: threading.Condition = field(default_factory=threading.Condition)

    def __post_init__(self) -> None:
        self.waiting, self._missing = deque(range(len(self.answers))), len(self.answers)
        self._connections: set[HTTPConnection] = set()

    @property
    def is_over(self) -> bool:
        """Whether no answer is wanted any more."""
        return self.ended or self.refused is not None or not self._missing

    @contextmanager
    def using(self, connection: HTTPConnection) -> Iterator[None]:
        """Within, the connection is shut where the work is over, which ends what waits for it."""
        self._connections.add(connection)
        yield
        self._connections.discard(connection)

    def end(self) -> None:
        """Give up what is not answered yet."""
        self.ended = True
        for connection in list(self._connections):
            if (connected := connection.sock) is not None:
                with suppress(OSError):
                    socket.socket.shutdown(connected, socket.SHUT_RDWR)

    def take(self, server: CompletionServer) -> int | None:
        """The number of the next request, once there is one; None when all are answered."""
        with self.changed:
            while True:
                if self.is_over or server.lost is not None:
                    return None
                if self.waiting:
                    return self.waiting.popleft()
                self.changed.wait()  # for what others may give back

    def give(self, number: int, answer: ServerAnswer | None) -> None:
        """Keep the answer to a request or, without one, have another try; under the lock."""
        self.answers[number] = answer
        if answer is None:
            self.waiting.append(number)
        else:
            self._missing -= 1
        if self.is_over:
            self.end()
        self.changed.notify_all()


def _load(server: CompletionServer, name: str, path: str) -> None:
    body = {"lora_name": name, "lora_path": path}
    try:
        server.set_adapter("load", body, LOAD_SECONDS)
    except LostAdapterError as error:
        raise EngineError(
            f"it does not load the adapter {path} ({error}): it must see that directory "
            "(--rollout_adapter_dir, for another user's server), and be started with "
            "--allow_runtime_lora_updating (`dschat-lora serve`) or --enable-lora (SGLang, and "
            "vLLM, there with VLLM_ALLOW_RUNTIME_LORA_UPDATING=True)"
        ) from error
    except EngineError as error:
        if "already" not in str(error):
            raise EngineError(f"it does not load {path}: {error}") from error


def _unload(server: CompletionServer, name: str, seconds: float) -> None:
    with suppress(ServerError, EngineError):  # it is not there any more
        server.set_adapter("unload", {"lora_name": name}, seconds)
