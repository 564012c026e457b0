"""Programs that play an agent's episode: a function of the user's, or a command."""

import asyncio
import inspect
import itertools
import json
import math
import os
import shlex
import signal
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, SupportsFloat, cast

from dschat_lora.addons.agents.conversations import MODEL_NAME
from dschat_lora.engine.children import variables_of_no_launch
from dschat_lora.rl.response.coroutines import in_thread
from dschat_lora.rl.score.user_functions import named_parameters, same_gradients, takes_all

if TYPE_CHECKING:
    import httpx
    import openai

# What a function may take beside the columns of its row.
OFFERED = ("row", "client", "model", "base_url", "api_key")


@dataclass(frozen=True)
class AgentFunction:
    """A function of the user's, ``async`` or not, called by keyword with what it takes.

    A client is one of the ``openai`` package: ``AsyncOpenAI`` for an ``async`` function, else
    ``OpenAI``. Functions that are not ``async`` run in threads, all at once.
    """

    name: str  # module:function
    function: Callable[..., Any]

    @property
    def label(self) -> str:
        """The function's name."""
        return self.name.rpartition(":")[2]

    @property
    def option(self) -> str:
        """The option, with the function's name."""
        return f"--agent {self.label}"

    def check_columns(self, columns: Collection[str]) -> None:
        """Refuse data without the columns that the function asks for.

        Raises:
            ValueError: naming both.
        """
        parameters = named_parameters(self.function).values()
        needed = [p.name for p in parameters if p.default is p.empty]
        lacking = [name for name in needed if name not in (*OFFERED, *columns)]
        if lacking:
            raise ValueError(
                f"--agent {self.name} asks for {', '.join(lacking)}; it may take "
                f"{', '.join(OFFERED)} and the columns of the data: "
                f"{', '.join(sorted(columns)) or 'there are none'}"
            )

    async def run(self, row: Mapping[str, Any], base_url: str, api_key: str) -> object:
        """Call the function."""
        names = named_parameters(self.function)
        function = inspect.unwrap(self.function)
        called = getattr(function, "__call__", None)  # noqa: B004 - of an object
        is_async = any(map(inspect.iscoroutinefunction, (function, called)))
        given = {**row, "row": row, "model": MODEL_NAME, "base_url": base_url, "api_key": api_key}
        if not takes_all(self.function):
            given = {name: value for name, value in given.items() if name in names}
        if "client" in names or takes_all(self.function):
            client = _client(is_async)
            given["client"] = client.with_options(base_url=base_url, api_key=api_key)
        if is_async:
            return await self.function(**given)

        def call() -> object:
            try:
                with same_gradients():
                    return self.function(**given)
            except StopIteration as error:  # which no coroutine can pass on
                raise RuntimeError(f"StopIteration: {error}") from error

        given = await asyncio.wrap_future(in_thread(call))
        return await given if inspect.isawaitable(given) else given


# What the clients of this process count their calls by: several at once arrive in any order.
CALL_NUMBER = "x-call-number"
_numbers = itertools.count(1)


@cache
def _client(is_async: bool) -> "openai.OpenAI | openai.AsyncOpenAI":
    """A client whose connections all episodes share, as making them anew takes long."""
    import openai

    def count(request: "httpx.Request") -> None:
        request.headers[CALL_NUMBER] = str(next(_numbers))

    async def count_async(request: "httpx.Request") -> None:
        count(request)

    class Async(openai.DefaultAsyncHttpxClient):
        async def aclose(self) -> None:
            """Stay open: other episodes use it too."""

    class Plain(openai.DefaultHttpxClient):
        def close(self) -> None:
            """Stay open: other episodes use it too."""

    url, key = "http://127.0.0.1", "none"
    if is_async:
        own = Async(trust_env=False, timeout=None, event_hooks={"request": [count_async]})
        return openai.AsyncOpenAI(
            http_client=own, base_url=url, api_key=key, max_retries=0, timeout=None
        )
    plain = Plain(trust_env=False, timeout=None, event_hooks={"request": [count]})
    return openai.OpenAI(http_client=plain, base_url=url, api_key=key, max_retries=0, timeout=None)


