"""What each engine says of itself, and the addresses of servers."""

import re
from urllib.parse import urlsplit

from dschat_lora.rl.options.engines import EngineFacts

_HERE = "dschat_lora.addons.engines"
_ADDRESS = re.compile(r"https?://[^/?#\s@]+(/[^?#\s]*)?")


def is_remote(name: str) -> bool:
    """Whether ``name`` begins as the address of a server."""
    return name.startswith(("http://", "https://"))


def is_address(text: str) -> bool:
    """Whether ``text`` is the address of a server."""
    try:
        parts = urlsplit(text)
        host = (parts.hostname or "").encode("idna")  # refuses labels above 63 characters
        return bool(_ADDRESS.fullmatch(text) and host and parts.port != 0)
    except ValueError:
        return False


def server_addresses(name: str) -> tuple[str, ...]:
    """Addresses of the servers that are named, without the path ``/v1``."""
    given = (each.strip().rstrip("/") for each in name.split(","))
    return tuple(dict.fromkeys(each.removesuffix("/v1").rstrip("/") for each in given))


TRANSFORMERS = EngineFacts(
    "its continuous batching",
    make=f"{_HERE}.transformers_engine:transformers_engine",
    needs_whole_weights=True,
    same_model=True,
)
VLLM = EngineFacts(
    "which the run starts beside itself",
    make=f"{_HERE}.vllm_server:vllm_engine",
    start=f"{_HERE}.vllm_server:start_vllm",
    check_options=f"{_HERE}.checks:check_vllm",
    in_process=False,
    takes_adapter=True,
    same_model=True,
    can_run_ahead=True,
    gives_up=True,
)
SERVERS = EngineFacts(
    "servers (vLLM, SGLang or `dschat-lora serve`) that take adapters at run time, by their "
    "addresses with commas between them, such as http://127.0.0.1:8000",
    values="servers",
    hint="or addresses of servers such as http://127.0.0.1:8000, with commas between them (vLLM, "
    "SGLang or `dschat-lora serve`)",
    takes=lambda name: all(map(is_address, server_addresses(name))),
    make=f"{_HERE}.server_engine:engine_of_addresses",
    check_options=f"{_HERE}.checks:check_servers",
    in_process=False,
    takes_adapter=True,
    same_model=True,
    can_run_ahead=True,
    gives_up=True,
)


def servers(name: str) -> EngineFacts:
    """Of all addresses the same."""
    return SERVERS
