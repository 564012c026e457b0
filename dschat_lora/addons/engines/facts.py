"""What each engine says of itself, and the addresses of servers."""

from dschat_lora.rl.options.engines import EngineFacts
from dschat_lora.rl.options.names import is_address

_HERE = "dschat_lora.addons.engines"


def server_addresses(name: str) -> tuple[str, ...]:
    """Addresses of the servers that are named, without the path ``/v1``."""
    given = (each.strip().rstrip("/") for each in name.split(","))
    return tuple(dict.fromkeys(each.removesuffix("/v1").rstrip("/") for each in given))


VLLM = EngineFacts(
    "which the run starts itself",
    make=f"{_HERE}.vllm_server:vllm_engine",
    start=f"{_HERE}.vllm_server:start_vllm",
    check_options=f"{_HERE}.checks:check_vllm",
    in_process=False,
    takes_adapter=True,
    same_model=True,
    can_run_ahead=True,
)
SERVERS = EngineFacts(
    "the comma-separated addresses of servers (vLLM, SGLang or `dschat-lora serve`) that load "
    "adapters at run time, such as http://127.0.0.1:8000",
    values="servers",
    hint="or comma-separated addresses of servers such as http://127.0.0.1:8000 (vLLM, SGLang or "
    "`dschat-lora serve`)",
    takes=lambda name: all(map(is_address, server_addresses(name))),
    make=f"{_HERE}.server_engine:engine_of_addresses",
    check_options=f"{_HERE}.checks:check_servers",
    in_process=False,
    takes_adapter=True,
    same_model=True,
    can_run_ahead=True,
)


def servers(name: str) -> EngineFacts:
    """Of all addresses the same."""
    return SERVERS
