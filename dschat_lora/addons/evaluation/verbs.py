"""The command lines of ``dschat-lora eval`` and ``score``."""

from functools import partial
from typing import Any

from dschat_lora.commands.verbs import parsed_config
from dschat_lora.config.stages import ScoreConfig
from dschat_lora.config.verbs import EvalConfig
from dschat_lora.rl.options.config import RewardsConfig
from dschat_lora.rl.score.builtin_rewards import check_scorer
from dschat_lora.runtime.stage_main import ended_in_one_line, late
from dschat_lora.runtime.validation import check_eval, check_reading


def evaluate(argv: list[str]) -> None:
    """Run ``dschat-lora eval``."""
    config = parsed_config("eval RUN [DATA ...]", EvalConfig, argv, "data_path")
    scores, judge = eval_parts(config)
    found = late("addons.evaluation.measure:evaluate_model")(
        config, scores=scores, make_judge=judge
    )
    late("addons.evaluation.measure:show_measures")(found, as_json=config.json)


def score(argv: list[str]) -> None:
    """Run ``dschat-lora score``."""
    config = parsed_config("score RUN [DATA ...]", ScoreConfig, argv, "data_path")
    check_reading(config, ("SEQ_CLS",))
    with ended_in_one_line(stopped="stopped; --output_path was not written"):
        late("addons.evaluation.score:score_files")(config)


def eval_parts(config: EvalConfig) -> tuple[bool, Any]:
    """Whether a reward model is evaluated, and what makes the judge, if there is one."""
    judge = judge_maker("judge_function", config.judge_function)
    return check_eval(config), judge


def judge_maker(option: str, name: str | None) -> Any:
    """What makes the judge that an option names, None without a name.

    Raises:
        ValueError: if the name is none of a function.
    """
    if name is None:
        return None
    named: dict[str, Any] = {option: name}
    RewardsConfig(**named)  # refuses what names no function
    check_scorer(option, name)
    return partial(late("api.demo_judge:make_judge"), option, name)
