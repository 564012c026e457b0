"""What a stage descends, and what it tells of it: from batches to pure maths and back."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, NamedTuple, Protocol, Self

import torch
from torch import Tensor

from dschat_lora.algos.logprobs import GroupSums
from dschat_lora.data.batch import Batch
from dschat_lora.data.loader import Collator

# An engine or module, called as the stage's network is.
Network = Callable[..., Any]
# (P,) tensors, one value for each pair of a batch or of a whole evaluation.
Columns = Mapping[str, Tensor]
# Metrics, None where there is nothing to take one of.
Means = dict[str, float | None]


class CountedBatch(Protocol):
    """A micro-batch with its counts."""

    num_targets: int
    num_tokens: int
    num_samples: int
    num_attended: int
    num_chosen_targets: int
    input_ids: Tensor

    def to(self, device: torch.device) -> Self:
        """The same batch on ``device``."""


@dataclass(frozen=True)
class BatchLoss:
    """Summed loss of a micro-batch."""

    total: Tensor  # scalar with gradient
    columns: Columns = field(default_factory=dict)  # what is known of each pair, without gradient
    # scalar with gradient, of the chosen answers' tokens: a step adds its mean over all of these
    chosen_nll: Tensor | None = None
    by_source: Tensor | None = None  # (sources,) cross-entropy of the targets of each, for metrics

    @property
    def sums(self) -> list[Tensor]:
        """The parts of the loss, each divided by a count of its own."""
        return [self.total] if self.chosen_nll is None else [self.total, self.chosen_nll]


@dataclass(frozen=True)
class Objective:
    """A stage's loss, what it is a mean over, and what is reported besides."""

    loss: Callable[[Any, Any], BatchLoss]  # of a micro-batch, through an engine
    mean_over: Literal["num_targets", "num_samples"]  # the count that divides a step's summed loss
    # further metrics of an evaluation, from its mean loss and whole columns
    describe: Callable[[float, Columns], dict[str, Any]]
    headline: str  # the metric of an evaluation that says how good the model is
    # the loss of each batch of an optimizer step or an evaluation, where it depends on them all:
    # from the engine and those of this rank; called on every rank
    prepare: Callable[[Any, Iterable[Any]], Callable[[Any, Any], BatchLoss]] | None = None
    # metrics from the means of the columns, where these are not the metrics themselves
    combine: Callable[[Means], Means] = lambda means: means

    def loss_of(self, engine: Network, batches: Iterable[Any]) -> Callable[[Any, Any], BatchLoss]:
        """The loss of each of a step's or an evaluation's batches; call on every rank."""
        loss = self.loss if self.prepare is None else self.prepare(engine, batches)
        return loss if self.mean_over == "num_targets" else partial(_counted_once, loss)


def _counted_once(
    loss: Callable[[Any, Any], BatchLoss], engine: Network, batch: CountedBatch
) -> BatchLoss:
    """The loss of whole samples, which all ranks that divide rows know, on the one that counts."""
    result = loss(engine, batch)
    if batch.num_samples:
        return result
    nll = None if result.chosen_nll is None else 0.0 * result.chosen_nll
    return BatchLoss(0.0 * result.total, {n: c[:0] for n, c in result.columns.items()}, nll)


class AnswerLoss(NamedTuple):
    """A loss of pairs, or one of single answers, good or bad, which an add-on provides by name."""

    collator: Callable[[int], Collator]  # of a padding token's id, for a dry run
    # how samples lie in rows, from a setup and its engine; called on every rank
    make_layout: Callable[[Any, Any], Any]
    # from the stage's options, and what gives a batch's log-probabilities under the reference
    make_objective: Callable[[Any, Callable[[Any], Tensor]], Objective]
    # (2 P,) of a batch's answers, and of those that they are compared with
    logprobs: Callable[[Network, Any], Tensor]
    begin: Callable[[Any], None]  # says what is to be known of a setup's data
    unit: str = "answers"  # what messages call a sample
    passes: int = 1  # forward passes of its own, such as those of a divergence


def causal_lm_loss(engine: Network, batch: Batch) -> BatchLoss:
    """Summed cross-entropy of supervised tokens; ``engine`` is over a ``CausalLMLoss``."""
    sums, more = None, {}
    if batch.source_ids is not None:
        sums = torch.zeros(batch.num_sources, dtype=torch.float64, device=batch.target_ids.device)
        more = {"groups": GroupSums(batch.source_ids, sums)}
    loss = engine(
        input_ids=batch.input_ids,
        position_ids=batch.position_ids,
        segment_ids=batch.segment_ids,
        logit_positions=batch.logit_positions,
        target_ids=batch.target_ids,
        spans=batch.spans,
        **more,
    )
    return BatchLoss(loss, by_source=sums)


def describe_perplexity(loss: float, columns: Columns) -> dict[str, Any]:
    """``exp(loss)``; inf where that overflows."""
    return {"perplexity": math.exp(loss) if loss < 700 else math.inf}


SUPERVISED = Objective(causal_lm_loss, "num_targets", describe_perplexity, "perplexity")


def mean_of(values: Tensor) -> float | None:
    """The mean of (P,) values; None where there is none."""
    return float(values.double().mean()) if len(values) else None
