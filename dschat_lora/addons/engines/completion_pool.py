"""Servers of completions among which prompts are shared out, and lost ones that come back."""

import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from http.client import HTTPConnection

from dschat_lora.addons.engines.completions import (
    CONNECT_SECONDS,
    Body,
    CompletionServer,
    DeniedError,
    FullServerError,
    LostAdapterError,
    ServerAnswer,
    ServerError,
    read_answer,
)
from dschat_lora.rl.options.engines import EngineError

# Most that an adapter may take, or --rollout_timeout where that is less.
LOAD_SECONDS, UNLOAD_SECONDS = 120.0, 30.0
# A server that has given no answer for so long since its first failure, and failed so often, is
# lost: others get its prompts.
PATIENCE, MOST_FAILURES = 10.0, 3
_PAUSE = 0.25  # seconds before a request that failed is made again


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
                    "it returns log-probabilities before --temperature, --top_p and --top_k, but "
                    "training needs those of the sampling distribution: start it with "
                    "--logprobs-mode processed_logprobs (vLLM) or --logprobs_mode "
                    "processed_logprobs (`dschat-lora serve`), or omit these options, as SGLang "
                    "requires"
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
        return EngineError(f"--rollout_engine: no server is left to generate responses ({reasons})")


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
            f"it does not load the adapter {path} ({error}): it must have access to that "
            "directory (--rollout_adapter_dir, for another user's server) and be started with "
            "--allow_runtime_lora_updating (`dschat-lora serve`) or --enable-lora (SGLang, and "
            "vLLM, there with VLLM_ALLOW_RUNTIME_LORA_UPDATING=True)"
        ) from error
    except EngineError as error:
        if "already" not in str(error):
            raise EngineError(f"it does not load {path}: {error}") from error


def _unload(server: CompletionServer, name: str, seconds: float) -> None:
    with suppress(ServerError, EngineError):  # it is not there any more
        server.set_adapter("unload", {"lora_name": name}, seconds)
