"""Pretrained causal language models, their tokenizers, and the loss without full logits."""

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers import PreTrainedTokenizerBase as Tokenizer
from transformers.utils.logging import disable_progress_bar

from dschat_lora.algos.sft import (
    IGNORE_INDEX,
    MAX_CHUNK_LOGITS,
    linear_cross_entropy,
    next_token_targets,
)
from dschat_lora.attention import block_causal_mask
from dschat_lora.config import ModelConfig
from dschat_lora.models.errors import hub_errors

# The run has a log of its own; a bar for each of a few weights says nothing.
disable_progress_bar()
_DROPOUT_NAMES = ("dropout", "drop", "pdrop", "layerdrop")


def load_tokenizer(path: str, config: ModelConfig) -> Tokenizer:
    """The model's tokenizer, right-padding, with EOS standing in where it has no pad token.

    Raises:
        ValueError: if there is none at ``path``, or it knows no end of sequence.
    """
    with hub_errors("--model_name_or_path", path, "tokenizer"):
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=config.trust_remote_code)
    if config.add_eot_token:
        tokenizer.add_special_tokens({"eos_token": config.eot_token})
    if tokenizer.eos_token_id is None:
        raise ValueError(
            f"the tokenizer of {path} has no end-of-sequence token; name one with "
            "--add_eot_token --eot_token TOKEN"
        )
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    tokenizer.padding_side = "right"
    return tokenizer


def load_config(path: str, config: ModelConfig) -> PretrainedConfig:
    """The model's configuration with every dropout set to ``--dropout``."""
    with hub_errors("--model_name_or_path", path, "configuration"):
        model_config = AutoConfig.from_pretrained(path, trust_remote_code=config.trust_remote_code)
    for name in _dropouts(model_config):
        setattr(model_config, name, 0.0 if name == "layerdrop" else config.dropout)
    return model_config


def stored_dropouts(path: str, config: ModelConfig) -> dict[str, float]:
    """Dropout probabilities that the model came with, by the names of its configuration."""
    with hub_errors("--model_name_or_path", path, "configuration"):
        return _dropouts(
            AutoConfig.from_pretrained(path, trust_remote_code=config.trust_remote_code)
        )


def _dropouts(config: PretrainedConfig) -> dict[str, float]:
    names = vars(config).items()
    return {k: v for k, v in names if k.endswith(_DROPOUT_NAMES) and isinstance(v, float)}


def load_causal_lm(
    path: str,
    model_config: PretrainedConfig,
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    meta: bool,
) -> PreTrainedModel:
    """The pretrained model in its compute type, or its empty shape on the meta device.

    Args:
        path: local directory or hub name.
        model_config: from :func:`load_config`.
        config: the user's options.
        dtype: type of the weights; they are read straight into it.
        meta: build the shape alone, for a rank that receives its shards from rank 0.
    """
    kwargs = {
        "dtype": dtype,
        "attn_implementation": config.attn_implementation,
        "trust_remote_code": config.trust_remote_code,
    }
    with hub_errors("--model_name_or_path", path, "model"):
        try:
            if meta:
                with torch.device("meta"):
                    return AutoModelForCausalLM.from_config(model_config, **kwargs)
            return AutoModelForCausalLM.from_pretrained(path, config=model_config, **kwargs)
        except ValueError as error:
            if "scaled_dot_product_attention" in str(error):
                kind = model_config.model_type
                raise ValueError(f"{kind} has no sdpa: use --attn_implementation eager") from error
            raise


