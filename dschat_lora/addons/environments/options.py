"""Options of environments: checks without torch, rows of episodes, and a player."""

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, ClassVar

from dschat_lora.addons.environments.addon import LIBRARIES, episode_prompt
from dschat_lora.config.addons import begins_values
from dschat_lora.config.groups import require, require_numbers
from dschat_lora.config.held import is_in_module
from dschat_lora.config.options import option
from dschat_lora.rl.options.names import addon_name, load_object, object_path, of_addons
from dschat_lora.runtime.checks import cache_directory, check_function

if TYPE_CHECKING:
    from dschat_lora.models.loading import Tokenizer
    from dschat_lora.rl.draw.player import Player
    from dschat_lora.rl.options.config import RlhfConfig
    from dschat_lora.rl.response.response import Response

of_rollouts = partial(option, section="rollouts")


@dataclass(frozen=True)
class EnvironmentOptions:
    """What answers the actor in step 3, turn after turn."""

    also_when: ClassVar[Mapping[str, str]] = {
        "reward_retries": "environment",
        "reward_timeout": "environment",
    }

    num_prompts: int = option(
        0,
        help="number of episodes whose prompts an --environment class makes itself, instead of "
        "--data_path; reset receives the index of the episode, from 0, as `episode`",
        section="data",
    )
    environment: str | None = of_rollouts(
        None,
        help="environment that replies to the actor's turns: module:function, module:Class, or one "
        "from a library, such as gymnasium:ENV_ID\na function returns user or tool messages, "
        "or ends the episode; a class has reset, step or tools, and rewards; module:Player "
        "has play(tasks, draw, *, key), which generates the responses; libraries are "
        "gymnasium:ENV_ID, reasoning_gym:TASK, verifiers:TASKSET, openenv:URL, and "
        "mcp:COMMAND or mcp:URL, which provide tools",
        runs="object",
    )
    max_turns: int = of_rollouts(
        8,
        help="maximum number of actor turns in an episode of --environment, which share the length "
        "of one response",
        when="environment",
    )

    def __post_init__(self) -> None:
        require_numbers(self, ">= 1", "max_turns")
        require_numbers(self, ">= 0", "num_prompts")
        if (name := self.environment) is None:
            return
        library, _, rest = name.partition(":")
        known = bool(addon_name("environment", name))
        usable = (known or is_in_module(name)) if library not in LIBRARIES else bool(rest)
        allowed = [each for each in of_addons("environment") if not begins_values(each)]
        allowed += ["module:function such as my_rewards:is_right"]
        libraries = f", or LIBRARY:NAME of {', '.join(LIBRARIES)}"
        require(usable, "environment", name, ", ".join(allowed) + libraries)

    @property
    def plays(self) -> list[str]:
        """The option by which something answers the actor; empty without it."""
        return [] if self.environment is None else ["environment"]

    def described(self) -> str:
        """The environment, as a run says what its rewards come from."""
        return f"the environment {self.environment}"

    def with_data(self, config: "RlhfConfig") -> "RlhfConfig":
        """With rows of ``--num_prompts`` episodes, which an environment's ``reset`` completes.

        Raises:
            ValueError: if there is data too, or no environment.
        """
        if not (count := self.num_prompts):
            return config
        if config.data.data_path:
            raise ValueError(f"--num_prompts {count} replaces --data_path; remove one of them")
        if not config.players:
            raise ValueError(
                f"--num_prompts {count} needs --environment, a class whose reset makes the "
                "prompts, or --agent"
            )
        path = cache_directory(config.data.data) / f"episodes-{count}.jsonl"
        if not path.is_file():
            path.parent.mkdir(parents=True, exist_ok=True)
            rows = (json.dumps({"prompt": episode_prompt(n), "episode": n}) for n in range(count))
            staged = path.with_name(f"{path.name}.{os.getpid()}")
            staged.unlink(missing_ok=True)  # it may be a link
            with staged.open("x", encoding="utf-8") as file:
                file.writelines(f"{row}\n" for row in rows)
            staged.replace(path)
        return replace(config, data=replace(config.data, data_path=(str(path),)))

    def described_data(self) -> str:
        """The rows that :meth:`with_data` made; empty for none."""
        return f"{self.num_prompts:,} episodes without data" if self.num_prompts else ""

    def check_player(self, config: "RlhfConfig") -> None:
        """Refuse an environment whose library or module is not there.

        Raises:
            ValueError: naming it.
        """
        name = str(self.environment)
        if begins_values(addon_name("environment", name)):
            load_object("environment", name)
            return
        try:
            check_function("environment", object_path("environment", name))
        except ValueError as error:
            raise ValueError(f"{error}; by name there are {', '.join(LIBRARIES)}") from error

    def player(self, config: "RlhfConfig", tokenizer: "Tokenizer", closing: ExitStack) -> "Player":
        """What plays the episodes.

        Raises:
            ValueError: if the option names nothing that can be used, or nothing gives a reward.
        """
        from dschat_lora.addons.environments.players import load_player

        return load_player(str(self.environment), config, tokenizer, max_turns=self.max_turns)

    def response_metrics(
        self, responses: "Sequence[Response]", counted: "Sequence[Response]"
    ) -> dict[str, float]:
        """Mean number of the actor's turns and of tokens that it read between them, if any."""
        if not any(each.actor_mask or each.episode.num_calls for each in counted):
            return {}
        turns = sum(_num_turns(each) for each in counted)
        read = sum(each.num_read_tokens for each in counted)
        return {"turns": turns / len(counted), "environment_tokens": read / len(counted)}


def _num_turns(response: "Response") -> int:
    episode, mask = response.episode, response.actor_mask
    if episode.num_calls:
        return episode.num_calls
    if mask and response.origin.is_drawn and not episode.earlier:  # of a player without messages
        return sum(own and not before for before, own in pairwise((False, *mask)))
    earlier = json.loads(episode.earlier or b"[]")
    return 1 + sum(message["role"] == "assistant" for message in earlier)
