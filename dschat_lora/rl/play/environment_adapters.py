"""Environments of other libraries, which ``--environment`` takes as ``LIBRARY:NAME``."""

import atexit
import json
import shlex
import weakref
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, ClassVar

from dschat_lora.data.messages import Message
from dschat_lora.rl.options.names import Function, called, is_remote
from dschat_lora.rl.response.coroutines import run_together
from dschat_lora.runtime.checks import require_packages, working_directory


class ReasoningGym:
    """A task of ``reasoning-gym``, whose questions have no end and are scored by itself.

    Episode ``n`` has the task's question ``n``.
    """

    _tasks: ClassVar[dict[str, Any]] = {}

    def __init__(self, task: str) -> None:
        """Make the task's data set.

        Raises:
            ValueError: if there is no such task.
        """
        from reasoning_gym import create_dataset

        if task not in self._tasks:
            try:
                self._tasks[task] = create_dataset(task, size=2**31, seed=0)
            except ValueError as error:
                raise ValueError(f"--environment reasoning_gym:{task}: {error}") from error
        self._task = self._tasks[task]
        self.reward_name = task

    def reset(self, episode: int) -> str:
        """The question."""
        self._entry = self._task[episode]
        return str(self._entry["question"])

    def step(self, message: Message) -> tuple[None, float]:
        """The end of the episode, and the score of its answer."""
        answer = message["content"].strip()
        return None, float(self._task.score_answer(answer=answer, entry=self._entry))


class Gymnasium:
    """An environment of ``gymnasium`` whose observations are text.

    An answer is the action: text, or the number or name of a discrete action. Episode ``n`` begins
    as ``reset(seed=n)`` does.
    """

    def __init__(self, name: str) -> None:
        """Make ``ENV_ID``, or ``module:ENV_ID`` where a module registers it.

        Raises:
            ValueError: if there is no such environment, or its actions cannot be written.
        """
        import gymnasium

        where = f"--environment gymnasium:{name}"
        try:
            with working_directory():
                self._env = gymnasium.make(name, disable_env_checker=True)
        except (gymnasium.error.Error, ImportError) as error:
            raise ValueError(f"{where}: {error}") from error
        weakref.finalize(self, self._env.close)
        space = self._space = self._env.action_space
        self._numbers: dict[str, int] | None = None
        if isinstance(space, gymnasium.spaces.Discrete):
            first = int(space.start)
            self._numbers = {str(first + n): first + n for n in range(int(space.n))}
            self._numbers |= {name.lower(): n for name, n in _action_names(self._env).items()}
        elif not isinstance(space, gymnasium.spaces.Text):
            raise ValueError(f"{where}: actions are {space}; an answer gives Text or Discrete ones")
        self._where = where
        self.reward_name = name.rpartition(":")[2]

    def reset(self, episode: int) -> str:
        """The first observation."""
        return self._text(self._env.reset(seed=episode)[0])

    def step(self, message: Message) -> str | tuple[str | None, float]:
        """The next observation and the reward; None for the observation ends the episode."""
        said = message["content"].strip()
        if self._numbers is not None:
            action: Any = self._numbers.get(said.lower())
            allowed = f"one of {', '.join(self._numbers)}"
        else:
            action = said if self._space.contains(said) else None
            allowed = f"a text of {self._space}"
        if action is None:
            return f"Invalid action: it must be {allowed}."
        observation, reward, terminated, truncated, _ = self._env.step(action)
        return None if terminated or truncated else self._text(observation), float(reward)

    def _text(self, observation: Any) -> str:
        if not isinstance(observation, str):
            raise ValueError(
                f"{self._where}: an observation is a {type(observation).__name__}; only "
                "environments whose observations are text can be played"
            )
        return observation


def _action_names(env: Any) -> dict[str, int]:
    """Numbers of actions by name, where an environment names them."""
    inner = env.unwrapped
    names = getattr(inner, "action_meanings", None) or env.metadata.get("action_meanings")
    if names is None and hasattr(inner, "get_action_meanings"):
        names = inner.get_action_meanings()
    pairs = names.items() if isinstance(names, Mapping) else enumerate(names or ())
    return {str(name): int(number) for number, name in pairs}


