"""Options of ``dschat-lora chat`` and ``dschat-lora serve``."""

from dataclasses import dataclass

from dschat_lora.config.groups import require, require_numbers
from dschat_lora.config.options import group, option
from dschat_lora.config.stages import InferenceConfig

LOCAL_HOSTS = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True)
class AnswerConfig:
    """Which models answer, and how by default."""

    models: tuple[str, ...] = option(
        help="OUT ...: output directories of runs, adapters, model directories, hub names, or "
        "`base`, the base of the others or else the bundled model"
    )
    reward: str | None = option(None, help="output directory of a reward model: scores answers")
    temperature: float = option(0.7, help="of sampling; 0 takes the most probable token")
    top_p: float = option(1.0, help="draw from the most probable tokens up to this sum")
    top_k: int = option(0, help="draw from so many of the most probable tokens; 0: from all")
    max_new_tokens: int = option(256, help="most tokens of an answer, where none are asked for")
    max_seq_len: int = option(
        0, help="most tokens of prompt and answer; 0: as many as the model has positions"
    )
    loading: InferenceConfig = group(InferenceConfig)

    def __post_init__(self) -> None:
        require(bool(self.models), "models", "nothing", "an output directory or more")
        require_numbers(self, ">= 1e-06, or 0 (greedy)", "temperature")
        require_numbers(self, ">= 0", "top_k", "max_seq_len")
        require(0 < self.top_p <= 1, "top_p", self.top_p, "in (0, 1]")
        require_numbers(self, ">= 1", "max_new_tokens")


@dataclass(frozen=True)
class ChatConfig(AnswerConfig):
    """Chat with a model in the terminal; of several each answers in turn."""

    system: str | None = option(None, help="system prompt")
    seed: int | None = option(None, help="of sampling; another one each time when absent")


@dataclass(frozen=True)
class ServeConfig(AnswerConfig):
    """Serve models over HTTP: OpenAI's interface under /v1, and a page at /."""

    host: str = option("127.0.0.1", help="address to listen on; any but this one needs --token")
    port: int = option(8000, help="port to listen on; 0: a free one")
    token: str | None = option(
        None, help="what requests must carry as `Authorization: Bearer TOKEN`"
    )
    votes: str | None = option(
        None, help="file that votes are appended to; default: votes.jsonl in the first OUT"
    )
    max_batch_size: int = option(32, help="requests decoded at a time")
    max_queue: int = option(256, help="requests that may wait; further ones are refused (429)")

    def __post_init__(self) -> None:
        super().__post_init__()
        require(bool(self.host), "host", "''", "an address or a name")
        require(0 <= self.port < 65536, "port", self.port, "in [0, 65535]")
        require_numbers(self, ">= 1", "max_batch_size")
        require_numbers(self, ">= 0", "max_queue")
        if self.token is not None:
            visible = self.token.isascii() and self.token.isprintable() and " " not in self.token
            require(bool(self.token) and visible, "token", "this", "visible ASCII, no spaces")
        if self.host not in LOCAL_HOSTS and self.token is None:
            raise ValueError(
                f"--host {self.host} lets other machines in: give --token TOKEN too, which "
                "requests must then carry"
            )
