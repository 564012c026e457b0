"""An MCP server with two tools, over standard streams or, with a port, over HTTP."""

import os
import sys

from mcp.server.mcpserver import MCPServer

server = MCPServer("tools")


@server.tool()
def add(a: int, b: int) -> int:
    """The sum of two numbers."""
    return a + b


@server.tool()
def leave() -> str:
    """End the server."""
    os._exit(3)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        server.run("streamable-http", port=int(sys.argv[1]))
    else:
        server.run()
