"""transformers' Trainer for GLUE: inputs, two passes, the loss of a mean row, and measures."""

import math
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from scipy.special import log_softmax
from scipy.stats import pearsonr, spearmanr
from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef
from torch import Tensor, nn
from transformers import DataCollatorWithPadding, PreTrainedTokenizerBase, Trainer
from transformers.modeling_outputs import SequenceClassifierOutput

from dschat_lora.addons.glue.callback import MetricsCallback
from dschat_lora.addons.glue.config import GlueConfig, GlueTask, Measure
from dschat_lora.addons.glue.data import Example
from dschat_lora.algos.tensors import check_finite
from dschat_lora.checkpoint.tensors import writing
from dschat_lora.config.staging import check_place
from dschat_lora.engine.distributed import on_rank_zero

Rows = list[dict[str, Any]]
Array = NDArray[Any]


def _length_limit(tokenizer: PreTrainedTokenizerBase, config: GlueConfig) -> int:
    return min(config.max_seq_length, tokenizer.model_max_length)


def tokenize(
    examples: Sequence[Example], tokenizer: PreTrainedTokenizerBase, config: GlueConfig
) -> list[dict[str, Any]]:
    """Token ids and label of each row, not padded; too long a row loses tokens at its end.

    Of two texts the longer one is cut. ``--max_seq_length`` counts special tokens too.
    """
    texts = [list(each) for each in zip(*(example.texts for example in examples), strict=True)]
    encoded = tokenizer(*texts, truncation=True, max_length=_length_limit(tokenizer, config))
    rows = []
    for number, example in enumerate(examples):
        row = {name: values[number] for name, values in encoded.items()}
        if example.label is not None:
            row["label"] = example.label if config.task.is_regression else int(example.label)
        rows.append(row)
    return rows


def collator(tokenizer: PreTrainedTokenizerBase, config: GlueConfig) -> DataCollatorWithPadding:
    """What makes a batch of rows: padded to its longest, or to ``--max_seq_length``."""
    if config.pad_to_max_length:
        limit = _length_limit(tokenizer, config)
        return DataCollatorWithPadding(tokenizer, padding="max_length", max_length=limit)
    # Whole tiles of tensor cores.
    multiple = 8 if config.fp16 or config.bf16 else None
    return DataCollatorWithPadding(tokenizer, pad_to_multiple_of=multiple)


