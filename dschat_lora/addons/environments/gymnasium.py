"""Environments of ``gymnasium`` whose observations are text."""

import weakref
from collections.abc import Mapping

import gymnasium

from dschat_lora.data.messages import Message
from dschat_lora.runtime.checks import working_directory


class Gymnasium:
    """An environment of ``gymnasium`` whose observations are text.

    An answer is the action: text, or the number or name of a discrete action. Episode ``n`` begins
    as ``reset(seed=n)`` does.
    """

    def __init__(self, name: str) -> None:
        """Make ``ENV_ID``, or ``module:ENV_ID`` where a module registers it.

        Raises:
            ValueError: if there is no such environment, or its actions cannot be written.
        """
        where = f"--environment gymnasium:{name}"
        try:
            with working_directory():
                self._env = gymnasium.make(name, disable_env_checker=True)
        except (gymnasium.error.Error, ImportError) as error:
            raise ValueError(f"{where}: {error}") from error
        weakref.finalize(self, self._env.close)
        space = self._space = self._env.action_space
        self._numbers: dict[str, int] | None = None
        if isinstance(space, gymnasium.spaces.Discrete):
            first = int(space.start)
            self._numbers = {str(first + n): first + n for n in range(int(space.n))}
            self._numbers |= {name.lower(): n for name, n in _action_names(self._env).items()}
        elif not isinstance(space, gymnasium.spaces.Text):
            raise ValueError(f"{where}: actions are {space}; only Text and Discrete are supported")
        self._where = where
        self.reward_name = name.rpartition(":")[2]

    def reset(self, episode: int) -> str:
        """The first observation."""
        return self._text(self._env.reset(seed=episode)[0])

    def step(self, message: Message) -> str | tuple[str | None, float]:
        """The next observation and the reward; None for the observation ends the episode."""
        said = message["content"].strip()
        action: str | int | None = said if self._space.contains(said) else None
        allowed = f"a text of {self._space}"
        if self._numbers is not None:
            action = self._numbers.get(said.lower())
            allowed = f"one of {', '.join(self._numbers)}"
        if action is None:
            return f"Invalid action: it must be {allowed}."
        observation, reward, terminated, truncated, _ = self._env.step(action)
        return None if terminated or truncated else self._text(observation), float(reward)

    def _text(self, observation: object) -> str:
        if not isinstance(observation, str):
            raise ValueError(
                f"{self._where}: an observation is a {type(observation).__name__}; only "
                "environments with text observations are supported"
            )
        return observation


def _action_names(env: gymnasium.Env) -> dict[str, int]:
    """Numbers of actions by name, where an environment names them."""
    inner = env.unwrapped
    names = getattr(inner, "action_meanings", None) or env.metadata.get("action_meanings")
    if names is None and hasattr(inner, "get_action_meanings"):
        names = inner.get_action_meanings()
    pairs = names.items() if isinstance(names, Mapping) else enumerate(names or ())
    return {str(name): int(number) for number, name in pairs}
