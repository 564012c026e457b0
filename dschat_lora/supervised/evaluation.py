"""Evaluation on held-out rows before, during and after training: metrics, and sample answers."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import nn

from dschat_lora.algos.logprobs import token_logprobs
from dschat_lora.config.addons import groups_of
from dschat_lora.data.loader import eval_batches
from dschat_lora.data.media import FIRST_ID
from dschat_lora.data.packing import PackedRow
from dschat_lora.data.samples import PairSample, Samples, SequenceSample, TokenSet
from dschat_lora.engine.build import TrainEngine
from dschat_lora.engine.distributed import world_size
from dschat_lora.generation.greedy import greedy_decode
from dschat_lora.lora.parallel import whole_sequences
from dschat_lora.models.backbone import BackboneModel
from dschat_lora.models.loading import end_ids
from dschat_lora.perf.throughput import StepCounts
from dschat_lora.report.log import eval_line
from dschat_lora.runtime.loop import AnswerLog, EvalResults
from dschat_lora.supervised.batching import BatchLayout, row_share, rows_of
from dschat_lora.supervised.loop import Evaluation, evaluate
from dschat_lora.supervised.objectives import SUPERVISED, Objective, mean_of
from dschat_lora.supervised.setup import SupervisedSetup

MAX_ANSWER_TOKENS = 64


class SupervisedEvaluator:
    """Evaluates the held-out rows after a step, and keeps the results."""

    def __init__(
        self,
        setup: SupervisedSetup,
        engine: TrainEngine[BackboneModel],
        samples: Samples,
        batch_layout: BatchLayout,
        objective: Objective,
    ) -> None:
        self._engine, self._samples, self._objective = engine, samples, objective
        lengths = batch_layout.collate.positions(setup.data.eval)
        self._rows = rows_of(setup, lengths, batch_layout)
        #: of a mixture whose loss is a mean over tokens: rows of each source alone
        self._by_source: dict[str, list[tuple[int, ...]]] = {}
        names, first = setup.data.eval_sources, 0
        if setup.config.data.is_mixture and len(names) > 1 and objective is SUPERVISED:
            for name, size in names.items():
                own = rows_of(setup, lengths[first : first + size], batch_layout)
                self._by_source[name] = [tuple(first + index for index in row) for row in own]
                first += size
        self._collate, self._config = batch_layout.collate, setup.config
        self._interrupts, self._share = setup.run.interrupts, row_share(setup)
        self.results = EvalResults(setup.run, eval_line)
        # of add-ons
        measures = (each.measures(setup, engine) for each in groups_of(setup.config, "measures"))
        self._measures = [measure for measure in measures if measure is not None]

    def __call__(self, step: int) -> None:
        """Evaluate after ``step`` optimizer steps, unless that was done; call on every rank."""
        if step in self.results or not self._rows:
            return
        parts = {
            name: evaluate(self._engine, self._batches(rows), self._objective)
            for name, rows in self._by_source.items()
            if rows
        }
        if parts:
            counts = sum((part.counts for part in parts.values()), StepCounts())
            total = sum(part.loss * part.counts.num_targets for part in parts.values())
            result = Evaluation(total / max(1, counts.num_targets), counts, {})
        else:
            result = evaluate(self._engine, self, self._objective)
        metrics = {
            "loss": result.loss,
            **{f"loss/{name}": part.loss for name, part in parts.items()},
            "tokens": result.counts.num_targets,
            "samples": result.counts.num_samples,
            **result.means,
            **self._objective.combine({n: mean_of(c) for n, c in result.columns.items()}),
            **self._objective.describe(result.loss, result.columns),
        }
        for measure in self._measures:
            metrics |= measure()
        columns = result.columns if "accuracy" in metrics else {}
        of_each = {name: columns[name] for name in ("accuracy",) if name in columns}
        self.results.add(step, metrics, of_each)

    def check_finite(self, step: int) -> None:
        """Refuse to begin with, or to pass off as trained, a model that cannot be evaluated.

        Raises:
            ValueError: if the loss after ``step`` optimizer steps is not finite.
        """
        loss = float(self.results.by_step.get(step, {}).get("loss", 0.0))
        if not math.isfinite(loss):
            how = "the learning rate may be too high" if step else "try --dtype bf16 or fp32"
            raise ValueError(f"the held-out loss after step {step} is {loss}: {how}")

    def __iter__(self) -> Iterator[Any]:
        """This rank's batches, each time anew."""
        return self._batches(self._rows)

    def _batches(self, rows: Sequence[PackedRow]) -> Iterator[Any]:
        batches = eval_batches(
            self._samples,
            rows=rows,
            batch_size=self._config.batch.per_device_eval_batch_size,
            **self._share,
            collate=self._collate,
        )
        for batch in islice(batches, self._config.run.eval_iters or None):
            self._interrupts.check()
            yield batch

    def before_and_after(self) -> dict[str, float]:
        """The headline metric of the first and the last evaluation, for record and card."""
        return self.results.before_and_after(self._objective.headline)


