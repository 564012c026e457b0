"""Options of stages and of ``generate``, with what they check and do there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from dschat_lora.config.groups import require_numbers
from dschat_lora.config.options import option

if TYPE_CHECKING:
    from dschat_lora.config.stages import SupervisedConfig
    from dschat_lora.config.verbs import GenerateConfig
    from dschat_lora.engine.build import TrainEngine
    from dschat_lora.models.backbone import BackboneModel
    from dschat_lora.supervised.setup import SupervisedSetup


@dataclass(frozen=True)
class TaskOptions:
    """Tasks that a model is measured by while it trains."""

    eval_tasks: tuple[str, ...] = option(
        (),
        help="SFT and DPO: tasks of lm-evaluation-harness, or directories of task files, to run at "
        "each evaluation; needs dschat_lora[evaluation]",
    )
    eval_tasks_limit: int = option(
        0, help="maximum number of questions from each of --eval_tasks; 0: all"
    )

    def __post_init__(self) -> None:
        require_numbers(self, ">= 0", "eval_tasks_limit")
        if self.eval_tasks_limit and not self.eval_tasks:
            raise ValueError(f"--eval_tasks_limit {self.eval_tasks_limit} is for --eval_tasks")

    def check(self, config: SupervisedConfig) -> None:
        """Refuse a model that answers nothing, or of which no process has all."""
        from dschat_lora.runtime.checks import require_packages

        if not self.eval_tasks:
            return
        if config.task == "SEQ_CLS":
            raise ValueError(
                "--eval_tasks need a language model, but this stage trains a reward model"
            )
        divided = {"tensor_parallel_size": 1, "context_parallel_size": 1, "zero_stage": 2}
        for name, most in divided.items():
            size = getattr(config.parallel, name)
            if (size or 0) > most:
                raise ValueError(
                    f"--eval_tasks need the whole model in each process: --{name} must be at most "
                    f"{most}, got {size}; dschat-lora eval --tasks takes checkpoints"
                )
        require_packages("--eval_tasks", "lm_eval", extra="evaluation")

    def before_models(self) -> None:
        """Refuse names of no task before a model is loaded."""
        if self.eval_tasks:
            from dschat_lora.addons.evaluation.harness import find_tasks

            find_tasks(self.eval_tasks, option="--eval_tasks")

    def measures(
        self, setup: SupervisedSetup, engine: TrainEngine[BackboneModel]
    ) -> Callable[[], dict[str, float]] | None:
        """What measures the tasks at an evaluation; None where there are none."""
        if not self.eval_tasks:
            return None
        from dschat_lora.addons.evaluation.harness import task_measures

        return task_measures(self.eval_tasks, self.eval_tasks_limit or None, setup, engine)


@dataclass(frozen=True)
class KeepOptions:
    """Rows to train on, in place of plain answers."""

    keep: Literal["best", "pair", "all"] | None = option(
        None,
        help="write training rows selected by reward: best keeps the best answer to each prompt, "
        "for sft; pair the best and the worst one, for dpo; all every answer, for sft",
    )
    reward_model: str | None = option(None, help="reward model that scores the answers of --keep")
    reward_function: str | None = option(
        None,
        help="module:function that scores them instead, as in step 3, or builtin:NAME",
        runs="object",
    )
    min_reward: float | None = option(
        None,
        help="keep only answers with at least this score (rejection sampling); default: keep all",
    )

    def __post_init__(self) -> None:
        rewards = [n for n in ("reward_model", "reward_function") if getattr(self, n) is not None]
        if self.keep is None:
            for name in (*rewards, *(["min_reward"] if self.min_reward is not None else [])):
                raise ValueError(f"--{name} needs --keep: best, pair or all")
        elif len(rewards) != 1:
            raise ValueError(
                f"--keep {self.keep} needs --reward_model or --reward_function to score the "
                f"answers, and {'both are' if rewards else 'neither is'} given"
            )

    def check(self, config: GenerateConfig) -> None:
        """Refuse to choose from one answer, and by what cannot score."""
        from dschat_lora.addons.evaluation.validation import check_function
        from dschat_lora.runtime.checks import find_of_kind

        if self.keep not in (None, "all") and config.num_return_sequences == 1:
            raise ValueError(
                f"--keep {self.keep} selects among several answers, but --num_return_sequences is "
                "1: add --do_sample --num_return_sequences 8"
            )
        check_function("reward_function", self.reward_function)
        if self.reward_model is not None:
            find_of_kind(self.reward_model, ("SEQ_CLS",), option="--reward_model")

    def generate(self, config: GenerateConfig) -> bool:
        """Whether rows were asked for, and written."""
        from dschat_lora.runtime.stage_main import late

        if self.keep is None:
            return False
        late("addons.evaluation.best_of_n:write_kept_answers")(config, self)
        return True
