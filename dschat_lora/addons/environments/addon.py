"""Environments that answer the actor in step 3: functions, objects, players and libraries."""

from dschat_lora.config.addons import Addon

_OPTIONS = "dschat_lora.addons.environments.options:EnvironmentOptions"
LIBRARIES = ("gymnasium", "mcp", "openenv", "reasoning_gym", "verifiers")  # each a file
ADDON = Addon(
    "environments",
    options={"rlhf": _OPTIONS, "distill": _OPTIONS},
    provides={
        "environment": {
            f"{name}:": f"dschat_lora.addons.environments.{name}:environment" for name in LIBRARIES
        }
    },
)


def episode_prompt(number: int) -> list[dict[str, str]]:
    """The prompt of an episode of ``--num_prompts``, in whose place comes what ``reset`` says."""
    return [{"role": "user", "content": f"Episode {number}"}]