class OpenEnv:
    """An environment behind an OpenEnv server, over a WebSocket for each episode at a time.

    The query of its address may name the ``field`` of an action that takes the answer, and the one
    of an ``observation`` that is shown. Episode ``n`` begins as ``reset(seed=n)`` does.
    """

    def __init__(self, address: str) -> None:
        """Ask the server what its actions and observations look like.

        Raises:
            ValueError: if it cannot be asked, or no field of an action takes a text.
        """
        from openenv.core import GenericEnvClient

        url, self._field, self._shown = _openenv_fields(address)
        self._client = GenericEnvClient(base_url=url)
        self._where = f"--environment openenv:{address}"
        self.reward_name = "openenv"
        atexit.register(lambda: run_together([self._client.close()]))

    async def reset(self, episode: int) -> str:
        """The first observation.

        Raises:
            RuntimeError: if the server has no room for another session, or fails.
        """
        try:
            result = await self._client.reset(seed=episode)
        except Exception as error:
            raise RuntimeError(
                f"{self._where}: reset failed: {error}; the server must allow as many sessions "
                "(max_concurrent_envs) as episodes are played at once"
            ) from error
        return self._text(result.observation)

    async def step(self, message: Message) -> tuple[str | None, float]:
        """The next observation and the reward; None for the observation ends the episode."""
        result = await self._client.step({self._field: message["content"].strip()})
        return None if result.done else self._text(result.observation), float(result.reward or 0)

    def _text(self, observation: Mapping[str, Any]) -> str:
        if self._shown is None:
            return json.dumps(observation, ensure_ascii=False)
        return str(observation[self._shown])


@cache
def _openenv_fields(address: str) -> tuple[str, str, str | None]:
    """A server's address, the field of its actions for text, and the one of observations.

    The last is None where several hold text: all are shown then.
    """
    from urllib.parse import parse_qs, urlsplit
    from urllib.request import urlopen

    where, parts = f"--environment openenv:{address}", urlsplit(address)
    url = f"{parts.scheme}://{parts.netloc}{parts.path}".rstrip("/")
    if parts.scheme not in ("http", "https"):
        raise ValueError(f"{where}: an address begins with http:// or https://")
    try:
        with urlopen(f"{url}/schema", timeout=30) as answer:
            schema = json.load(answer)
    except (OSError, ValueError) as error:
        raise ValueError(f"{where}: {url}/schema gives no description: {error}") from error
    asked = {name: values[0] for name, values in parse_qs(parts.query).items()}
    taking, showing = (_text_fields(schema[kind]) for kind in ("action", "observation"))
    field = asked.get("field") or (taking[0] if len(taking) == 1 else None)
    if field not in taking:
        raise ValueError(
            f"{where}: the text fields of an action are {', '.join(taking) or '(none)'}; name one "
            "by ?field=NAME"
        )
    shown = asked.get("observation") or (showing[0] if len(showing) == 1 else None)
    if shown is not None and shown not in schema["observation"]["properties"]:
        raise ValueError(
            f"{where}: an observation has no field {shown}; it has "
            f"{', '.join(schema['observation']['properties'])}"
        )
    return url, field, shown


def _text_fields(schema: Mapping[str, Any]) -> list[str]:
    """Fields of a JSON schema that hold text: those that must be there, if there are any."""

    def holds_text(found: Mapping[str, Any]) -> bool:
        kinds = [found, *found.get("anyOf", ())]
        return any(kind.get("type") == "string" and "enum" not in kind for kind in kinds)

    fields = [name for name, found in schema["properties"].items() if holds_text(found)]
    return [name for name in fields if name in schema.get("required", ())] or fields