@dataclass(frozen=True)
class ShownSequence:
    """A held-out sequence, cut to ``MAX_TOKENS``."""

    name: str  # "chosen" or "rejected" of a pair
    ids: list[int]
    supervised: list[bool]  # whether the loss is taken on the token


@dataclass
class SampleAnswers:
    """Greedy answers to a few held-out prompts, and losses of tokens, before and after training."""

    engine: TrainEngine[BackboneModel]
    prompts: Sequence[Sequence[int]]
    answers: AnswerLog
    rows: Sequence[ShownSequence] = ()  # whose tokens' losses are recorded

    def show(self, when: str) -> None:
        """Answer, print and record under ``when``, unless that was done; call on every rank."""
        if not self.prompts or self.answers.has(when):
            return
        self.engine.eval()
        answers = greedy_decode(
            self.engine.module.model,
            self.answers.tokenizer,
            self.prompts,
            eos_ids=end_ids(self.answers.tokenizer),
            max_new_tokens=MAX_ANSWER_TOKENS,
            device=self.engine.device,
            synced=self.engine.zero_stage == 3 and world_size() > 1,
        )
        losses = token_losses(self.engine, self.rows)
        for row, each in zip(self.rows, losses, strict=True):
            fields = {
                "when": when,
                "name": row.name,
                "tokens": [self.answers.tokenizer.decode([token]) for token in row.ids],
                "supervised": [int(on) for on in row.supervised],
                "loss": [None if loss is None else round(loss, 4) for loss in each],
            }
            self.answers.losses.append(fields)
        self.answers.show(when, zip(self.prompts, answers, strict=True))


def first_prompts(samples: TokenSet, count: int) -> list[list[int]]:
    """Tokens before the first answer: the first ``count`` that differ, of samples or pairs."""
    prompts: list[list[int]] = []
    for index in range(len(samples)):
        if len(prompts) == count:
            break
        ids = samples[index].prompt.tolist()
        if ids and ids not in prompts:
            prompts.append(ids)
    return prompts


MAX_TOKENS = 256  # of a sequence that is shown


def first_sequences(samples: TokenSet, count: int) -> list[ShownSequence]:
    """The sequences of the first ``count`` samples or pairs."""
    shown = []
    for sample in (samples[n] for n in range(min(count, len(samples)))):
        if isinstance(sample, SequenceSample):
            shown.append(("", sample.input_ids.tolist(), sample.supervised.tolist()))
        elif isinstance(sample, PairSample):
            for name, ids in (("chosen", sample.chosen), ("rejected", sample.rejected)):
                answer = [n >= sample.prompt_length for n in range(len(ids))]
                shown.append((name, ids.tolist(), answer))
    return [ShownSequence(name, ids[:MAX_TOKENS], on[:MAX_TOKENS]) for name, ids, on in shown]


@torch.no_grad()
def token_losses(
    engine: TrainEngine[BackboneModel], sequences: Sequence[ShownSequence]
) -> list[list[float | None]]:
    """-log p of each token after those before it, in nats. Call on every rank.

    None of the first and of what stands for inputs beside text. The engine is in evaluation mode.
    """
    model: nn.Module = engine.module.model
    of_sequences: list[list[float | None]] = []
    with whole_sequences(model):
        for each in sequences:
            ids = torch.tensor([each.ids], device=engine.device)
            logits = model(input_ids=ids, use_cache=False).logits[0, :-1]
            # Nothing predicts what is no token of the vocabulary.
            beside = ids[0, 1:] >= FIRST_ID
            logprobs = token_logprobs(logits, ids[0, 1:].masked_fill(beside, 0)).tolist()
            losses = [None if b else -p for b, p in zip(beside.tolist(), logprobs, strict=True)]
            of_sequences.append([None, *losses])
    return of_sequences
