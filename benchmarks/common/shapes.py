"""Models of a published size with random weights, and random samples to feed them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import (
    LlamaConfig,
    OPTConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from dschat_lora.algos.logprobs import IGNORE_INDEX
from dschat_lora.config.groups import LoraConfig, ModelConfig
from dschat_lora.data.batch import Batch, SampleCollator
from dschat_lora.data.packing import PackedRows, make_rows
from dschat_lora.data.samples import SequenceSample
from dschat_lora.lora import nf4
from dschat_lora.lora.collectives import TensorGroup
from dschat_lora.lora.layers import is_quantized, state_of
from dschat_lora.lora.model import apply_lora, replace_part
from dschat_lora.models.loading import load_causal_lm

PAD_ID = 1
SEED = 0


@dataclass(frozen=True)
class Shape:
    """A decoder, its adapter, and the rows it is measured on."""

    hidden_size: int
    num_layers: int
    num_heads: int
    ffn_size: int
    vocab_size: int
    positions: int
    lora_dim: int
    rows: int  # packed rows of an optimizer step
    row_length: int  # tokens a packed row may hold
    max_sample: int  # tokens of the longest sample
    architecture: Literal["opt", "llama", "qwen2", "qwen3", "qwen3_moe"] = "opt"
    kv_heads: int | None = None  # fewer than heads where queries share keys
    head_size: int | None = None  # where it is not hidden_size / num_heads
    base_bits: Literal[4, 16] = 16  # of the linear layers of the blocks
    experts: tuple[int, int] = (0, 0)  # of a block, each ``ffn_size`` wide, and those of a token
    tied: bool = False  # embedding and head, but for OPT's, which always are


def opt_shape(hidden: int, layers: int, heads: int, vocabulary: int, lora_dim: int) -> Shape:
    """An OPT of 512 positions, whose rows are another's to choose."""
    return Shape(hidden, layers, heads, 4 * hidden, vocabulary, 512, lora_dim, 1, 1, 1)


SHAPES = {
    "opt-1.3b": Shape(2048, 24, 32, 8192, 50272, 2048, 128, 8, 2048, 512),
    "opt-6.7b": Shape(4096, 32, 32, 16384, 50272, 2048, 128, 8, 2048, 512),
    "llama-2-7b": Shape(4096, 32, 32, 11008, 32000, 4096, 16, 8, 2048, 512, "llama", 32),
    "llama-3.2-1b": Shape(
        2048, 16, 32, 8192, 128256, 131072, 16, 8, 2048, 512, "llama", 8, 64, tied=True
    ),
    "llama-3-8b": Shape(4096, 32, 32, 14336, 128256, 8192, 16, 8, 2048, 512, "llama", 8),
    "qwen2.5-1.5b": Shape(
        1536, 28, 12, 8960, 151936, 32768, 1, 8, 2048, 512, "qwen2", 2, tied=True
    ),
    "qwen2.5-7b": Shape(3584, 28, 28, 18944, 152064, 32768, 16, 8, 2048, 512, "qwen2", 4),
    "qwen3-4b": Shape(
        2560, 36, 32, 9728, 151936, 40960, 16, 8, 2048, 512, "qwen3", 8, 128, tied=True
    ),
    "qwen3-30b-a3b": Shape(
        2048, 48, 32, 768, 151936, 40960, 16, 8, 2048, 512, "qwen3_moe", 4, 128, experts=(128, 8)
    ),
}
TINY = {
    "opt-1.3b": Shape(64, 2, 4, 256, 512, 128, 8, 2, 128, 32),
    "opt-6.7b": Shape(96, 3, 4, 384, 512, 128, 8, 2, 128, 32),
}


def random_model(
    shape: Shape, *, dtype: torch.dtype, device: torch.device, group: TensorGroup | None = None
) -> PreTrainedModel:
    """The model with its adapter on ``device``, weights drawn there; no file is touched.

    Of a ``group`` of ranks that hold it between them, this one's part.
    """
    model = random_base(shape, dtype=dtype, device=device, group=group)
    apply_lora(model, LoraConfig(lora_dim=shape.lora_dim), seed=SEED)
    return model


def random_base(
    shape: Shape, *, dtype: torch.dtype, device: torch.device, group: TensorGroup | None = None
) -> PreTrainedModel:
    """The model without an adapter."""
    model = meta_base(shape, dtype=dtype, group=group)
    draw_weights_(model, device)
    return model


def meta_base(
    shape: Shape, *, dtype: torch.dtype, group: TensorGroup | None = None
) -> PreTrainedModel:
    """The shape of the model alone, on the meta device."""
    return load_causal_lm(
        "random",
        model_config(shape),
        ModelConfig(base_bits=shape.base_bits),
        dtype=dtype,
        meta=True,
        group=group,
    )


