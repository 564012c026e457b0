"""Looking at held-out rows before, during and after training: perplexity, and a few answers."""

from dataclasses import dataclass, field
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
        result = evaluate(self.engine, limited, self.loss_function)
        self.results[step] = result
        metrics = {
            "perplexity": result.perplexity,
            "loss": result.loss,
            "tokens": result.counts.num_targets,
            "samples": result.counts.num_samples,
        }
        self.output.log.write("eval", step, metrics)
        self.output.log.say(eval_line(step, metrics))

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
        """Answer, print and record under ``when``; call on every rank."""
        prompts = self._prompts()
        if not prompts:
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
