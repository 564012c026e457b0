"""Tasksets of ``verifiers``: their environments' own ``run``, with the actor as the agent."""

from __future__ import annotations

import asyncio
import atexit
import inspect
import itertools
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import cache
from types import SimpleNamespace
from typing import Any
from urllib.parse import parse_qs

import verifiers.v1 as vf
from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from verifiers.v1.state import state_cls
from verifiers.v1.types import content_text
from verifiers.v1.utils.decorators import discover_decorated, invoke

from dschat_lora.addons.environments.mcp import mcp_tool_schema
from dschat_lora.data.tool_calls import parse_tool_calls
from dschat_lora.rl.response.coroutines import run_together
from dschat_lora.runtime.checks import working_directory

# Of a tool: identifier, name and arguments.
_Call = tuple[str, str, dict[str, Any]]


class Verifiers:
    """A taskset of ``verifiers``, whose tasks are the prompts and whose rewards score.

    Episode ``n`` has task ``n``, from the beginning again where there are fewer. The query of a
    name holds options of the taskset, as in ``textarena?game=Wordle-v0``.
    """

    def __init__(self, name: str) -> None:
        """Load the taskset and its environment.

        Raises:
            ValueError: if there is none, or it needs more than an actor that answers.
        """
        self._name = name
        self._env, self._tasks = _load(name)
        self._servers = _tool_servers(self._env, self._tasks[0])
        self.tool_schemas = [
            mcp_tool_schema(tool, prefix)
            for prefix, server in self._servers
            for tool in run_together([server.list_tools()])[0]
        ]
        self.reward_name = name.partition("?")[0].rpartition("/")[2]
        self._run: asyncio.Task[float] | None = None
        atexit.register(lambda: run_together([self._leave()]))

    async def reset(self, episode: int) -> list[dict[str, Any]]:
        """The messages that begin a task."""
        await self._leave()
        task = self._tasks[episode]
        self._servers = _tool_servers(self._env, task)
        self._agent = _Agent(self._servers)
        self._run = asyncio.create_task(_play(self._env, task, self._agent))
        messages = await self._next_messages()
        if messages is None:
            raise RuntimeError(f"--environment verifiers:{self._name}: a task ended without a turn")
        return messages

    async def step(self, message: dict[str, Any]) -> tuple[list[dict[str, Any]] | None, float]:
        """What follows an answer; the reward when the episode is over."""
        assert self._run is not None
        self._agent.answers.put_nowait(message)
        messages = await self._next_messages()
        return messages, self._run.result() if messages is None else 0.0

    async def _leave(self) -> None:
        """End the run of an episode that was cut off."""
        if self._run is not None and not self._run.done():
            self._run.cancel()
            await asyncio.wait([self._run])

    async def _next_messages(self) -> list[dict[str, Any]] | None:
        """The messages that the agent is asked to answer; None if the run is over."""
        assert self._run is not None
        asked = asyncio.create_task(self._agent.asked.get())
        await asyncio.wait([asked, self._run], return_when=asyncio.FIRST_COMPLETED)
        if asked.done():
            return asked.result()
        asked.cancel()
        self._run.result()  # raises what the run raised
        return None


class _Tasks:
    """The tasks of a taskset, read as they are asked for, from the beginning again at its end."""

    def __init__(self, taskset: vf.Taskset) -> None:
        self._rest = iter(taskset)
        self._read: list[vf.Task] = []

    def __getitem__(self, number: int) -> vf.Task:
        missing = max(0, number + 1 - len(self._read))
        self._read += itertools.islice(self._rest, missing)
        return self._read[number % len(self._read)]


@cache
def _load(name: str) -> tuple[vf.Env, _Tasks]:
    """The environment and tasks of a taskset.

    Raises:
        ValueError: if there is none, or it needs more than an actor that answers.
    """
    identifier, _, query = name.partition("?")
    options = {key: values[0] for key, values in parse_qs(query).items()}
    where = f"--environment verifiers:{name}"
    try:
        with working_directory():
            config = vf.env_config_type(identifier)(taskset={"id": identifier, **options})
            env = vf.load_environment(config)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise ValueError(f"{where}: {error}") from error
    agents = [each for _, each in env.config if isinstance(each, vf.AgentConfig)]
    tasks = _Tasks(env.taskset)
    lacking = "several agents" if len(agents) > 1 else _what_it_lacks(tasks[0])
    if lacking:
        raise ValueError(f"{where} needs {lacking}, which is not available here")
    return env, tasks


def _what_it_lacks(task: vf.Task) -> str | None:
    """What a task needs beyond an actor that answers and tools without state, if anything."""
    if task.NEEDS_CONTAINER or task.data.image is not None:
        return "a container"
    if task.hooks("stop") or discover_decorated(task, "intercept"):
        return "hooks that stop or intercept the agent"
    for function in task.hooks("reward"):
        parameter = inspect.signature(function).parameters.get("runtime")
        if parameter is not None and parameter.default is parameter.empty:
            return f"a runtime for its reward {function.__name__}"
    return None


