"""Results of a run's evaluations: metrics by step, and sample answers, shown and recorded."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dschat_lora.config.stages import StageConfig
from dschat_lora.models.loading import Tokenizer
from dschat_lora.report.log import jsonable
from dschat_lora.runtime.run import OpenRun


@dataclass
class EvalResults:
    """Metrics of each evaluation by optimizer step, saved and restored with the run."""

    run: OpenRun[StageConfig]
    line: Callable[[int, Mapping[str, Any]], str]  # an evaluation for a person
    by_step: dict[int, dict[str, Any]] = field(default_factory=dict)

    def __contains__(self, step: int) -> bool:
        return step in self.by_step

    @property
    def last_step(self) -> int:
        """Optimizer steps made before the latest evaluation."""
        return max(self.by_step, default=0)

    def add(self, step: int, metrics: dict[str, Any]) -> None:
        """Keep, log and show the metrics after ``step`` optimizer steps."""
        self.by_step[step] = metrics
        self.run.log.write("eval", step, metrics)
        self.run.log.say_metrics(self.line(step, metrics))

    def before_and_after(self, *names: str) -> dict[str, float]:
        """These metrics of the first and the last evaluation, for record and card."""
        if not self.by_step:
            return {}
        first, *_, last = [*self.by_step.values()] * 2
        known = [name for name in names if name in first]
        before = {f"{name} before": float(first[name]) for name in known}
        return before | {f"{name} after": float(last[name]) for name in known}

    def state(self) -> dict[str, Any]:
        return {str(step): jsonable(metrics) for step, metrics in self.by_step.items()}

    def restore(self, state: dict[str, Any]) -> None:
        self.by_step = {int(step): metrics for step, metrics in state.items()}


@dataclass
class AnswerLog:
    """Sample answers and losses of tokens before and after training, kept with the run."""

    run: OpenRun[StageConfig]
    tokenizer: Tokenizer
    shown: list[dict[str, str]] = field(default_factory=list)
    losses: list[dict[str, Any]] = field(default_factory=list)

    def has(self, when: str) -> bool:
        """Whether there are answers from ``when``."""
        return any(text["when"] == when for text in self.shown)

    def show(self, when: str, answers: Iterable[tuple[Sequence[int], Sequence[int]]]) -> None:
        """Print and record (prompt, answer) token ids, in the place of those from ``when``."""
        decode = self.tokenizer.decode
        texts = [
            {"when": when, "prompt": decode(prompt), "answer": decode(answer)}
            for prompt, answer in answers
        ]
        self.shown = [*(text for text in self.shown if text["when"] != when), *texts]
        for text in texts:
            self.run.log.say(f"  {when:<7}{text['prompt']!r} -> {text['answer']!r}")
        self.run.record.update({"answers": self.shown, "token_losses": self.losses})

    def add_losses(
        self,
        when: str,
        name: str,
        ids: Sequence[int],
        supervised: Sequence[bool],
        losses: Sequence[float | None],
    ) -> None:
        """Keep the loss of each token of a held-out row; :meth:`show` records it."""
        row = {
            "when": when,
            "name": name,
            "tokens": [self.tokenizer.decode([each]) for each in ids],
            "supervised": [int(each) for each in supervised],
            "loss": [None if each is None else round(each, 4) for each in losses],
        }
        self.losses.append(row)

    def state(self) -> dict[str, Any]:
        return {"shown": self.shown, "losses": self.losses}

    def restore(self, state: dict[str, Any]) -> None:
        self.shown = list(state["shown"])
        self.losses = list(state.get("losses", ()))  # absent before 0.2
