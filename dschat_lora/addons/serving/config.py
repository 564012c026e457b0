"""Options of ``dschat-lora chat`` and ``dschat-lora serve``, and the models that they name."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from dschat_lora.checkpoint.history import CHECKPOINTS
from dschat_lora.config.addons import addon_options
from dschat_lora.config.groups import require, require_numbers
from dschat_lora.config.options import group, option
from dschat_lora.config.stages import InferenceConfig
from dschat_lora.models.source import ModelSource, find_model
from dschat_lora.runtime.checks import find_of_kind

BASE = "base"
# Directories in a run's whose parent has the run's name.
_INNER = ("adapter", "model", "actor")


# Names of this machine that only itself can reach.
LOCAL_HOSTS = ("127.0.0.1", "localhost", "::1")


def check_address(host: str, port: int, token: str | None, *, example: str) -> None:
    """Refuse what no server can listen on, and to let others in without a token.

    ``example`` is one, which the refusal names.
    """
    require(bool(host), "host", "''", "an address or a name")
    require(0 <= port < 65536, "port", port, "in [0, 65535]")
    if token is not None:
        visible = token.isascii() and token.isprintable() and " " not in token
        require(bool(token) and visible, "token", "this", "visible ASCII, no spaces")
    if host not in LOCAL_HOSTS and token is None:
        raise ValueError(
            f"--host {host} is reachable from other machines: also give --token {example}, which "
            "requests must then send"
        )


@dataclass(frozen=True)
class AnswerConfig:
    """Which models answer, and how by default."""

    models: tuple[str, ...] = option(
        help="OUT ...: output directories of runs, adapters, model directories, hub names, or "
        "`base`: the base model of the others, or the bundled model if there are none"
    )
    reward: str | None = option(
        None, help="output directory of a reward model, which scores the answers"
    )
    temperature: float = option(0.7, help="sampling temperature; 0: greedy")
    top_p: float = option(
        1.0, help="sample from the most likely tokens with this total probability"
    )
    top_k: int = option(0, help="sample from this many most likely tokens; 0: all")
    max_new_tokens: int = option(
        256, help="maximum number of tokens of an answer, if the request does not set it"
    )
    max_seq_len: int = option(
        0, help="maximum number of tokens of prompt and answer together; 0: the model's positions"
    )
    prefix_cache: bool = option(
        True, help="reuse the KV cache of finished answers for prompts with the same prefix"
    )
    loading: InferenceConfig = group(InferenceConfig)
    addons: Any = group(addon_options("serve"))

    def __post_init__(self) -> None:
        require(bool(self.models), "models", "nothing", "an output directory or more")
        require_numbers(self, ">= 1e-06, or 0 (greedy)", "temperature")
        require_numbers(self, ">= 0", "top_k", "max_seq_len")
        require(0 < self.top_p <= 1, "top_p", self.top_p, "in (0, 1]")
        require_numbers(self, ">= 1", "max_new_tokens")

    @property
    def takes_adapters(self) -> bool:
        """Whether adapters may come while others answer."""
        return False


@dataclass(frozen=True)
class ChatConfig(AnswerConfig):
    """Chat with a model in the terminal; of several each answers in turn."""

    system: str | None = option(None, help="system prompt")
    seed: int | None = option(None, help="random seed of sampling; default: a new one each time")
    addons: Any = group(addon_options("chat"))


@dataclass(frozen=True)
class ServeConfig(AnswerConfig):
    """Serve models over HTTP: OpenAI's interface under /v1, and a page at /."""

    host: str = option(
        "127.0.0.1", help="address to listen on; any other than this one needs --token"
    )
    port: int = option(8000, help="port to listen on; 0: a free one")
    token: str | None = option(
        None, help="token that requests must send as `Authorization: Bearer TOKEN`"
    )
    votes: str | None = option(
        None, help="file that votes are appended to; default: votes.jsonl in the first OUT"
    )
    max_batch_size: int = option(32, help="maximum number of requests decoded at a time")
    max_queue: int = option(
        256, help="maximum number of waiting requests; further ones are rejected (429)"
    )
    allow_runtime_lora_updating: bool = option(
        False,
        help="serve /v1/load_lora_adapter and /v1/unload_lora_adapter, as vLLM does; clients can "
        "then load any directory of this machine as an adapter",
    )
    max_loras: int = option(
        8,
        help="maximum number of adapters kept by --allow_runtime_lora_updating; a further one "
        "replaces the least recently used",
    )
    logprobs_mode: Literal["raw_logprobs", "processed_logprobs"] = option(
        "raw_logprobs",
        help="raw_logprobs: log-probabilities of the model, at temperature 1; processed_logprobs: "
        "of the sampling distribution, after temperature, top-k and top-p",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_address(self.host, self.port, self.token, example="TOKEN")
        require_numbers(self, ">= 1", "max_batch_size", "max_loras")
        require_numbers(self, ">= 0", "max_queue")

    @property
    def takes_adapters(self) -> bool:
        return self.allow_runtime_lora_updating


@dataclass(frozen=True)
class NamedSource:
    """A model and the name that requests know it by."""

    name: str
    source: ModelSource


def find_models(words: Sequence[str], *, with_base: bool) -> list[NamedSource]:
    """The models behind the words of a command line, the base first if it is asked for.

    A name is the run directory's, with ``-2``, ... where an earlier one has it.

    Raises:
        ValueError: if one is not there, or is no language model.
    """
    others = []
    for word in words:
        if word != BASE:
            actor = Path(word).expanduser() / "actor"
            inner = str(actor) if actor.is_dir() else word
            others.append((word, find_of_kind(inner, ("CAUSAL_LM",), option="OUT")))
    first = others[0][1] if others else find_model(None)
    sources: dict[str, ModelSource] = {}
    if BASE in words or (with_base and first.adapter is not None):
        sources[BASE] = ModelSource(first.base)
    for word, source in others:
        name = model_name(word)
        numbered = (f"{name}-{number}" for number in range(2, len(others) + 3))
        free = next(each for each in (name, *numbered) if each not in sources)
        sources[free] = source
    return [NamedSource(name, source) for name, source in sources.items()]


def model_name(word: str) -> str:
    """The name of the run that a word of the command line leads to."""
    path = Path(word).expanduser()
    if not path.is_dir():
        return path.name  # of a hub name
    path = path.resolve()
    while path.name in _INNER and path.parent.name:
        path = path.parent
    if path.parent.name == CHECKPOINTS:
        return f"{path.parents[1].name}-{path.name}"
    return path.name
