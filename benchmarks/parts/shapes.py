"""Models of a published size with random weights, and random samples to feed them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import OPTConfig

from dschat_lora.algos.sft import IGNORE_INDEX
from dschat_lora.config import LoraConfig, ModelConfig
from dschat_lora.data.batch import Batch, SampleCollator
from dschat_lora.data.packing import make_rows
from dschat_lora.data.tokenize import Sample
from dschat_lora.lora.model import apply_lora
from dschat_lora.models.causal_lm import load_causal_lm

PAD_ID = 1
SEED = 0


@dataclass(frozen=True)
class Shape:
    """An OPT decoder, its adapter, and the micro-batch it is measured on."""

    hidden_size: int
    num_layers: int
    num_heads: int
    ffn_size: int
    vocab_size: int
    positions: int
    lora_dim: int
    rows: int  # packed rows of a micro-batch
    row_length: int  # tokens a packed row may hold
    max_sample: int  # tokens of the longest sample


SHAPES = {
    "opt-1.3b": Shape(2048, 24, 32, 8192, 50272, 2048, 128, 8, 2048, 512),
    "opt-6.7b": Shape(4096, 32, 32, 16384, 50272, 2048, 128, 4, 2048, 512),
}
TINY = {
    "opt-1.3b": Shape(64, 2, 4, 256, 512, 128, 8, 2, 128, 32),
    "opt-6.7b": Shape(96, 3, 4, 384, 512, 128, 8, 2, 128, 32),
}


def random_model(shape: Shape, *, dtype: torch.dtype, device: torch.device) -> Any:
    """The model with its adapter on ``device``, weights drawn there; no file is touched."""
    config = OPTConfig(
        hidden_size=shape.hidden_size,
        word_embed_proj_dim=shape.hidden_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        ffn_dim=shape.ffn_size,
        vocab_size=shape.vocab_size,
        max_position_embeddings=shape.positions,
        dropout=0.0,
        attention_dropout=0.0,
        layerdrop=0.0,
    )
    model: Any = load_causal_lm("random weights", config, ModelConfig(), dtype=dtype, meta=True)
    assert not list(model.buffers()), "to_empty() leaves buffers undefined"
    model.to_empty(device=device)
    model.tie_weights()
    _fill_(model)
    apply_lora(model, LoraConfig(lora_dim=shape.lora_dim), seed=SEED)
    return model


@torch.no_grad()
def _fill_(model: nn.Module) -> None:
    """Weights from N(0, 0.02^2), biases 0, norms 1: as a new OPT begins."""
    torch.manual_seed(SEED)
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if name == "bias":
                parameter.zero_()
            elif isinstance(module, nn.LayerNorm):
                parameter.fill_(1.0)
            else:
                parameter.normal_(std=0.02)


def packed(shape: Shape) -> tuple[list[Sample], Batch]:
    """Samples of ragged lengths, and the one micro-batch of rows that holds them all.

    Lengths are log-normal, their median a quarter of the longest.
    """
    generator = np.random.default_rng(SEED)
    drawn = generator.lognormal(np.log(shape.max_sample / 4), 0.8, size=64 * shape.rows)
    lengths = drawn.clip(4, shape.max_sample).astype(np.int64)
    rows = make_rows(lengths, max_seq_len=shape.row_length, packing=True, seed=SEED)
    samples = [
        [_sample(int(lengths[index]), shape.vocab_size, generator) for index in row]
        for row in rows[: shape.rows]
    ]
    return [sample for row in samples for sample in row], SampleCollator(PAD_ID)(samples)


def padded(samples: Sequence[Sample], shape: Shape) -> list[Batch]:
    """A row for each sample, all as long as the longest may be: DeepSpeed-Chat's layout.

    Micro-batches have about as many positions as the packed one.
    """
    size = shape.rows * shape.row_length // shape.max_sample
    groups = [samples[first : first + size] for first in range(0, len(samples), size)]
    return [
        SampleCollator(PAD_ID, multiple_of=shape.max_sample)([[sample] for sample in group])
        for group in groups
    ]


def equal_lengths(shape: Shape) -> Batch:
    """As many tokens as packed rows can hold, a row for each sample of the longest length."""
    generator = np.random.default_rng(SEED)
    count = shape.rows * shape.row_length // shape.max_sample
    rows = [[_sample(shape.max_sample, shape.vocab_size, generator)] for _ in range(count)]
    return SampleCollator(PAD_ID)(rows)


def _sample(length: int, vocab_size: int, generator: np.random.Generator) -> Sample:
    """Random tokens; the loss is on the second half."""
    ids = generator.integers(4, vocab_size, size=length).astype(np.int32)
    answer = np.arange(length) >= length // 2
    return Sample(ids, np.where(answer, ids, np.int32(IGNORE_INDEX)))
