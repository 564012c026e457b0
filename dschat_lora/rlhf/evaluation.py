"""Looking at held-out prompts: what the actor answers, greedily and by sampling."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from dschat_lora.algos.advantages import response_sums
from dschat_lora.data.samples import PromptSample
from dschat_lora.engine.distributed import data_rank, data_world_size, device
from dschat_lora.generation.sampling import Sampling
from dschat_lora.report.log import jsonable, rlhf_eval_line
from dschat_lora.rlhf.batch import Response, collate
from dschat_lora.rlhf.diagnostics import Diagnostics
from dschat_lora.rlhf.engines import Engines
from dschat_lora.rlhf.experience import Experience, score_responses
from dschat_lora.rlhf.rollout import Generator
from dschat_lora.rlhf.setup import Setup


@dataclass
class Evaluator:
    """Answers the held-out prompts at a step, shows and records the result; keeps them all.

    The same random numbers are used every time, so that evaluations differ by the policy alone.
    """

    setup: Setup
    engines: Engines
    generator: Generator
    diagnostics: Diagnostics
    prompts: Sequence[PromptSample]
    results: dict[int, dict[str, Any]] = field(default_factory=dict)
    shown: list[dict[str, Any]] = field(default_factory=list)

    def __call__(self, step: int) -> None:
        """Evaluate after ``step`` optimizer steps, unless that was done; call on every rank."""
        if step in self.results or not self.prompts:
            return
        self.setup.run.interrupts.check()
        greedy, sampled = self._answers(do_sample=False), self._answers(do_sample=True)
        metrics = {
            **self._described(sampled),
            **{f"greedy_{name}": value for name, value in self._described(greedy).items()},
            "samples": len(self.prompts),
        }
        self.results[step] = metrics
        log = self.setup.run.log
        log.write("eval", step, metrics)
        log.say(rlhf_eval_line(step, metrics))
        self._keep_answers(greedy, "before" if not step else "after")
        for message in self.diagnostics.evaluation(metrics):
            log.write("event", step, {"event": "warning", "message": message})
            log.say(f"  warning      {message}")

    def before_and_after(self) -> dict[str, float]:
        """Rewards of the first and the last evaluation, for record and card."""
        if not self.results:
            return {}
        first, *_, last = [*self.results.values()] * 2
        names = [n for n in ("reward", "greedy_reward", "judge", "greedy_judge") if n in first]
        found = {f"{name} before": float(first[name]) for name in names}
        found |= {f"{name} after": float(last[name]) for name in names}
        return found | {"kl after": float(last["kl"])}

    def state(self) -> dict[str, Any]:
        """As JSON."""
        results = {str(step): jsonable(metrics) for step, metrics in self.results.items()}
        return {"results": results, "shown": self.shown}

    def restore(self, state: dict[str, Any]) -> None:
        """Become what :meth:`state` returned."""
        self.results = {int(step): metrics for step, metrics in state["results"].items()}
        self.shown = list(state["shown"])

    def _answers(self, *, do_sample: bool) -> list[Response]:
        config = self.setup.config
        self.engines.eval()
        return self.generator(
            self.prompts,
            Sampling(
                max_new_tokens=config.data.max_answer_seq_len,
                do_sample=do_sample,
                temperature=config.batch.temperature,
            ),
            num_generations=1,
            key=("eval", config.run.seed),
        )

    def _described(self, responses: list[Response]) -> dict[str, float]:
        """Means over the responses."""
        experience = self._look(responses)
        counts = experience.counts
        kl = response_sums(experience.kl(), experience.mask)[counts]
        found = {
            "reward": _mean(experience.scores[counts]),
            "reward_standard_error": _standard_error(experience.scores[counts]),
            "kl": _mean(kl),
            "response_length": _mean(torch.tensor([float(len(r.tokens)) for r in responses])),
            "eos_rate": sum(r.ended for r in responses) / len(responses),
        }
        if self.setup.judge is not None:
            judged = self.setup.judge(responses, device())
            judged = judged[~judged.isnan()]
            found["judge"] = _mean(judged)
            found["judge_standard_error"] = _standard_error(judged)
        return found

    def _look(self, responses: list[Response]) -> Experience:
        """Scores and log-probabilities, without an update to come."""
        size = self.setup.config.batch.per_device_training_batch_size
        mine = list(range(len(responses)))[data_rank() :: data_world_size()]
        count = math.ceil(math.ceil(len(responses) / data_world_size()) / size)
        pad_id = int(self.setup.tokenizer.pad_token_id)
        batches = [
            collate(responses, mine[n * size : (n + 1) * size], pad_id) for n in range(count)
        ]
        return score_responses(
            self.engines,
            responses,
            batches,
            reward_function=self.setup.function,
            with_old=True,
        )

    def _keep_answers(self, responses: list[Response], when: str) -> None:
        """Show the first few; of those after training, the latest are kept."""
        tokenizer, log = self.setup.tokenizer, self.setup.run.log
        texts = [
            {
                "when": when,
                "prompt": tokenizer.decode(each.prompt),
                "answer": tokenizer.decode(each.tokens),
            }
            for each in responses[: self.setup.config.run.sample_generations]
        ]
        self.shown = [*(text for text in self.shown if text["when"] != when), *texts]
        for text in texts:
            log.say(f"  {when:<7}{text['prompt']!r} -> {text['answer']!r}")
        self.setup.run.record.update({"answers": self.shown})


def make_evaluator(
    setup: Setup, engines: Engines, generator: Generator, diagnostics: Diagnostics
) -> Evaluator:
    """Of the first held-out prompts."""
    held_out = setup.prompts.eval
    prompts = [held_out[n] for n in range(min(setup.config.eval_prompts, len(held_out)))]
    return Evaluator(setup, engines, generator, diagnostics, prompts)


def _mean(values: Tensor) -> float:
    return float(values.double().mean()) if len(values) else math.nan


def _standard_error(values: Tensor) -> float:
    if len(values) < 2:
        return math.nan
    return float(values.double().std()) / math.sqrt(len(values))
