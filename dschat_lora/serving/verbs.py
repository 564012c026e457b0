"""The command lines of ``dschat-lora chat`` and ``dschat-lora serve``."""

from collections.abc import Sequence

from dschat_lora.config.options import fail, parse_config
from dschat_lora.report.terminal import error_message, silence_stdout
from dschat_lora.serving.config import ChatConfig, ServeConfig
from dschat_lora.serving.sources import check_answering, votes_path

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
    try:
        config = parse_config(
            ChatConfig,
            argv,
            description="Chat with a model in the terminal; of several each answers in turn.",
            program="dschat-lora chat OUT [OUT2 ...]",
            examples=_CHAT_EXAMPLES,
            positionals=("models",),
        )
        check_answering(config)

        from dschat_lora.serving.chat import run_chat  # heavy

        run_chat(config)
    except BrokenPipeError:
        silence_stdout()
    except KeyboardInterrupt:
        fail("stopped", code=130)
    except (ValueError, OSError) as error:
        _fail(error)


def serve(argv: Sequence[str]) -> None:
    """Run ``dschat-lora serve``."""
    try:
        config = parse_config(
            ServeConfig,
            argv,
            description=_SERVE,
            program="dschat-lora serve OUT [OUT2 ...]",
            examples=_SERVE_EXAMPLES,
            positionals=("models",),
        )
        check_answering(config)
        votes = votes_path(config)
        _require_server()

        from dschat_lora.serving.server import run_server  # heavy

        run_server(config, votes)
    except KeyboardInterrupt:
        fail("stopped", code=130)
    except (ValueError, OSError) as error:
        _fail(error)


def _require_server() -> None:
    from importlib.util import find_spec

    lacking = [name for name in ("starlette", "uvicorn") if find_spec(name) is None]
    if lacking:
        raise ValueError(
            f"dschat-lora serve needs {' and '.join(lacking)}: pip install 'dschat_lora[serve]'"
        )


def _fail(error: ValueError | OSError) -> None:
    message = error_message(error).replace("--models is required", "OUT is missing: name a run")
    fail(message, code=1 if isinstance(error, OSError) else 2)