class McpServer:
    """The tools of an MCP server: a command that talks over its standard streams, or an address.

    One session of the process serves all its episodes, so tools should keep nothing of an episode.
    """

    _sessions: ClassVar[dict[str, tuple[Any, list[dict[str, Any]]]]] = {}

    def __init__(self, server: str) -> None:
        """Start or join the server, and list its tools.

        Raises:
            ValueError: if that fails.
        """
        self._where = f"mcp:{server}"
        if server not in self._sessions:
            try:
                (self._sessions[server],) = run_together([_open_mcp(server)])
            except Exception as error:
                raise ValueError(f"--environment {self._where} is no server: {error}") from error
        self._client, self.tool_schemas = self._sessions[server]

    def reset(self) -> None:
        """Nothing: the prompt is that of the data."""

    async def call(self, name: str, values: dict[str, Any]) -> str:
        """What a tool returns, or what the server finds wrong with the call, as text.

        Raises:
            RuntimeError: if the server has ended.
        """
        from mcp import MCPError
        from mcp.types import CONNECTION_CLOSED

        try:
            result = await self._client.call_tool(name, values)
        except MCPError as error:
            if error.error.code == CONNECTION_CLOSED:
                raise RuntimeError(f"the server of --environment {self._where} ended") from error
            return str({"error": error.error.message})
        text = "\n".join(each.text for each in result.content if each.type == "text")
        return str({"error": text}) if result.is_error else text


async def _open_mcp(server: str) -> tuple[Any, list[dict[str, Any]]]:
    """A client of a server until the process ends, and its tools for a chat template."""
    import asyncio

    from mcp import Client, StdioServerParameters, stdio_client

    target: Any = server
    if not is_remote(server):
        command, *arguments = shlex.split(server)
        target = stdio_client(StdioServerParameters(command=command, args=arguments))
    ready: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    ended = asyncio.Event()

    async def hold() -> None:
        # A session must be closed by the task that opened it.
        try:
            async with Client(target) as client:
                ready.set_result((client, await _tools_of(client)))
                await ended.wait()
        except Exception as error:  # noqa: BLE001 - calls of a lost session raise by themselves
            if not ready.done():
                ready.set_exception(_first_error(error))

    async def close() -> None:
        ended.set()
        await asyncio.wait([session])

    session = asyncio.create_task(hold())
    found = await ready
    atexit.register(lambda: run_together([close()]))
    return found


def _first_error(error: BaseException) -> BaseException:
    """The error itself, or the first of a group of them."""
    while hasattr(error, "exceptions"):
        error = error.exceptions[0]
    return error


async def _tools_of(client: Any) -> list[dict[str, Any]]:
    found, cursor = [], None
    while True:
        page = await client.list_tools(cursor=cursor)
        found += [mcp_tool_schema(tool) for tool in page.tools]
        cursor = page.next_cursor
        if cursor is None:
            return found


def mcp_tool_schema(tool: Any, prefix: str = "") -> dict[str, Any]:
    """A tool that an MCP server lists, for a chat template, its name behind ``prefix``."""
    function = {
        "name": f"{prefix}{tool.name}",
        "description": tool.description or "",
        "parameters": tool.input_schema,
    }
    return {"type": "function", "function": function}


# By the word before the colon: the class, the module it needs and the extra that installs it.
ADAPTERS: dict[str, tuple[Function, str, str]] = {
    "gymnasium": (Gymnasium, "gymnasium", "gymnasium"),
    "mcp": (McpServer, "mcp>=2", "mcp"),
    "openenv": (OpenEnv, "openenv", "openenv"),
    "reasoning_gym": (ReasoningGym, "reasoning_gym", "environments"),
    "verifiers": (
        "dschat_lora.rl.play.verifiers_environment:Verifiers",
        "verifiers>=0.4",
        "verifiers",
    ),
}


def find_adapter(name: str) -> Callable[[], Any] | None:
    """What makes the objects of ``LIBRARY:NAME``; None where it names no library.

    Raises:
        ValueError: if the library is not installed.
    """
    library, _, rest = name.partition(":")
    if library not in ADAPTERS:
        return None
    adapter, module, extra = ADAPTERS[library]
    require_packages(f"--environment {name}", module, extra=extra)
    return lambda: called(adapter)(rest)