@dataclass(frozen=True)
class AgentCommand:
    """A command that is run for each episode, with the row as JSON on its standard input.

    ``OPENAI_BASE_URL`` and ``OPENAI_API_KEY`` point it at the model, and ``OPENAI_MODEL`` names it.
    The last line that it prints is its reward as JSON, unless it sends one to ``REWARD_URL``.
    Where a ``--reward_function`` scores the episode, it may print nothing.
    """

    command: str
    is_scored: bool = False
    label, option = "agent", "--agent_command"

    def check_columns(self, columns: Collection[str]) -> None:
        """Any data will do."""

    async def run(self, row: Mapping[str, Any], base_url: str, api_key: str) -> object:
        """Run the command.

        Raises:
            RuntimeError: if it fails.
            NoRewardError: if its last line is no JSON.
        """
        address = {
            "OPENAI_BASE_URL": base_url,
            "OPENAI_API_KEY": api_key,
            "OPENAI_MODEL": MODEL_NAME,
            "OPENAI_API_BASE": base_url,  # the name of it before version 1 of openai
            "REWARD_URL": f"{base_url.removesuffix('/v1')}/reward",
        }
        # A proxy would be told of the address, and does not reach it.
        for name in ("NO_PROXY", "no_proxy"):
            address[name] = ",".join(filter(None, (os.environ.get(name), "127.0.0.1")))
        process = await asyncio.create_subprocess_exec(
            *shlex.split(self.command),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=variables_of_no_launch() | address,
            start_new_session=True,
        )
        text = json.dumps(row, ensure_ascii=False).encode()
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        talk = asyncio.gather(
            _last_line(process.stdout),
            _last_line(process.stderr),
            _give(process.stdin, text + b"\n"),
        )
        try:
            await process.wait()
        finally:
            # What it has left behind, which keeps its streams open, and where the episode is
            # cancelled the command itself.
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        printed, errors, _ = await talk
        if process.returncode:
            last = errors or printed
            raise RuntimeError(f"it ended with exit code {process.returncode}: {last:.300}")
        if self.is_scored and not printed:
            return None
        try:
            return json.loads(printed)
        except (ValueError, RecursionError) as error:
            no_json = f"its last line is not JSON: {printed!r:.200}"
            raise NoRewardError(
                f"{no_json if printed else 'it printed nothing'}; print the reward on the last "
                "line, as a number or an object with `reward`, or null to exclude the episode"
            ) from error


Program = AgentFunction | AgentCommand


class NoRewardError(ValueError):
    """A command printed no reward."""


async def _last_line(stream: asyncio.StreamReader) -> str:
    """The last line of a stream, of which no more than a mebibyte is kept."""
    kept = bytearray()
    while chunk := await stream.read(2**16):
        kept += chunk
        del kept[: -(2**20)]
    return kept.decode(errors="replace").strip().rpartition("\n")[2]


async def _give(stream: asyncio.StreamWriter, data: bytes) -> None:
    """Write to a program, which need not read, and end."""
    with suppress(BrokenPipeError, ConnectionResetError):
        stream.write(data)
        await stream.drain()
    stream.close()


def reward_and_metrics(given: object) -> tuple[float | None, dict[str, float]]:
    """The reward that a program gave, None for no reward, and what else it counted.

    Raises:
        ValueError: if it is neither a finite number, nor a dict with ``reward``, nor None.
    """
    values = given if isinstance(given, dict) else {"reward": given}
    numbers = {name: _number(value) for name, value in values.items()}
    more = {n: v for n, v in numbers.items() if n != "reward" and math.isfinite(v)}
    if values.get("reward", math.nan) is None:
        return None, more
    if not math.isfinite(numbers.get("reward", math.nan)):
        raise ValueError(
            f"an agent gave {given!r:.200}; return a finite number, a dict with `reward` and "
            "other numbers, or None to exclude the episode"
        )
    return numbers["reward"], more


def _number(value: object) -> float:
    """A number of Python's or numpy's; NaN for anything else, and what is too large."""
    if isinstance(value, str) or not hasattr(value, "__float__"):
        return math.nan
    try:
        return float(cast(SupportsFloat, value))
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return math.nan
