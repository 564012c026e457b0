"""The nine GLUE tasks (arXiv:1804.07461): their columns, labels and measures."""

from dataclasses import dataclass
from typing import Literal

TaskName = Literal["cola", "sst2", "mrpc", "qqp", "stsb", "mnli", "qnli", "rte", "wnli"]
Measure = Literal["accuracy", "f1", "matthews_correlation", "pearson", "spearmanr"]


@dataclass(frozen=True)
class GlueTask:
    """What tells one task from another."""

    folder: str  # of GLUE's own download
    texts: tuple[str, ...]  # columns of one or two texts, by their names on the hub
    tsv_texts: tuple[str, ...]  # the same columns in the header of GLUE's own files
    tsv_label: str
    labels: tuple[str, ...]  # in the hub's order, which numbers them; none for a regression
    measures: tuple[Measure, ...] = ("accuracy",)  # of several there is a mean, combined_score

    @property
    def is_regression(self) -> bool:
        """Whether a number is to be found, by mean squared error."""
        return not self.labels

    @property
    def num_labels(self) -> int:
        """Outputs of the model."""
        return len(self.labels) or 1


_ENTAILMENT = ("entailment", "not_entailment")
_TWO = ("sentence1", "sentence2")
_QUESTIONS = ("question1", "question2")

TASKS: dict[str, GlueTask] = {
    "cola": GlueTask(
        "CoLA",
        ("sentence",),
        ("sentence",),
        "label",
        ("unacceptable", "acceptable"),
        ("matthews_correlation",),
    ),
    "sst2": GlueTask("SST-2", ("sentence",), ("sentence",), "label", ("negative", "positive")),
    "mrpc": GlueTask(
        "MRPC",
        _TWO,
        ("#1 String", "#2 String"),
        "Quality",
        ("not_equivalent", "equivalent"),
        ("accuracy", "f1"),
    ),
    "qqp": GlueTask(
        "QQP",
        _QUESTIONS,
        _QUESTIONS,
        "is_duplicate",
        ("not_duplicate", "duplicate"),
        ("accuracy", "f1"),
    ),
    "stsb": GlueTask("STS-B", _TWO, _TWO, "score", (), ("pearson", "spearmanr")),
    "mnli": GlueTask(
        "MNLI",
        ("premise", "hypothesis"),
        _TWO,
        "gold_label",
        ("entailment", "neutral", "contradiction"),
    ),
    "qnli": GlueTask(
        "QNLI", ("question", "sentence"), ("question", "sentence"), "label", _ENTAILMENT
    ),
    "rte": GlueTask("RTE", _TWO, _TWO, "label", _ENTAILMENT),
    "wnli": GlueTask("WNLI", _TWO, _TWO, "label", _ENTAILMENT[::-1]),
}