_FAMILIES: dict[str, type[PretrainedConfig]] = {
    "llama": LlamaConfig,
    "qwen2": Qwen2Config,
    "qwen3": Qwen3Config,
    "qwen3_moe": Qwen3MoeConfig,
}


def model_config(shape: Shape) -> PretrainedConfig:
    common = {
        "hidden_size": shape.hidden_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "vocab_size": shape.vocab_size,
        "max_position_embeddings": shape.positions,
        "attention_dropout": 0.0,
        "pad_token_id": PAD_ID,
    }
    if shape.architecture != "opt":
        family = _FAMILIES[shape.architecture]
        common |= {"intermediate_size": shape.ffn_size, "num_key_value_heads": shape.kv_heads}
        if shape.head_size is not None:
            common["head_dim"] = shape.head_size
        if shape.experts[0]:
            names = ("num_experts", "num_experts_per_tok")
            common |= dict(zip(names, shape.experts, strict=True))
            common["moe_intermediate_size"] = shape.ffn_size
        return family(tie_word_embeddings=shape.tied, **common)
    return OPTConfig(
        word_embed_proj_dim=shape.hidden_size,
        ffn_dim=shape.ffn_size,
        dropout=0.0,
        layerdrop=0.0,
        **common,
    )


@torch.no_grad()
def draw_weights_(model: PreTrainedModel, device: torch.device) -> None:
    """From the meta device to ``device``: weights from N(0, 0.02^2), biases 0, norms 1."""
    states = {n: state_of(p) for n, p in model.named_parameters() if is_quantized(p)}
    model.to_empty(device=device)
    model.tie_weights()
    for name, module in list(model.named_modules()):
        if hasattr(module, "inv_freq"):  # rotary frequencies are no weights
            model.set_submodule(name, type(module)(model.config).to(device))
        else:
            assert not list(module.buffers(recurse=False)), "to_empty() leaves buffers undefined"
    torch.manual_seed(SEED)
    for name, parameter in list(model.named_parameters()):
        if (state := states.get(name)) is not None:
            drawn = torch.empty(state.shape, dtype=state.dtype, device=device).normal_(std=0.02)
            replace_part(model, name, nf4.quantize(drawn, dtype=state.dtype))
        elif parameter.ndim > 1:
            parameter.normal_(std=0.02)
        else:
            parameter.fill_(0.0 if name.endswith("bias") else 1.0)


def mixed_rows(shape: Shape) -> list[list[SequenceSample]]:
    """Packed rows of samples whose lengths are log-normal, cut at the longest.

    Their mean is about 0.45 of the longest, 230 of 512 tokens, as of instructions and answers.
    """
    generator = np.random.default_rng(SEED)
    drawn = generator.lognormal(np.log(0.375 * shape.max_sample), 0.7, size=64 * shape.rows)
    lengths = drawn.clip(4, shape.max_sample).astype(np.int64)
    # As many as fit: the first rows of more would hold the short ones.
    count = int((lengths.cumsum() <= shape.rows * shape.row_length).sum())
    rows = _packed(lengths[:count], shape)
    while len(rows) > shape.rows:
        count -= 1
        rows = _packed(lengths[:count], shape)
    return [
        [_sample(int(lengths[index]), shape.vocab_size, generator) for index in row] for row in rows
    ]


def _packed(lengths: NDArray[np.int64], shape: Shape) -> PackedRows:
    return make_rows(lengths, max_seq_len=shape.row_length, packing=True, seed=SEED)


def full_rows(shape: Shape) -> list[list[SequenceSample]]:
    """As many tokens as packed rows can hold, a row for each sample of the longest length."""
    generator = np.random.default_rng(SEED)
    count = shape.rows * shape.row_length // shape.max_sample
    return [[_sample(shape.max_sample, shape.vocab_size, generator)] for _ in range(count)]


def micro_batches(
    rows: Sequence[Sequence[SequenceSample]], tokens: int, *, multiple_of: int = 1
) -> list[Batch]:
    """The rows in micro-batches of at most so many positions, but of a row at least.

    Args:
        rows: samples of each row.
        tokens: positions.
        multiple_of: the width of each micro-batch is.
    """
    collate = SampleCollator(PAD_ID, multiple_of)
    longest = max(sum(len(sample.input_ids) for sample in row) for row in rows)
    count = max(1, tokens // (-(-longest // multiple_of) * multiple_of))
    return [collate(rows[first : first + count]) for first in range(0, len(rows), count)]


def _sample(length: int, vocab_size: int, generator: np.random.Generator) -> SequenceSample:
    """Random tokens; the loss is on the second half."""
    ids = generator.integers(4, vocab_size, size=length).astype(np.int32)
    answer = np.arange(length) >= length // 2
    return SequenceSample.of(ids, np.where(answer, ids, np.int32(IGNORE_INDEX)))
