"""Options of ``dschat-lora tinker``."""

from dataclasses import dataclass
from typing import Literal

from dschat_lora.addons.serving.config import check_address
from dschat_lora.config.groups import ModelConfig, require, require_numbers
from dschat_lora.config.options import option

KEY_PREFIX = "tml-"  # without which the client does not take a key


@dataclass(frozen=True)
class TinkerConfig:
    """Train and sample adapters over the Tinker API, on this machine."""

    models: tuple[str, ...] = option(
        help="BASE ...: base models, as hub names or directories; `base` is the bundled one"
    )
    host: str = option("127.0.0.1", help="address to listen on; any but this one needs --token")
    port: int = option(8000, help="port to listen on; 0: a free one")
    token: str | None = option(
        None, help="what clients must have as TINKER_API_KEY; begins with tml-, as their keys do"
    )
    state_dir: str = option(
        "output/tinker", help="where runs, their states and saved weights are kept"
    )
    state_every: int = option(
        1,
        help="steps of a run after which its state is written; a service that was killed computes "
        "anew what came since, to the same bits",
    )
    dtype: Literal["auto", "fp32", "bf16"] = option(
        "auto", help="compute type; auto: bf16 on GPUs that have it, else fp32"
    )
    base_bits: Literal[16, 4] | None = option(
        None, help="bits of the base's weights: 16, or 4 (NF4, needs dschat_lora[qlora])"
    )
    attn_implementation: Literal["auto", "sdpa", "eager"] = option(
        "auto", help="attention kernel of transformers; auto: sdpa where it has it, else eager"
    )
    trust_remote_code: bool = option(False, help="run model code that comes with a hub repository")
    gradient_checkpointing: bool = option(
        False, help="compute blocks again in the backward pass, in the place of keeping them"
    )
    max_adapters: int = option(
        16, help="adapters in memory, of runs and of samplers each; others wait on disk"
    )
    max_queue: int = option(4096, help="requests that may wait; further ones are refused (429)")
    max_batch_size: int = option(64, help="answers decoded at a time, by each process")
    tokens_per_device: int = option(
        16384, help="tokens of a forward and backward pass of a process, at most"
    )

    zero_stage: Literal[0, 1, 2] = option(
        0,
        help="ZeRO, with --num_gpus above 1: 1 shards optimizer states over processes, 2 gradients "
        "too",
    )

    def __post_init__(self) -> None:
        require(bool(self.models), "models", "nothing", "a base model or more")
        require_numbers(self, ">= 1", "max_adapters", "max_queue", "max_batch_size")
        require_numbers(self, ">= 1", "tokens_per_device", "state_every")
        if self.token is not None:
            allowed = "visible ASCII without spaces that begins with tml-"
            require(self.token.startswith(KEY_PREFIX), "token", "this", allowed)
        check_address(self.host, self.port, self.token, example="tml-SECRET")

    @property
    def model(self) -> ModelConfig:
        """Options of loading a base."""
        return ModelConfig(
            dtype=self.dtype,
            base_bits=self.base_bits,
            attn_implementation=self.attn_implementation,
            trust_remote_code=self.trust_remote_code,
        )