class GlueTrainer(Trainer):  # type: ignore[misc]  # transformers is untyped
    """The Trainer, whose evaluation takes MNLI's mismatched rows too, as ``eval_mm_*``."""

    mismatched: Rows | None = None
    #: what becomes of the inputs of a training step
    doubled: Callable[[dict[str, Any]], dict[str, Any]] | None = None
    #: called before the weights of the best evaluation take the place of the last ones
    before_best: Callable[[], None] | None = None
    rows: Tensor | int = 0  # trained on so far, by all processes
    #: what the state of the run belongs to
    identity: dict[str, Any]
    watch: MetricsCallback

    @property
    def directory(self) -> Path:
        """Where the run writes."""
        return Path(self.args.output_dir)

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], Tensor | int | None]:
        """The batches of a step and the number of its rows, which is added up."""
        batches, rows = super().get_batch_samples(epoch_iterator, num_batches, device)
        self.rows = self.rows + (0 if rows is None else rows)
        return batches, rows

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Tensor | tuple[Tensor, object]:
        """The loss of a batch, in training of both its passes where there are two."""
        if model.training and self.doubled is not None:
            inputs = self.doubled(inputs)
        loss: Tensor | tuple[Tensor, object] = super().compute_loss(
            model, inputs, return_outputs, num_items_in_batch
        )
        return loss

    def _run_epoch(self, *arguments: object, **named: object) -> None:
        """Train an epoch, but not where ``--max_steps`` ended a resumed run within it."""
        if self.state.global_step < self.state.max_steps:
            super()._run_epoch(*arguments, **named)

    def _save_checkpoint(self, *arguments: object, **named: object) -> None:
        """Write a checkpoint.

        Raises:
            ValueError: if a trained weight is not finite.
            OSError: if the directory is not there any more.
        """
        on_rank_zero(lambda: check_place(self.directory / "checkpoint"))
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad:
                step = self.state.global_step
                check_finite(parameter, f"checkpoint-{step} was not written: {name}")
        with writing(self.directory):
            super()._save_checkpoint(*arguments, **named)

    def _load_best_model(self) -> None:
        if self.before_best is not None:
            self.before_best()
        super()._load_best_model()

    def evaluate(
        self,
        eval_dataset: Rows | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> dict[str, float]:
        """The measures of both kinds of rows, under names of their own."""
        metrics: dict[str, float] = super().evaluate(eval_dataset, ignore_keys, metric_key_prefix)
        if eval_dataset is None and self.mismatched is not None:
            metrics |= super().evaluate(self.mismatched, ignore_keys, f"{metric_key_prefix}_mm")
        return metrics


def mean_loss(
    task: GlueTask,
    outputs: SequenceClassifierOutput,
    labels: Tensor,
    num_items_in_batch: Tensor | int | None = None,
    *,
    weight: float = 0.0,
) -> Tensor:
    """This batch's share of the mean loss over all rows of an optimizer step.

    Left to itself the Trainer takes a classifier's loss for one that is divided already: its
    gradients are as many times too large as there are processes and accumulated batches.

    The logits are (B, outputs), or of two passes (2 B, outputs), see :func:`two_pass_loss`, which
    has the ``weight`` of their divergence; the labels are (B,). ``num_items_in_batch`` counts rows
    of the step, on all processes; None: those of this batch.
    """
    logits = outputs.logits.float()
    if len(logits) == 2 * len(labels):
        total = two_pass_loss(logits, labels, weight=weight)
    elif task.is_regression:
        total = F.mse_loss(logits[:, 0], labels.float(), reduction="sum")
    else:
        total = F.cross_entropy(logits, labels, reduction="sum")
    return total / (len(labels) if num_items_in_batch is None else num_items_in_batch)


def with_second_pass(
    inputs: Mapping[str, Any], *, masking_prob: float, unknown: int, kept: Collection[int]
) -> dict[str, Any]:
    """The batch with each row a second time, (2 B, ...), for R-Drop; ``labels`` stay (B,).

    Of the second rows each token becomes ``unknown`` with probability ``masking_prob``, but for
    padding and the tokens ``kept``: that is token cutoff. Dropout tells the passes apart, too.
    """
    ids = inputs["input_ids"]
    doubled = {n: v if n == "labels" else torch.cat([v, v]) for n, v in inputs.items()}
    if masking_prob:
        masked = torch.rand(ids.shape, device=ids.device) < masking_prob
        masked &= inputs["attention_mask"].bool()
        for token in kept:
            masked &= ids != token
        doubled["input_ids"] = torch.cat([ids, ids.masked_fill(masked, unknown)])
    return doubled


def two_pass_loss(logits: Tensor, labels: Tensor, *, weight: float) -> Tensor:
    """The sum over rows of both passes' cross-entropies and of their divergence.

    ``CE_1 + CE_2 + weight / 2 * (D_1 + D_2)`` with ``D_i = KL(m || p_i) / classes`` and m the
    softmax of the passes' mean logits, as microsoft/LoRA's DeBERTa takes it (R-Drop,
    arXiv:2106.14448).

    Args:
        logits: (2 B, classes), the second pass behind the first.
        labels: (B,) int64.
        weight: of the divergence, >= 0.
    """
    first, second = logits.float().chunk(2)
    mean = ((first + second) / 2).softmax(dim=-1)
    loss = logits.new_zeros((), dtype=torch.float32)
    for each in (first, second):
        divergence = F.kl_div(each.log_softmax(dim=-1), mean, reduction="sum") / logits.shape[1]
        loss = loss + F.cross_entropy(each, labels, reduction="sum") + 0.5 * weight * divergence
    return loss


def _correlation(statistic: Callable[..., Any], labels: Array, predicted: Array) -> float:
    return statistic(labels, predicted).statistic if len(labels) > 1 else math.nan


_MEASURES: dict[Measure, Callable[[Array, Array], float]] = {
    "accuracy": accuracy_score,
    "f1": f1_score,
    "matthews_correlation": matthews_corrcoef,
    "pearson": partial(_correlation, pearsonr),
    "spearmanr": partial(_correlation, spearmanr),
}


def predictions(task: GlueTask, logits: Array) -> Array:
    """The number of the likeliest label, or the number a regression finds; (N,)."""
    return logits[:, 0] if task.is_regression else logits.argmax(axis=1)


def task_metrics(task: GlueTask, logits: Array, labels: Array) -> dict[str, float]:
    """The task's measures, their mean where there are several, and the loss of a mean row.

    The Trainer's own loss is a mean over batches and depends on how many processes there are.
    Logits are (N, outputs), labels (N,): their numbers, or of a regression the labels themselves.

    Returns:
        By name; nan for a correlation of fewer than two rows, or of one value only.
    """
    predicted = predictions(task, logits)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of constant predictions: the number says it
        metrics: dict[str, float] = {
            name: float(_MEASURES[name](labels, predicted)) for name in task.measures
        }
    if len(metrics) > 1:
        metrics["combined_score"] = float(np.mean(list(metrics.values())))
    logits = logits.astype(np.float64)
    if task.is_regression:
        loss = np.mean((logits[:, 0] - labels) ** 2)
    else:
        rows = np.arange(len(labels))
        loss = -np.mean(log_softmax(logits, axis=1)[rows, labels.astype(np.int64)])
    return metrics | {"loss": float(loss)}
