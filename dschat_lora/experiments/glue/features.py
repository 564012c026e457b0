"""Texts of a GLUE task as a model reads them."""

from collections.abc import Sequence
from typing import Any

from transformers import DataCollatorWithPadding, PreTrainedTokenizerBase

from dschat_lora.experiments.glue.config import GlueConfig
from dschat_lora.experiments.glue.data import Example


def tokenize(
    examples: Sequence[Example], tokenizer: PreTrainedTokenizerBase, config: GlueConfig
) -> list[dict[str, Any]]:
    """Token ids and label of each row, not padded; too long a row loses tokens at its end.

    Of two texts the longer one is cut. ``--max_seq_length`` counts special tokens too.
    """
    texts = [list(each) for each in zip(*(example.texts for example in examples), strict=True)]
    encoded = tokenizer(*texts, truncation=True, max_length=length_limit(tokenizer, config))
    rows = []
    for number, example in enumerate(examples):
        row = {name: values[number] for name, values in encoded.items()}
        if example.label is not None:
            row["label"] = example.label if config.task.is_regression else int(example.label)
        rows.append(row)
    return rows


def length_limit(tokenizer: PreTrainedTokenizerBase, config: GlueConfig) -> int:
    """Tokens of an input, no more than the model takes."""
    return min(config.max_seq_length, tokenizer.model_max_length)


def collator(tokenizer: PreTrainedTokenizerBase, config: GlueConfig) -> DataCollatorWithPadding:
    """What makes a batch of rows: padded to its longest, or to ``--max_seq_length``."""
    if config.pad_to_max_length:
        limit = length_limit(tokenizer, config)
        return DataCollatorWithPadding(tokenizer, padding="max_length", max_length=limit)
    # Whole tiles of tensor cores.
    multiple = 8 if config.fp16 or config.bf16 else None
    return DataCollatorWithPadding(tokenizer, pad_to_multiple_of=multiple)
