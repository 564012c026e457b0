"""The measures of the GLUE tasks, from logits and labels."""

import math
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import log_softmax
from scipy.stats import pearsonr, spearmanr
from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef

from dschat_lora.experiments.glue.tasks import GlueTask, Measure

Array = NDArray[Any]
_MEASURES: dict[Measure, Callable[[Array, Array], float]] = {
    "accuracy": accuracy_score,
    "f1": f1_score,
    "matthews_correlation": matthews_corrcoef,
    "pearson": lambda labels, found: _correlation(pearsonr, labels, found),
    "spearmanr": lambda labels, found: _correlation(spearmanr, labels, found),
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
    found = predictions(task, logits)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of constant predictions: the number says it
        metrics: dict[str, float] = {
            name: float(_MEASURES[name](labels, found)) for name in task.measures
        }
    if len(metrics) > 1:
        metrics["combined_score"] = float(np.mean(list(metrics.values())))
    return metrics | {"loss": _loss(task, logits.astype(np.float64), labels)}


def _correlation(statistic: Callable[..., Any], labels: Array, found: Array) -> float:
    return statistic(labels, found).statistic if len(labels) > 1 else math.nan


def _loss(task: GlueTask, logits: Array, labels: Array) -> float:
    if task.is_regression:
        return float(np.mean((logits[:, 0] - labels) ** 2))
    rows = np.arange(len(labels))
    return -float(np.mean(log_softmax(logits, axis=1)[rows, labels.astype(np.int64)]))
