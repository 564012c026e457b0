"""Options of ``eval`` and ``score``."""

from dataclasses import dataclass
from typing import Any

from dschat_lora.config.addons import addon_options
from dschat_lora.config.groups import require, require_numbers
from dschat_lora.config.options import group, option
from dschat_lora.config.verbs import ReadingConfig


@dataclass(frozen=True)
class EvalConfig(ReadingConfig):
    """Evaluate a model on data.

    A language model: perplexity of the answers and, on pairs, how often the chosen answer is more
    likely. A reward model: scores, and how often it prefers the chosen answer. --reward_model and
    --judge_function also score the model's own answers: mean and standard error.
    """

    json: bool = option(False, help="print JSON to standard output")
    reward_model: str | None = option(
        None, help="reward model that scores the model's greedy answers to the prompts"
    )
    judge_function: str | None = option(
        None,
        help="module:function that scores the same answers, as a reward function of step 3; "
        "builtin:NAME for a bundled one",
        runs="object",
    )
    max_new_tokens: int = option(128, help="maximum number of tokens of such an answer")
    limit: int = option(
        0, help="evaluate only the first N rows, or the first N of each task; 0: all"
    )
    tasks: tuple[str, ...] = option(
        (),
        help="tasks of lm-evaluation-harness, or directories with your own task files, instead of "
        "rows; needs dschat_lora[evaluation]",
    )
    num_fewshot: int | None = option(
        None,
        help="number of few-shot examples before each question of --tasks; default: the task's own",
    )
    apply_chat_template: bool = option(
        False, help="send the questions of --tasks as user messages through the chat template"
    )
    addons: Any = group(addon_options("eval"))

    def __post_init__(self) -> None:
        super().__post_init__()
        given = bool(self.data_path) or bool(self.tasks)
        require(given, "data_path", "nothing", "one or more files to evaluate on, or --tasks")
        if self.tasks:
            for name in ("data_path", "columns", "reward_model", "judge_function"):
                if not getattr(self, name):
                    continue
                raise ValueError(f"--tasks have their own questions and metrics: remove --{name}")
        elif self.num_fewshot is not None or self.apply_chat_template:
            name = "apply_chat_template" if self.num_fewshot is None else "num_fewshot"
            raise ValueError(f"--{name} needs --tasks")
        require_numbers(self, ">= 0", "num_fewshot")
        require_numbers(self, ">= 1", "max_new_tokens")
        require_numbers(self, ">= 0", "limit")


@dataclass(frozen=True)
class ScoreConfig(ReadingConfig):
    """Score the answers in data files with a reward model, one JSON line per row."""

    model_name_or_path: str = option(
        help="output directory of a reward model, its adapter/ or model/, a checkpoint, or a hub "
        "name; may be given as the first argument, without the option"
    )
    data_path: tuple[str, ...] = option(
        help="files (.jsonl .json .csv .parquet .arrow), directories, or hub data sets"
    )
    output_path: str | None = option(None, help="JSONL file to write; default: standard output")
    addons: Any = group(addon_options("score"))

    def __post_init__(self) -> None:
        super().__post_init__()
        require(bool(self.data_path), "data_path", "nothing", "a file or more to score")
