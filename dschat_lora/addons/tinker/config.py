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
        help="BASE ...: base models: hub names, directories, or `base`, the bundled one"
    )
    host: str = option(
        "127.0.0.1", help="address to listen on; any other than this one needs --token"
    )
    port: int = option(8000, help="port to listen on; 0: a free one")
    token: str | None = option(
        None, help="token that clients set as TINKER_API_KEY; it must begin with tml-"
    )
    state_dir: str = option(
        "output/tinker", help="directory for runs, their states and saved weights"
    )
    state_every: int = option(
        1,
        help="steps between writes of a run's state; a service that was killed recomputes the "
        "steps since then, bit for bit",
    )
    dtype: Literal["auto", "fp32", "bf16"] = option(
        "auto", help="compute dtype; auto: bf16 on GPUs that support it, else fp32"
    )
    base_bits: Literal[16, 4] | None = option(
        None, help="bits of the base weights: 16, or 4 (NF4, needs dschat_lora[qlora])"
    )
    attn_implementation: Literal["auto", "sdpa", "eager"] = option(
        "auto",
        help="attention implementation of transformers; auto: sdpa if the model supports it, else "
        "eager",
    )
    trust_remote_code: bool = option(False, help="allow running model code from a hub repository")
    gradient_checkpointing: bool = option(
        False, help="recompute activations in the backward pass to save memory"
    )
    max_adapters: int = option(
        16,
        help="maximum number of adapters in memory, for runs and for samplers each; others are "
        "kept on disk",
    )
    max_queue: int = option(
        4096, help="maximum number of waiting requests; further ones are rejected (429)"
    )
    max_batch_size: int = option(64, help="answers decoded at a time per process")
    tokens_per_device: int = option(
        16384, help="maximum number of tokens per process in a forward and backward pass"
    )

    zero_stage: Literal[0, 1, 2] = option(
        0,
        help="ZeRO stage, with --num_gpus above 1: 1 shards optimizer states over processes, 2 "
        "also gradients",
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
