"""What scores responses of step 3, as options: functions, names, and reward models."""

import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from dschat_lora.api.inputs import EarlierRun, function_name, model_value
from dschat_lora.config.held import held
from dschat_lora.rl.builtin_rewards import is_builtin
from dschat_lora.runtime.stage_main import late

Reward = Callable[..., Any] | str | os.PathLike[str] | EarlierRun


def reward_options(
    rewards: Any, critic: Any, weights: Sequence[float] | None, stack: ExitStack
) -> dict[str, Any]:
    """The options of step 3 that say what scores responses; ``stack`` holds the functions.

    The first reward model is the run's own, from which a critic starts; further ones score as
    functions do.

    Raises:
        TypeError: for something that cannot score.
        ValueError: if there is not a weight for each.
    """
    one = not isinstance(rewards, list | tuple) or _is_model(rewards)
    given = [rewards] if one else [*rewards]
    weights = None if weights is None else _numbers(weights)
    if weights is not None and len(weights) not in (len(given), len(given) + (critic is not None)):
        raise ValueError(
            f"--reward_weights has {len(weights)} weights for {len(given)} rewards; give one for "
            "each"
        )
    scales = dict(enumerate(weights or ()))
    path, own_place = model_value(critic, "critic"), len(given)
    functions, function_scales = list[str](), list[float]()
    for place, each in enumerate(given):
        name = _function(each, stack)
        if name is None:
            other = model_value(each, "rewards")
            if path in (None, other):
                path, own_place = other, place
                continue
            scorer = late("api.model_reward:ModelReward")(other)
            name = stack.enter_context(held(scorer, Path(str(other)).name))
        functions.append(name)
        function_scales.append(scales.get(place, 1.0))
    found: dict[str, Any] = {"reward_function": functions or None}
    if path is not None:
        found["critic_model_name_or_path"] = path
    if weights is not None:
        own = [scales.get(own_place, 1.0)] if path is not None else []
        found["reward_weights"] = [*function_scales, *own]
    return found


def _numbers(weights: Any) -> list[float]:
    try:
        return [float(each) for each in weights]
    except (TypeError, ValueError) as error:
        raise ValueError(f"--reward_weights must be a list of numbers, got {weights!r}") from error


def _is_model(rewards: Sequence[Any]) -> bool:
    """Whether it is (model, tokenizer): one reward model, not two rewards."""
    return len(rewards) == 2 and all(hasattr(each, "save_pretrained") for each in rewards)


def _function(reward: Any, stack: ExitStack) -> str | None:
    """The name of a function, which ``stack`` holds; None of a reward model."""
    if isinstance(reward, str):
        is_function = ":" in reward and not Path(reward).expanduser().exists()
        return reward if is_builtin(reward) or is_function else None
    if isinstance(reward, os.PathLike) or getattr(reward, "path", None) is not None:
        return None
    if isinstance(reward, tuple):
        return None  # (model, tokenizer)
    if callable(reward):
        return stack.enter_context(held(reward, function_name(reward)))
    raise TypeError(
        "rewards must be functions, runs of dschat_lora.reward, paths of reward models or names "
        f"such as 'builtin:length=12', got a {type(reward).__name__}"
    )
