"""The command line of ``dschat-lora tinker``."""

import importlib.util
from collections.abc import Sequence
from pathlib import Path

from dschat_lora.config.options import parse_config
from dschat_lora.endpoint.sockets import listen
from dschat_lora.models.source import find_model
from dschat_lora.runtime.directory import check_can_be_made
from dschat_lora.runtime.stage_main import late
from dschat_lora.tinker.config import TinkerConfig

_EXAMPLES = """examples:
  dschat-lora tinker base
  dschat-lora tinker Qwen/Qwen3-4B --state_dir runs
  dschat-lora tinker Qwen/Qwen3-4B --host 0.0.0.0 --token tml-SECRET
"""


def tinker(argv: Sequence[str]) -> None:
    """Run ``dschat-lora tinker``."""
    try:
        config = parse_config(
            TinkerConfig,
            argv,
            description="Train and sample adapters over the Tinker API, on this machine.",
            program="dschat-lora tinker BASE [BASE2 ...]",
            examples=_EXAMPLES,
            positionals=("models",),
        )
    except ValueError as error:
        message = str(error).replace("--models is required", "BASE is missing: name a model")
        raise ValueError(message) from error
    sources = {word: find_model(None if word == "base" else word) for word in config.models}
    for word, source in sources.items():
        if source.adapter is not None:
            raise ValueError(f"BASE {word} is an adapter: name its base, or merge it first")
    check_can_be_made(Path(config.state_dir).expanduser(), option="state_dir")
    lacking = [
        name
        for name in ("starlette", "uvicorn", "tinker")
        if importlib.util.find_spec(name) is None
    ]
    if lacking:
        raise ValueError(
            f"dschat-lora tinker needs {' and '.join(lacking)}: pip install 'dschat_lora[tinker]'"
        )
    with listen(config.host, config.port) as listening:  # before anything heavy is loaded
        late("tinker.server:run_server")(config, sources, listening)
