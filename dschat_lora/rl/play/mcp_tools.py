"""Tools of MCP servers."""

from typing import Any


def mcp_tool_schema(tool: Any, prefix: str = "") -> dict[str, Any]:
    """A tool that an MCP server lists, for a chat template, its name behind ``prefix``."""
    function = {
        "name": f"{prefix}{tool.name}",
        "description": tool.description or "",
        "parameters": tool.input_schema,
    }
    return {"type": "function", "function": function}
