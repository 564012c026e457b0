"""Base models, which all adapters share."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from dschat_lora.config.groups import LoraConfig, ModelConfig
from dschat_lora.engine.build import DTYPES, resolve_dtype
from dschat_lora.engine.distributed import device
from dschat_lora.generation.generate import check_cache
from dschat_lora.lora.model import adapter_parameters
from dschat_lora.lora.targets import choose_targets
from dschat_lora.models.build import AdaptedModel, build_causal_lm
from dschat_lora.models.loading import (
    PreTrainedModel,
    Tokenizer,
    end_ids,
    load_causal_lm,
    load_config,
    load_tokenizer,
)
from dschat_lora.models.source import ModelSource

LORA_ALPHA = 32.0  # the update is scaled by it over the rank, so that one rate fits all ranks
_ATTENTION = re.compile(r"attn|attention", re.IGNORECASE)


@dataclass(frozen=True)
class Adapting:
    """Which layers of a base train, and of what rank."""

    rank: int
    seed: int = 0
    train_attn: bool = True
    train_mlp: bool = True
    train_unembed: bool = True


@dataclass(frozen=True, eq=False)
class Base:
    """A model whose weights no request changes, and its tokenizer.

    Attributes:
        name: that requests know it by.
        limit: most tokens of a sequence.
    """

    name: str
    source: ModelSource
    model: PreTrainedModel
    tokenizer: Tokenizer
    options: ModelConfig
    limit: int
    recomputes: bool
    attention: tuple[str, ...]  # layers, by whole name
    others: tuple[str, ...]
    head: str

    @property
    def end_ids(self) -> frozenset[int]:
        """Tokens that end an answer."""
        return frozenset(end_ids(self.tokenizer))

    @property
    def pad_id(self) -> int:
        """Any token, which masks hide."""
        return int(self.tokenizer.pad_token_id)

    @property
    def vocabulary_size(self) -> int:
        """Tokens are below it."""
        return int(self.model.get_input_embeddings().num_embeddings)

    def lora_of(self, how: Adapting) -> LoraConfig:
        """The options of an adapter.

        Raises:
            ValueError: if nothing would train, or the rank does not fit.
        """
        width = int(self.model.get_input_embeddings().embedding_dim)
        if not 1 <= how.rank <= width:
            raise ValueError(
                f"lora_config.rank must be from 1 to {width}, the width of {self.name}, got "
                f"{how.rank}"
            )
        chosen = [
            *(self.attention if how.train_attn else ()),
            *(self.others if how.train_mlp else ()),
            *((self.head,) if how.train_unembed else ()),
        ]
        if not chosen:
            raise ValueError(
                "lora_config trains nothing: train_mlp, train_attn and train_unembed are all false"
            )
        return LoraConfig(lora_dim=how.rank, lora_alpha=LORA_ALPHA, target_modules=tuple(chosen))

    def adapted(
        self, lora: LoraConfig, *, seed: int = 0, tensors: Mapping[str, Tensor] | None = None
    ) -> AdaptedModel:
        """Another model on the same weights, with an adapter that is new or has these values."""
        adapted = build_causal_lm(
            self.source,
            self.tokenizer,
            self.options,
            lora,
            dtype=self.model.dtype,
            seed=seed,
            meta=False,
            base=self.model,
        )
        adapted.model.to(self.model.device).eval()
        if tensors is not None:
            copy_values(adapter_parameters(adapted.model), tensors)
        return adapted


def open_base(name: str, source: ModelSource, options: ModelConfig, *, recomputes: bool) -> Base:
    """Load a base.

    Raises:
        ValueError: if it cannot be loaded, or trained in its type.
    """
    if source.adapter is not None:
        raise ValueError(
            f"{name} is an adapter: name its base, or merge it first (dschat-lora merge)"
        )
    dtype = resolve_dtype(options.dtype)
    if dtype == "fp16":
        raise ValueError("--dtype fp16 needs loss scaling, which is not built here: bf16 or fp32")
    config = load_config(source.base, options)
    model = load_causal_lm(source.base, config, options, dtype=DTYPES[dtype], meta=False)
    model = model.requires_grad_(False).to(device()).eval()
    check_cache(model)
    tokenizer = load_tokenizer(source.tokenizer, options)
    linear = choose_targets(model, LoraConfig(lora_dim=1))
    heads = [n for n, m in model.named_modules() if m is model.get_output_embeddings()]
    return Base(
        name,
        source,
        model,
        tokenizer,
        options,
        limit=int(getattr(model.config, "max_position_embeddings", None) or 2**31),
        recomputes=recomputes,
        attention=tuple(each for each in linear if _ATTENTION.search(each)),
        others=tuple(each for each in linear if not _ATTENTION.search(each)),
        head=heads[0],
    )


def copy_values(parameters: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    """Copy values over the parameters of the same names.

    Raises:
        ValueError: if names or shapes differ.
    """
    shapes = {name: tuple(each.shape) for name, each in parameters.items()}
    if shapes != {name: tuple(each.shape) for name, each in values.items()}:
        raise ValueError("the weights are those of an adapter of other layers or another rank")
    with torch.no_grad():
        for name, value in values.items():
            parameters[name].copy_(value)
