"""What ``eval``, ``score`` and their judges need, checked before anything heavy is imported."""

from typing import Any

from dschat_lora.addons.evaluation.config import EvalConfig, ScoreConfig
from dschat_lora.config.data import DataConfig
from dschat_lora.config.verbs import ReadingConfig
from dschat_lora.data.media import media_reader
from dschat_lora.data.rows import DataKind, check_sources
from dschat_lora.models.source import ModelSource
from dschat_lora.rl.options.config import RewardsConfig
from dschat_lora.rl.options.names import check_scorer
from dschat_lora.runtime.checks import find_of_kind, require_packages, task_of
from dschat_lora.runtime.directory import check_file_can_be_made
from dschat_lora.runtime.validation import check_reading


def check_score(config: ScoreConfig) -> None:
    """Refuse what is not a reward model, and files that cannot be read or written."""
    source = check_reading(config, ("SEQ_CLS",))
    check_rows(config, "samples", source)
    if config.output_path is not None:
        check_file_can_be_made(config.output_path, "output_path")


def check_eval(config: EvalConfig) -> bool:
    """Whether the model is a reward model; refuses what cannot be evaluated."""
    check_function("judge_function", config.judge_function)
    source = check_reading(config, ("CAUSAL_LM",) if config.tasks else ("CAUSAL_LM", "SEQ_CLS"))
    if config.tasks:  # they have rows of their own
        require_packages("--tasks", "lm_eval", extra="evaluation")
    else:
        answers = config.reward_model or config.judge_function  # of the model are scored
        check_rows(config, "prompts" if answers else "samples", source)
    if config.judge_function is not None and task_of(source) == "SEQ_CLS":
        raise ValueError(
            f"--judge_function {config.judge_function} scores a language model's answers, but "
            f"--model_name_or_path {config.model_name_or_path} is a reward model"
        )
    if config.reward_model is None:
        return task_of(source) == "SEQ_CLS"
    if task_of(source) == "SEQ_CLS":
        raise ValueError(
            f"--reward_model {config.reward_model} scores a language model's answers, but "
            f"--model_name_or_path {config.model_name_or_path} is itself a reward model"
        )
    find_of_kind(config.reward_model, ("SEQ_CLS",), option="--reward_model")
    return False


def check_rows(config: ReadingConfig, kind: DataKind, source: ModelSource) -> None:
    """Refuse files whose first rows cannot be used."""
    data = DataConfig(data_path=config.data_path, columns=config.columns, unpaired_rows="all")
    check_sources(data, kind, media_reader(config, None, source.base))


def check_function(option: str, name: str | None) -> None:
    """Refuse what names no function that scores.

    Raises:
        ValueError: naming the option.
    """
    if name is not None:
        named: dict[str, Any] = {option: name}
        RewardsConfig(**named)
        check_scorer(option, name)
