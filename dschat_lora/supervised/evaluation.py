"""Looking at held-out rows before, during and after training: metrics, and a few answers."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from dschat_lora.config.stages import SupervisedConfig
from dschat_lora.data.loader import Collator, Samples, eval_batches
from dschat_lora.data.packing import PackedRow
from dschat_lora.data.store import TokenSet
from dschat_lora.engine.build import TrainEngine
from dschat_lora.engine.distributed import data_rank, data_world_size, world_size
from dschat_lora.generation.samples import answer
from dschat_lora.models.backbone import BackboneModel
from dschat_lora.models.causal_lm import Tokenizer
from dschat_lora.report.log import eval_line, jsonable
from dschat_lora.runtime.run import Run
from dschat_lora.supervised.loop import evaluate
from dschat_lora.supervised.objectives import Objective, mean_of

MAX_ANSWER_TOKENS = 64


@dataclass
class Evaluator:
    """Evaluates the held-out rows at a step, shows and records the result; keeps them all."""

    engine: TrainEngine[BackboneModel]
    samples: Samples
    rows: Sequence[PackedRow]
    collate: Collator
    objective: Objective
    config: SupervisedConfig
    run: Run[SupervisedConfig]
    results: dict[int, dict[str, Any]] = field(default_factory=dict)

    def __call__(self, step: int) -> None:
        """Evaluate after ``step`` optimizer steps, unless that was done; call on every rank."""
        if step in self.results or not self.rows:
            return
        batches = eval_batches(
            self.samples,
            rows=self.rows,
            batch_size=self.config.batch.per_device_eval_batch_size,
            rank=data_rank(),
            world_size=data_world_size(),
            collate=self.collate,
        )
        limited = islice(batches, self.config.run.eval_iters or None)
        result = evaluate(self.engine, self._interruptible(limited), self.objective)
        metrics = {
            "loss": result.loss,
            "tokens": result.counts.num_targets,
            "samples": result.counts.num_samples,
            **{name: mean_of(column) for name, column in result.columns.items()},
            **self.objective.describe(result.loss, result.columns),
        }
        self.results[step] = metrics
        self.run.log.write("eval", step, metrics)
        self.run.log.say(eval_line(step, metrics))

    def state(self) -> dict[str, Any]:
        """As JSON."""
        return {str(step): jsonable(metrics) for step, metrics in self.results.items()}

    def restore(self, state: dict[str, Any]) -> None:
        """Become what :meth:`state` returned."""
        self.results = {int(step): metrics for step, metrics in state.items()}

    def _interruptible(self, batches: Iterable[Any]) -> Iterator[Any]:
        for batch in batches:
            self.run.interrupts.check()
            yield batch

    def before_and_after(self) -> dict[str, float]:
        """The headline metric of the first and the last evaluation, for record and card."""
        if not self.results:
            return {}
        name = self.objective.headline
        values = [float(metrics[name]) for metrics in self.results.values()]
        return {f"{name} before": values[0], f"{name} after": values[-1]}


@dataclass
class SampleAnswers:
    """Greedy answers to a few held-out prompts, shown and recorded before and after."""

    engine: TrainEngine[BackboneModel]
    prompts: Sequence[Sequence[int]]
    tokenizer: Tokenizer
    run: Run[SupervisedConfig]
    shown: list[dict[str, str]] = field(default_factory=list)

    def show(self, when: str) -> None:
        """Answer, print and record under ``when``, unless that was done; call on every rank."""
        if not self.prompts or any(texts["when"] == when for texts in self.shown):
            return
        self.engine.eval()
        answers = answer(
            self.engine.module.model,
            self.tokenizer,
            self.prompts,
            max_new_tokens=MAX_ANSWER_TOKENS,
            device=self.engine.device,
            synced=self.engine.zero_stage == 3 and world_size() > 1,
        )
        for prompt, ids in zip(self.prompts, answers, strict=True):
            texts = {
                "when": when,
                "prompt": self.tokenizer.decode(prompt),
                "answer": self.tokenizer.decode(ids),
            }
            self.shown.append(texts)
            self.run.log.say(f"  {when:<7}{texts['prompt']!r} -> {texts['answer']!r}")
        self.run.record.update({"answers": self.shown})

    def state(self) -> dict[str, Any]:
        """As JSON."""
        return {"shown": self.shown}

    def restore(self, state: dict[str, Any]) -> None:
        """Become what :meth:`state` returned."""
        self.shown = list(state["shown"])


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
