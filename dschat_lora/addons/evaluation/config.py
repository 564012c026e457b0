"""Options of ``eval`` and ``score``."""

from dataclasses import dataclass
from typing import Any

from dschat_lora.config.addons import addon_options
from dschat_lora.config.groups import require, require_numbers
from dschat_lora.config.options import group, option
from dschat_lora.config.verbs import ReadingConfig


@dataclass(frozen=True)
class EvalConfig(ReadingConfig):
    """Measure a model on rows of data.

    Of a language model the perplexity of the answers and, of pairs, how often the chosen answer is
    the more probable one; of a reward model its scores and how often it prefers the chosen one.
    With --reward_model or --judge_function also the scores of the answers that the model itself
    gives, their mean and its standard error.
    """

    json: bool = option(False, help="JSON on standard output")
    reward_model: str | None = option(
        None, help="reward model that scores the model's own greedy answers to the prompts"
    )
    judge_function: str | None = option(
        None,
        help="module:function that scores the same answers, as a reward function of step 3 does; "
        "builtin:NAME for one that comes along",
        runs="object",
    )
    max_new_tokens: int = option(128, help="tokens of such an answer at most")
    limit: int = option(0, help="rows to take at most, of each task too, the first ones; 0: all")
    tasks: tuple[str, ...] = option(
        (),
        help="tasks of lm-evaluation-harness, or directories of task files of your own, in place "
        "of rows; needs dschat_lora[evaluation]",
    )
    num_fewshot: int | None = option(
        None, help="worked examples before each question of --tasks; default: as the task says"
    )
    apply_chat_template: bool = option(
        False, help="questions of --tasks are a user's messages, rendered by the chat template"
    )
    addons: Any = group(addon_options("eval"))

    def __post_init__(self) -> None:
        super().__post_init__()
        given = bool(self.data_path) or bool(self.tasks)
        require(given, "data_path", "nothing", "a file or more to evaluate on, or --tasks")
        if self.tasks:
            for name in ("data_path", "columns", "reward_model", "judge_function"):
                if not getattr(self, name):
                    continue
                raise ValueError(f"--tasks have their own questions and measures: drop --{name}")
        elif self.num_fewshot is not None or self.apply_chat_template:
            name = "apply_chat_template" if self.num_fewshot is None else "num_fewshot"
            raise ValueError(f"--{name} is for --tasks, and none is given")
        require_numbers(self, ">= 0", "num_fewshot")
        require_numbers(self, ">= 1", "max_new_tokens")
        require_numbers(self, ">= 0", "limit")


@dataclass(frozen=True)
class ScoreConfig(ReadingConfig):
    """Score the answers of data files by a reward model, one JSON line for each row."""

    model_name_or_path: str = option(
        help="output directory of a reward model's training, its adapter/ or model/, a checkpoint, "
        "or a hub name; it may stand first, without the option"
    )
    data_path: tuple[str, ...] = option(
        help="files (.jsonl .json .csv .parquet .arrow), directories of them, or hub data sets"
    )
    output_path: str | None = option(None, help="JSONL file to write; default: standard output")
    addons: Any = group(addon_options("score"))

    def __post_init__(self) -> None:
        super().__post_init__()
        require(bool(self.data_path), "data_path", "nothing", "a file or more to score")
