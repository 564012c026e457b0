"""The command line of ``dschat-lora tinker``."""

import importlib.util
import os
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path

from dschat_lora.addons.serving.endpoint.sockets import listen
from dschat_lora.addons.tinker.config import TinkerConfig
from dschat_lora.commands.train import launched
from dschat_lora.config.options import parse_config
from dschat_lora.engine import failure_detection
from dschat_lora.models.source import ModelSource, find_model
from dschat_lora.runtime.directory import check_can_be_made
from dschat_lora.runtime.stage_main import late

_EXAMPLES = """examples:
  dschat-lora tinker base
  dschat-lora tinker Qwen/Qwen3-4B --state_dir runs
  dschat-lora tinker Qwen/Qwen3-4B --host 0.0.0.0 --token tml-SECRET
  dschat-lora tinker Qwen/Qwen3-4B --num_gpus 8 --zero_stage 2

The service runs in one process; --num_gpus N starts N on this machine by DeepSpeed's launcher."""


def checked(argv: Sequence[str]) -> tuple[TinkerConfig, Mapping[str, ModelSource]]:
    """The options, and each base by its word on the command line.

    Raises:
        ValueError: naming what is wrong.
    """
    try:
        config = parse_config(
            TinkerConfig,
            argv,
            description="Serve the Tinker API on this machine: train and sample adapters.",
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
    return config, sources


def serve(argv: Sequence[str]) -> None:
    """Serve; call in each process of a launch."""
    failure_detection.join()
    config, sources = checked(argv)
    serves = os.environ.get("RANK", "0") == "0"
    # Before anything heavy is loaded.
    with listen(config.host, config.port) if serves else nullcontext() as listening:
        failure_detection.wait_until_all_are_ready()
        late("addons.tinker.server:run_server")(config, sources, listening)


def tinker(argv: list[str]) -> None:
    """Run ``dschat-lora tinker`` in this process, or in those that its options ask for."""
    launched("tinker", checked, serve, argv)
