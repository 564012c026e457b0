"""Evaluation on held-out prompts: the actor's answers, greedy and sampled, and their rewards."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from dschat_lora.algos.advantages import response_sums
from dschat_lora.engine.distributed import data_rank, data_world_size
from dschat_lora.generation.sampling import Sampling
from dschat_lora.report.log import rlhf_eval_line
from dschat_lora.rl.draw.generator import Generator
from dschat_lora.rl.learn.engines import Engines, make_experience, with_reward_model
from dschat_lora.rl.loop.parts import Parts
from dschat_lora.rl.loop.setup import RlhfSetup
from dschat_lora.rl.response.batch import collate
from dschat_lora.rl.response.response import Response
from dschat_lora.rl.score.scores import RewardFunctions
from dschat_lora.rl.score.user_functions import TrainerState
from dschat_lora.rl.watch.metrics import rewards_by_name
from dschat_lora.runtime.loop import AnswerLog, EvalResults


@dataclass
class RlhfEvaluator:
    """Answers the held-out prompts after a step, and keeps the results.

    The same random numbers are used every time, so that evaluations differ by the policy alone.
    """

    setup: RlhfSetup
    engines: Engines
    generator: Generator
    parts: Parts
    state_of_run: Callable[[], TrainerState]
    iteration: Callable[[], int]

    def __post_init__(self) -> None:
        run, held_out = self.setup.run, self.setup.data.prompts.eval
        count = min(self.setup.config.eval_prompts, len(held_out))
        self._prompts = [held_out[n] for n in range(count)]
        self.results = EvalResults(run, lambda *of: rlhf_eval_line(self.iteration(), *of))
        self._shown = AnswerLog(run, self.setup.tokenizer)

    def __call__(self, step: int) -> None:
        """Evaluate after ``step`` optimizer steps, unless that was done; call on every rank."""
        if step in self.results or not self._prompts:
            return
        run = self.setup.run
        run.interrupts.check()
        # One after the other: a player may keep what is of the latest responses.
        greedy = self._answers(do_sample=False)
        of_greedy, greedy_values = self._described(greedy)
        sampled, values = self._described(self._answers(do_sample=True))
        metrics = {
            **sampled,
            **{f"greedy_{name}": value for name, value in of_greedy.items()},
            "samples": len(self._prompts),
        }
        values |= {f"greedy_{name}": column for name, column in greedy_values.items()}
        self.results.add(step, metrics, values)
        shown = greedy[: run.config.run.sample_generations]
        # Of those after training, the latest are kept.
        self._shown.show("after" if step else "before", ((r.prompt, r.tokens) for r in shown))
        for message in self.parts.warnings("after_evaluation", metrics):
            run.log.report_event(step, "warning", message)

    def before_and_after(self) -> dict[str, float]:
        """Rewards of the first and the last evaluation, for record and card."""
        rewards = self.results.before_and_after("reward", "greedy_reward", "judge", "greedy_judge")
        if not rewards:
            return {}
        *_, last = self.results.by_step.values()
        return rewards | {"kl after": float(last["kl"])}

    def state(self) -> dict[str, Any]:
        return {"results": self.results.state(), **self._shown.state()}

    def restore(self, state: dict[str, Any]) -> None:
        self.results.restore(state["results"])
        self._shown.restore(state)

    def _answers(self, *, do_sample: bool) -> list[Response]:
        config = self.setup.config
        self.engines.eval()
        responses = self.generator(
            self._prompts,
            Sampling(
                max_new_tokens=config.data.max_answer_seq_len,
                do_sample=do_sample,
                temperature=config.batch.temperature,
            ),
            num_generations=1,
            key=("eval", config.run.seed),
        )
        return self.setup.reference.reading(self.generator.player.checked(responses))

    def _described(self, responses: list[Response]) -> tuple[dict[str, float], dict[str, Tensor]]:
        """Means over the responses, scored without an update to come, and (N,) scores of each."""
        setup, world = self.setup, data_world_size()
        size = setup.config.batch.per_device_training_batch_size
        pad_id = int(setup.tokenizer.pad_token_id)
        mine = range(len(responses))[data_rank() :: world]
        starts = range(0, math.ceil(len(responses) / world), size)
        batches = [collate(responses, mine[start : start + size], pad_id) for start in starts]
        state = self.state_of_run()
        scorer = with_reward_model(setup.scoring.scorer, self.engines, lambda _: batches)
        scores = scorer(responses, state)
        experience = make_experience(self.engines, responses, batches, scores).scored()
        counts = experience.counts
        kl = response_sums(experience.kl(), experience.mask)[counts]
        played = [each for each in responses if not each.episode.failure]
        metrics = {
            **_mean("reward", experience.scores[counts]),
            **(rewards_by_name(experience) if counts.any() else {}),
            "kl": float(kl.double().mean()),
            "response_length": sum(r.num_actor_tokens for r in played) / len(played),
            **setup.config.response_metrics(responses, played),
            "eos_rate": sum(r.ended for r in played) / len(played),
        }
        values = {"reward": experience.scores.masked_fill(~counts, math.nan)}
        if setup.scoring.judge is not None:
            judged = RewardFunctions((setup.scoring.judge,))(responses, state).total
            values["judge"] = judged
            metrics |= _mean("judge", judged[~judged.isnan()])
        return metrics, values


def _mean(name: str, values: Tensor) -> dict[str, float]:
    """The mean of (N,) values and its standard error; NaN where they are too few."""
    values, count = values.double(), len(values)
    error = float(values.std()) / math.sqrt(count) if count > 1 else math.nan
    return {name: float(values.mean()), f"{name}_standard_error": error}
