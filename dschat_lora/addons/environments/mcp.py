"""Tools of MCP servers."""

import asyncio
import atexit
import shlex
from typing import Any, ClassVar

from mcp import Client, MCPError, StdioServerParameters, stdio_client
from mcp.types import CONNECTION_CLOSED, Tool

from dschat_lora.rl.options.names import is_remote
from dschat_lora.rl.response.coroutines import run_together


class McpServer:
    """The tools of an MCP server: a command that talks over its standard streams, or an address.

    One session of the process serves all its episodes, so tools should keep nothing of an episode.
    """

    _sessions: ClassVar[dict[str, tuple[Client, list[dict[str, Any]]]]] = {}

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
                raise ValueError(f"--environment {self._where} is not a server: {error}") from error
        self._client, self.tool_schemas = self._sessions[server]

    def reset(self) -> None:
        """Nothing: the prompt is that of the data."""

    async def call(self, name: str, values: dict[str, Any]) -> str:
        """What a tool returns, or what the server finds wrong with the call, as text.

        Raises:
            RuntimeError: if the server has ended.
        """
        try:
            result = await self._client.call_tool(name, values)
        except MCPError as error:
            if error.error.code == CONNECTION_CLOSED:
                raise RuntimeError(f"the server of --environment {self._where} ended") from error
            return str({"error": error.error.message})
        text = "\n".join(each.text for each in result.content if each.type == "text")
        return str({"error": text}) if result.is_error else text


async def _open_mcp(server: str) -> tuple[Client, list[dict[str, Any]]]:
    """A client of a server until the process ends, and its tools for a chat template."""
    target = server
    if not is_remote(server):
        command, *arguments = shlex.split(server)
        target = stdio_client(StdioServerParameters(command=command, args=arguments))
    ready = asyncio.get_running_loop().create_future()
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
    opened = await ready
    atexit.register(lambda: run_together([close()]))
    return opened


def _first_error(error: BaseException) -> BaseException:
    """The error itself, or the first of a group of them."""
    while hasattr(error, "exceptions"):
        error = error.exceptions[0]
    return error


async def _tools_of(client: Client) -> list[dict[str, Any]]:
    page = await client.list_tools()
    tools = [*page.tools]
    while page.next_cursor is not None:
        page = await client.list_tools(cursor=page.next_cursor)
        tools += page.tools
    return [*map(mcp_tool_schema, tools)]


def mcp_tool_schema(tool: Tool, prefix: str = "") -> dict[str, Any]:
    """A tool that an MCP server lists, for a chat template, its name behind ``prefix``."""
    function = {
        "name": f"{prefix}{tool.name}",
        "description": tool.description or "",
        "parameters": tool.input_schema,
    }
    return {"type": "function", "function": function}
