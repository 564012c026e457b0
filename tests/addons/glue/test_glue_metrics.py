"""The measures of GLUE against numbers worked out by hand."""

import math

import numpy as np
import pytest

from dschat_lora.addons.glue.config import TASKS
from dschat_lora.addons.glue.trainer import predictions, task_metrics

# True 1: rows 0 to 3; found 1: rows 0, 1, 2, 4. So TP 3, FN 1, FP 1, TN 1.
LABELS = np.array([1, 1, 1, 1, 0, 0])
FOUND = np.array([1, 1, 1, 0, 1, 0])
LOGITS = np.stack([-FOUND, FOUND], axis=1).astype(np.float32)


@pytest.mark.parametrize("name", ["mrpc", "qqp"])
def test_mrpc_and_qqp_have_accuracy_f1_and_their_mean(name):
    metrics = task_metrics(TASKS[name], LOGITS, LABELS)
    assert metrics["accuracy"] == pytest.approx(4 / 6)
    assert metrics["f1"] == pytest.approx(6 / 8)  # 2 TP / (2 TP + FP + FN)
    assert metrics["combined_score"] == pytest.approx((4 / 6 + 6 / 8) / 2)


@pytest.mark.smoke
def test_cola_has_matthews_correlation_alone():
    metrics = task_metrics(TASKS["cola"], LOGITS, LABELS)
    # (TP TN - FP FN) / sqrt((TP+FP)(TP+FN)(TN+FP)(TN+FN)) = (3 - 1) / sqrt(4 * 4 * 2 * 2)
    assert metrics["matthews_correlation"] == pytest.approx(2 / 8)
    assert set(metrics) == {"matthews_correlation", "loss"}


def test_stsb_has_both_correlations_and_squared_error():
    predicted, labels = np.array([[1.0], [2.0], [4.0]]), np.array([1.0, 3.0, 2.0])
    metrics = task_metrics(TASKS["stsb"], predicted, labels)
    # Deviations (-4, -1, 5) / 3 and (-1, 1, 0): products sum to 1; squares to 42 / 9 and 2.
    assert metrics["pearson"] == pytest.approx(1 / math.sqrt(42 / 9 * 2))
    assert metrics["spearmanr"] == pytest.approx(1 - 6 * 2 / (3 * 8))  # ranks differ by 0, -1, 1
    mean = (metrics["pearson"] + metrics["spearmanr"]) / 2
    assert metrics["combined_score"] == pytest.approx(mean)
    assert metrics["loss"] == pytest.approx((0 + 1 + 4) / 3)
    assert predictions(TASKS["stsb"], predicted).tolist() == [1.0, 2.0, 4.0]


@pytest.mark.filterwarnings("error")
def test_a_measure_that_is_not_there_is_nan_without_a_warning():
    one, constant = np.array([[1.0]]), np.ones((3, 1))
    for predicted, labels in ((one, np.array([2.0])), (constant, np.array([1.0, 2.0, 3.0]))):
        metrics = task_metrics(TASKS["stsb"], predicted, labels)
        assert all(math.isnan(metrics[each]) for each in ("pearson", "spearmanr"))
        assert math.isfinite(metrics["loss"])
    assert task_metrics(TASKS["mrpc"], np.array([[1.0, 0.0]]), np.array([0]))["f1"] == 0
    assert task_metrics(TASKS["cola"], np.eye(2), np.zeros(2))["matthews_correlation"] == 0


@pytest.mark.parametrize("name", ["mnli", "qnli", "rte", "sst2", "wnli"])
def test_other_tasks_have_accuracy(name):
    outputs = TASKS[name].num_labels
    logits = np.eye(outputs)[[0, 1, 1, 0]]
    metrics = task_metrics(TASKS[name], logits, np.array([0, 1, 0, 0]))
    assert metrics["accuracy"] == pytest.approx(3 / 4)
    assert set(metrics) == {"accuracy", "loss"}


def test_loss_is_the_mean_cross_entropy_of_all_rows():
    logits = np.array([[0.0, math.log(3)], [0.0, 0.0]], dtype=np.float32)
    metrics = task_metrics(TASKS["rte"], logits, np.array([1, 0]))
    assert metrics["loss"] == pytest.approx((math.log(4 / 3) + math.log(2)) / 2)
