"""The command lines of ``dschat-lora chat`` and ``dschat-lora serve``."""

import importlib.util
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

from dschat_lora.addons.serving.config import AnswerConfig, ChatConfig, ServeConfig, find_models
from dschat_lora.addons.serving.endpoint.sockets import listen
from dschat_lora.config.options import parse_config
from dschat_lora.config.staging import check_within
from dschat_lora.data.templates import read_chat_template
from dschat_lora.runtime.checks import find_of_kind, settled_base_bits
from dschat_lora.runtime.directory import check_can_be_made
from dschat_lora.runtime.stage_main import late

ConfigT = TypeVar("ConfigT", bound=AnswerConfig)
_CHAT_EXAMPLES = """examples:
  dschat-lora chat output/sft
  dschat-lora chat base output/sft output/rlhf --reward output/reward
  dschat-lora chat output/sft --temperature 0 --system "Answer in one word."
"""
_SERVE = """Serve models over HTTP on this machine: OpenAI's API under /v1, and a page at / that
compares the answers of the base and the models."""
_SERVE_EXAMPLES = """examples:
  dschat-lora serve output/sft
  dschat-lora serve output/sft output/dpo --reward output/reward --votes v.jsonl
  dschat-lora serve output/sft --host 0.0.0.0 --token SECRET
"""


def chat(argv: Sequence[str]) -> None:
    """Run ``dschat-lora chat``."""
    config = _checked(
        ChatConfig,
        argv,
        description="Chat with a model in the terminal; several models answer in turn.",
        program="dschat-lora chat OUT [OUT2 ...]",
        examples=_CHAT_EXAMPLES,
    )
    late("addons.serving.chat:run_chat")(config)


def serve(argv: Sequence[str]) -> None:
    """Run ``dschat-lora serve``."""
    config = _checked(
        ServeConfig,
        argv,
        description=_SERVE,
        program="dschat-lora serve OUT [OUT2 ...]",
        examples=_SERVE_EXAMPLES,
    )
    votes = votes_path(config)
    lacking = [name for name in ("starlette", "uvicorn") if importlib.util.find_spec(name) is None]
    if lacking:
        raise ValueError(
            f"dschat-lora serve needs {' and '.join(lacking)}: pip install 'dschat_lora[serving]'"
        )
    with listen(config.host, config.port) as listening:  # before anything heavy is loaded
        late("addons.serving.server:run_server")(config, votes, listening)


def _checked(
    config_class: type[ConfigT],
    argv: Sequence[str],
    *,
    description: str,
    program: str,
    examples: str,
) -> ConfigT:
    """The options; models that are not there, or of the wrong kind, are refused."""
    try:
        config = parse_config(
            config_class,
            argv,
            description=description,
            program=program,
            examples=examples,
            positionals=("models",),
        )
    except ValueError as error:
        message = str(error).replace("--models is required", "OUT is missing: name a run")
        raise ValueError(message) from error
    for each in find_models(config.models, with_base=True):
        settled_base_bits(config.loading.base_bits, each.source)
    if config.reward is not None:
        find_of_kind(config.reward, ("SEQ_CLS",), option="--reward")
    if config.loading.chat_template is not None:
        read_chat_template(config.loading.chat_template)
    return config


def votes_path(config: ServeConfig) -> Path:
    """The file of ``--votes``.

    Raises:
        ValueError: if it cannot be made, or is a link out of the directory of a run.
    """
    if config.votes is not None:
        path = Path(config.votes).expanduser()
        if path.is_symlink():  # the user's own
            path = Path(os.path.realpath(path))
    else:
        first = Path(config.models[0]).expanduser()
        path = (first if first.is_dir() else Path()) / "votes.jsonl"
    check_within(path, path.parent)
    if path.is_dir():
        raise ValueError(f"--votes {path} is a directory; give a file")
    check_can_be_made(path.parent, option="votes")
    return path
