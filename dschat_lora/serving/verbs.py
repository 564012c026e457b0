"""The command lines of ``dschat-lora chat`` and ``dschat-lora serve``."""

from collections.abc import Sequence
from typing import TypeVar

from dschat_lora.config.options import parse_config
from dschat_lora.runtime.stage_main import late
from dschat_lora.serving.address import listen
from dschat_lora.serving.config import AnswerConfig, ChatConfig, ServeConfig
from dschat_lora.serving.sources import check_answering, votes_path

ConfigT = TypeVar("ConfigT", bound=AnswerConfig)
_CHAT_EXAMPLES = """examples:
  dschat-lora chat output/sft
  dschat-lora chat base output/sft output/rlhf --reward output/reward
  dschat-lora chat output/sft --temperature 0 --system "Answer in one word."
"""
_SERVE = """Serve models over HTTP on this machine: OpenAI's interface under /v1, and a page at /
where base and models answer side by side."""
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
        description="Chat with a model in the terminal; of several each answers in turn.",
        program="dschat-lora chat OUT [OUT2 ...]",
        examples=_CHAT_EXAMPLES,
    )
    late("serving.chat:run_chat")(config)


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
    _require_server()
    with listen(config.host, config.port) as listening:  # before anything heavy is loaded
        late("serving.server:run_server")(config, votes, listening)


def _checked(
    config_class: type[ConfigT],
    argv: Sequence[str],
    *,
    description: str,
    program: str,
    examples: str,
) -> ConfigT:
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
    check_answering(config)
    return config


def _require_server() -> None:
    from importlib.util import find_spec

    lacking = [name for name in ("starlette", "uvicorn") if find_spec(name) is None]
    if lacking:
        raise ValueError(
            f"dschat-lora serve needs {' and '.join(lacking)}: pip install 'dschat_lora[serve]'"
        )
