"""``dschat_lora.evaluate``."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from dschat_lora.addons.evaluation.config import EvalConfig
from dschat_lora.addons.evaluation.validation import check_eval
from dschat_lora.api.options import Data, Model, with_options
from dschat_lora.api.process import run_in_process
from dschat_lora.api.verbs import config_of
from dschat_lora.config.bundled import BUNDLED_MODEL
from dschat_lora.runtime.stage_main import late

_NAMED = ("model_name_or_path", "data_path")  # arguments under a shorter name


@with_options(EvalConfig, *_NAMED, "json")
def evaluate(model: Model | None, data: Data | None, **options: object) -> dict[str, float]:
    """Perplexity, preferences or rewards of a model on rows of data.

    Args:
        model: as in ``generate``; of a reward model scores and preferences are measured.
        data: rows, as in ``dschat_lora.sft``; None with ``tasks``, which have their own.
        **options: those of ``dschat-lora eval --help`` by their names. ``judge_function`` may be a
            function, and ``reward_model`` a run.

    Returns:
        The numbers that the command prints, by name.
    """
    with ExitStack() as stack:
        model = BUNDLED_MODEL if model is None else model
        values: dict[str, Any] = {"model_name_or_path": model}
        values |= {} if data is None else {"data_path": data}
        config = config_of(EvalConfig, values, options, stack)
        stack.enter_context(run_in_process())
        scores, measure = check_eval(config), late("addons.evaluation.measure:evaluate_model")
        measures: dict[str, float] = measure(config, scores=scores)
        return measures