class CausalLMLoss(nn.Module):
    """A causal language model that returns the summed loss of a batch.

    Hidden states of supervised positions alone reach the output head, a chunk at a time.

    Attributes:
        model: the transformers model, layers possibly adapted.
        full_logits: take the model's own logits instead, for architectures that transform
            them after the head.
        own_mask: let the model make its mask from which positions are padding, for
            architectures that take no other; rows must hold one sample each.
    """

    def __init__(self, model: PreTrainedModel, *, full_logits: bool = False) -> None:
        super().__init__()
        self.model = model
        self.full_logits = full_logits
        self._windows = attention_windows(model.config)
        self.own_mask = self._windows is None
        self.head = LinearHead(model.get_output_embeddings(), model.config.vocab_size)
        accepted = inspect.signature(model.base_model.forward).parameters
        self._takes_positions = "position_ids" in accepted

    def forward(
        self, input_ids: Tensor, position_ids: Tensor, segment_ids: Tensor, labels: Tensor
    ) -> Tensor:
        """Summed cross-entropy, fp32 scalar in nats; all arguments (B, T) as in ``Batch``."""
        targets = next_token_targets(labels, segment_ids)
        supervised = targets != IGNORE_INDEX
        if self.full_logits:
            inputs = self._inputs(input_ids, position_ids, segment_ids)
            logits = self.model(**inputs).logits[supervised].float()
            return nn.functional.cross_entropy(logits, targets[supervised], reduction="sum")
        hidden = self.hidden_states(input_ids, position_ids, segment_ids)
        # Without a supervised position the graph still spans the model: every rank and every
        # micro-batch must run the same backward hooks.
        loss: Tensor = self.head(hidden[supervised], targets[supervised])
        return loss + 0.0 * hidden[:, 0].float().sum()

    def hidden_states(self, input_ids: Tensor, position_ids: Tensor, segment_ids: Tensor) -> Tensor:
        """(B, T, H) last hidden states, each sample of a row by itself."""
        inputs = self._inputs(input_ids, position_ids, segment_ids)
        hidden: Tensor = self.model.base_model(**inputs).last_hidden_state
        return hidden

    def _inputs(
        self, input_ids: Tensor, position_ids: Tensor, segment_ids: Tensor
    ) -> dict[str, Any]:
        inputs = {
            "input_ids": input_ids,
            "attention_mask": self._mask(segment_ids),
            "use_cache": False,
        }
        return inputs | ({"position_ids": position_ids} if self._takes_positions else {})

    def _mask(self, segment_ids: Tensor) -> Tensor | dict[str, Tensor]:
        """What the model takes as ``attention_mask``: one mask, or one for each kind of layer."""
        if self.own_mask or self._windows is None:
            return (segment_ids > 0).long()
        masks = {
            kind: block_causal_mask(segment_ids, self.model.dtype, window=window)
            for kind, window in self._windows.items()
        }
        return masks if len(masks) > 1 else next(iter(masks.values()))


def attention_windows(config: PretrainedConfig) -> dict[str, int | None] | None:
    """Sliding window of each kind of attention layer, None for all that precedes.

    Returns:
        ``{kind: window}`` by transformers' names of kinds; None where the model has layers
        whose mask is none of ours (linear, chunked, ...).
    """
    kinds = set(getattr(config, "layer_types", None) or ())
    if kinds - {"full_attention", "sliding_attention"}:
        return None
    window = getattr(config, "sliding_window", None)
    if window is None or not getattr(config, "use_sliding_window", True):
        return {"full_attention": None}
    return {k: None if k == "full_attention" else window for k in kinds or {"sliding_attention"}}


class LinearHead(nn.Module):
    """The output embedding, applied and reduced chunk by chunk.

    A plain linear layer lends its parameters, so that ZeRO 3 gathers them for this module; any
    other module (an adapted or separately trained head) is called under checkpointing.
    """

    def __init__(self, head: nn.Module, vocab_size: int) -> None:
        super().__init__()
        self.rows = max(1, MAX_CHUNK_LOGITS // vocab_size)
        self.plain = type(head) is nn.Linear
        if isinstance(head, nn.Linear) and self.plain:
            self.weight: Tensor = head.weight
            self.bias: Tensor | None = head.bias
        else:
            self.module = head

    def forward(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """Summed cross-entropy of (N, H) hidden states against (N,) targets."""
        if self.plain:
            return linear_cross_entropy(hidden, self.weight, self.bias, targets)
        loss = hidden.new_zeros((), dtype=torch.float32)
        for h, t in zip(
            torch.split(hidden, self.rows), torch.split(targets, self.rows), strict=True
        ):
            loss = loss + checkpoint(self._chunk_loss, h, t, use_reentrant=False)
        return loss

    def _chunk_loss(self, hidden: Tensor, targets: Tensor) -> Tensor:
        logits = self.module(hidden).float()
        return nn.functional.cross_entropy(logits, targets, reduction="sum")


def causal_lm_loss(engine: Any, batch: Any) -> Tensor:
    """Summed loss of one micro-batch through the engine over a :class:`CausalLMLoss`."""
    loss: Tensor = engine(
        input_ids=batch.input_ids,
        position_ids=batch.position_ids,
        segment_ids=batch.segment_ids,
        labels=batch.labels,
    )
    return loss
