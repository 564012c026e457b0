"""Looking at held-out rows before, during and after training: perplexity, and a few answers."""

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from itertools import islice
from typing import Any

from dschat_lora.config import RunConfig, SupervisedConfig
from dschat_lora.data.loader import eval_batches
from dschat_lora.data.packing import make_rows
from dschat_lora.data.store import TokenSet
from dschat_lora.engine.build import TrainEngine
from dschat_lora.engine.distributed import rank, world_size
from dschat_lora.models.causal_lm import Tokenizer
from dschat_lora.models.generate import answer
from dschat_lora.perf.throughput import StepCounts
from dschat_lora.report.log import eval_line
from dschat_lora.run import Output
from dschat_lora.trainer import Evaluation, LossFunction, evaluate

MAX_ANSWER_TOKENS = 64


@dataclass
class Evaluator:
    """Evaluates the held-out rows at a step, shows and records the result; keeps them all."""

    engine: TrainEngine
    samples: TokenSet
    loss_function: LossFunction
    config: SupervisedConfig
    tokenizer: Tokenizer
    output: Output
    packing: bool
    results: dict[int, Evaluation] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._rows = make_rows(
            self.samples.lengths,
            max_seq_len=self.config.data.max_seq_len,
            packing=self.packing,
            seed=self.config.run.seed,
        )

    def __call__(self, step: int) -> None:
        """Evaluate after ``step`` optimizer steps, unless that was done; call on every rank."""
        if step in self.results or not len(self.samples):
            return
        batches = eval_batches(
            self.samples,
            rows=self._rows,
            batch_size=self.config.batch.per_device_eval_batch_size,
            rank=rank(),
            world_size=world_size(),
            pad_id=int(self.tokenizer.pad_token_id),
        )
        limited = islice(batches, self.config.run.eval_iters or None)
        result = evaluate(self.engine, self._interruptible(limited), self.loss_function)
        self.results[step] = result
        metrics = {
            "perplexity": result.perplexity,
            "loss": result.loss,
            "tokens": result.counts.num_targets,
            "samples": result.counts.num_samples,
        }
        self.output.log.write("eval", step, metrics)
        self.output.log.say(eval_line(step, metrics))

    def state(self) -> dict[str, Any]:
        """As JSON."""
        return {str(step): asdict(result) for step, result in self.results.items()}

    def restore(self, state: dict[str, Any]) -> None:
        """Become what :meth:`state` returned."""
        self.results = {
            int(step): Evaluation(float(result["loss"]), StepCounts(**result["counts"]))
            for step, result in state.items()
        }

    def _interruptible(self, batches: Iterable[Any]) -> Iterator[Any]:
        for batch in batches:
            self.output.interrupts.check()
            yield batch

    def before_and_after(self) -> dict[str, float]:
        """Held-out perplexity of the first and the last evaluation, for record and card."""
        if not self.results:
            return {}
        values = list(self.results.values())
        return {
            "perplexity before": values[0].perplexity,
            "perplexity after": values[-1].perplexity,
        }


@dataclass
class SampleAnswers:
    """Greedy answers to a few held-out prompts, shown and recorded before and after."""

    engine: TrainEngine
    samples: TokenSet
    tokenizer: Tokenizer
    run: RunConfig
    output: Output
    shown: list[dict[str, str]] = field(default_factory=list)

    def show(self, when: str) -> None:
        """Answer, print and record under ``when``, unless that was done; call on every rank."""
        prompts = self._prompts()
        if not prompts or any(texts["when"] == when for texts in self.shown):
            return
        self.engine.eval()
        model: Any = self.engine.module
        answers = answer(
            model.model,
            self.tokenizer,
            prompts,
            max_new_tokens=MAX_ANSWER_TOKENS,
            device=self.engine.device,
            synced=self.engine.zero_stage == 3 and world_size() > 1,
        )
        for prompt, ids in zip(prompts, answers, strict=True):
            texts = {
                "when": when,
                "prompt": self.tokenizer.decode(prompt),
                "answer": self.tokenizer.decode(ids),
            }
            self.shown.append(texts)
            self.output.log.say(f"  {when:<7}{texts['prompt']!r} -> {texts['answer']!r}")
        self.output.record.update({"answers": self.shown})

    def state(self) -> dict[str, Any]:
        """As JSON."""
        return {"shown": self.shown}

    def restore(self, state: dict[str, Any]) -> None:
        """Become what :meth:`state` returned."""
        self.shown = list(state["shown"])

    def _prompts(self) -> list[list[int]]:
        """Tokens before the first supervised one, of the first rows that have any."""
        prompts: list[list[int]] = []
        for index in range(len(self.samples)):
            if len(prompts) == self.run.sample_generations:
                break
            sample = self.samples[index]
            length = int((sample.labels >= 0).argmax())
            if length:
                prompts.append(sample.input_ids[:length].tolist())
        return prompts