def _tool_servers(env: vf.Env, task: vf.Task) -> list[tuple[str, MCPServer]]:
    """MCP servers, within this process, of a task's tools, with the prefix of their names."""
    taskset = env.taskset
    toolsets = [*task.toolsets(task.config), *taskset.toolsets(taskset.config)]
    servers = []
    for toolset in toolsets:
        prefix = toolset.server_name
        server = MCPServer(prefix or type(toolset).__name__)
        toolset.register(server)
        servers.append((f"{prefix}_" if prefix else "", server))
    return servers


async def _play(env: vf.Env, task: vf.Task, agent: _Agent) -> float:
    """The reward of one episode of an environment."""
    (name,) = [key for key, each in env.config if isinstance(each, vf.AgentConfig)]
    agents = SimpleNamespace(**{name: agent})
    await env.setup(agents)
    await env.run(task, agents)
    info = vf.EnvInfo(id=env.config.env_id)
    episode = vf.Episode(env=info, task=_trace_task(task), traces=agent.traces, ok=True)
    await env.finalize(task, episode)
    return float(sum(trace.reward for trace in agent.traces))


def _trace_task(task: vf.Task) -> vf.TraceTask:
    return vf.TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash)


class _Agent:
    """An agent of ``verifiers`` whose turns are taken outside: asked and answered by queues."""

    trainable = True

    def __init__(self, servers: list[tuple[str, MCPServer]]) -> None:
        self.asked: asyncio.Queue[list[dict[str, Any]]] = asyncio.Queue()
        self.answers: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.traces: list[vf.Trace] = []
        self._servers = servers

    async def run(self, task: vf.Task) -> vf.Trace:
        """Take one turn; the trace, scored."""
        async with self.interaction(task) as interaction:
            await interaction.turn()
        return interaction.trace

    @asynccontextmanager
    async def interaction(self, task: vf.Task) -> AsyncIterator[_Interaction]:
        """Turns of a task; its rewards are on the trace behind the block."""
        trace = vf.Trace(
            task=_trace_task(task),
            state=state_cls(type(task))(),
            agent=vf.AgentInfo(config=vf.AgentConfig()),
        )
        self.traces.append(trace)
        available = {"trace": trace, "runtime": None}
        await invoke(task.setup, available)
        yield _Interaction(self, task, trace)
        trace.stop("user_closed")
        await invoke(task.finalize, available)
        await task.score(trace)


class _Interaction:
    """The turns of one trace."""

    def __init__(self, agent: _Agent, task: vf.Task, trace: vf.Trace) -> None:
        self.trace = trace
        self._agent, self._task, self._calls = agent, task, itertools.count()

    async def turn(self, message: str | list[vf.UserMessage] | None = None) -> vf.Segment:
        """The answer to a message, after the tool calls on the way to it."""
        asked: list[vf.Message] = []
        if not self.trace.nodes:
            begin, prompt = self._task.data.system_prompt, self._task.data.prompt
            asked += [] if begin is None else [vf.SystemMessage(content=begin)]
            asked += [vf.UserMessage(content=prompt)] if isinstance(prompt, str) else prompt or ()
        if isinstance(message, str):
            message = [vf.UserMessage(content=message)]
        asked += message or []
        answers: list[vf.Message] = []
        while asked:
            self._record(asked)
            self._agent.asked.put_nowait([_as_dict(each) for each in asked])
            answer, calls = self._read(await self._agent.answers.get())
            self._record([answer], sampled=True)
            asked = [await self._called(*call) for call in calls]
            answers += [answer, *asked]
        return vf.Segment(messages=answers)

    def _record(self, messages: list[vf.Message], *, sampled: bool = False) -> None:
        nodes = self.trace.nodes
        for each in messages:
            parent = len(nodes) - 1 if nodes else None
            nodes.append(vf.MessageNode(parent=parent, message=each, sampled=sampled))

    def _read(self, message: dict[str, Any]) -> tuple[vf.AssistantMessage, list[_Call]]:
        """An answer as ``verifiers`` has it, and its calls: identifier, name, arguments."""
        made = [each["function"] for each in message.get("tool_calls", ())]
        calls = [(f"call_{next(self._calls)}", each["name"], each["arguments"]) for each in made]
        content = parse_tool_calls(message["content"])[0] if calls else message["content"]
        listed = [vf.ToolCall(id=i, name=n, arguments=json.dumps(a)) for i, n, a in calls]
        return vf.AssistantMessage(content=content, tool_calls=listed or None), calls

    async def _called(self, identifier: str, name: str, values: dict[str, Any]) -> vf.ToolMessage:
        """The message of a tool; what is wrong with a call is told to the actor."""
        text = str({"error": f"there is no tool {name}"})
        for prefix, server in self._agent._servers:
            tools = [each.name for each in await server.list_tools()]
            if name.removeprefix(prefix) in tools and name.startswith(prefix):
                try:
                    result = await server.call_tool(name.removeprefix(prefix), values)
                    text = "\n".join(each.text for each in result.content if each.type == "text")
                except ToolError as error:
                    text = str({"error": str(error)})
        return vf.ToolMessage(tool_call_id=identifier, name=name, content=text)


def _as_dict(message: vf.Message) -> dict[str, Any]:
    """A message for the chat template."""
    said = {"role": message.role, "content": content_text(message.content)}
    return said | ({"name": message.name} if message.role == "tool" else {})
