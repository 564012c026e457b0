"""Distillation in Python."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from dschat_lora.addons.distill.stage import DistillConfig
from dschat_lora.api.options import Data, Model, Reward, reward_options, with_options
from dschat_lora.api.stages import NAMED, Run, common_options, train
from dschat_lora.runtime.caller import Callback


@with_options(DistillConfig, *NAMED, "teacher_model_name_or_path", "algorithm", "reward_function")
def distill(
    model: Model | None = None,
    data: Data | None = None,
    *,
    teacher: Model | None = None,
    rewards: Reward | Sequence[Reward] = (),
    eval_data: Data | None = None,
    output_dir: str | os.PathLike[str] | None = None,
    callbacks: Sequence[Callback] = (),
    resume: str | os.PathLike[str] | None = None,
    quiet: bool = False,
    **options: Any,
) -> Run:
    """Train a student on its own responses, each token of which a teacher scores.

    The other arguments are those of ``sft``; ``model`` is the student, ``data`` its prompts.

    Args:
        model: the student, as in ``sft``.
        data: rows with prompts.
        teacher: a model of the student's tokenizer, as ``model``; an adapter on the student's base
            shares its weights. A server's address, such as ``http://127.0.0.1:8000/v1``, too. By
            default the student as it was, with ``teacher_system_prompt``.
        rewards: what measures responses, as in ``rlhf``; nothing is learnt from it.
        eval_data: held-out prompts.
        output_dir: as in ``sft``.
        callbacks: as in ``sft``.
        resume: as in ``sft``.
        quiet: print nothing.
        **options: those of ``dschat-lora distill --help all``, by their names.
    """
    with ExitStack() as stack:
        named = {
            "actor_model_name_or_path": model,
            "teacher_model_name_or_path": teacher,
            **common_options(data, eval_data, output_dir, resume),
            **reward_options(rewards, None, options.pop("reward_weights", None), stack),
        }
        return train("distill", named, options, callbacks, quiet)
