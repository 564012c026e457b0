"""transformers' Trainer for GLUE: MNLI's two evaluations, two passes, the loss of a mean row."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Trainer

from dschat_lora.algos.tensors import check_finite
from dschat_lora.checkpoint.tensors import writing
from dschat_lora.experiments.glue.callback import MetricsCallback
from dschat_lora.experiments.glue.regularize import two_pass_loss
from dschat_lora.experiments.glue.tasks import GlueTask

Rows = list[dict[str, Any]]


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
    ) -> Any:
        """The loss of a batch, in training of both its passes where there are two."""
        if model.training and self.doubled is not None:
            inputs = self.doubled(inputs)
        return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)

    def _run_epoch(self, *arguments: Any, **named: Any) -> None:
        """Train an epoch, but not where ``--max_steps`` ended a resumed run within it."""
        if self.state.global_step < self.state.max_steps:
            super()._run_epoch(*arguments, **named)

    def _save_checkpoint(self, *arguments: Any, **named: Any) -> None:
        """Write a checkpoint.

        Raises:
            ValueError: if a trained weight is not finite.
        """
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad:
                step = self.state.global_step
                check_finite(parameter, f"checkpoint-{step} was not written: {name}")
        with writing(Path(self.args.output_dir)):
            super()._save_checkpoint(*arguments, **named)

    def _load_best_model(self) -> None:
        if self.before_best is not None:
            self.before_best()
        super()._load_best_model()

    def evaluate(
        self,
        eval_dataset: Any = None,
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
    outputs: Any,
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
