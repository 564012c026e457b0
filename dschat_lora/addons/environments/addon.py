"""Environments that answer the actor in step 3: functions, objects, players and libraries."""

from dschat_lora.config.addons import Addon

_OPTIONS = "dschat_lora.addons.environments.options:EnvironmentOptions"
# Each a file: what it needs, the extra that has it, and the class there.
LIBRARIES = {
    "gymnasium": ("gymnasium", "gymnasium", "Gymnasium"),
    "mcp": ("mcp>=2", "mcp", "McpServer"),
    "openenv": ("openenv", "openenv", "OpenEnv"),
    "reasoning_gym": ("reasoning_gym", "environments", "ReasoningGym"),
    "verifiers": ("verifiers>=0.4", "verifiers", "Verifiers"),
}
ADDON = Addon(
    "environments",
    options={"rlhf": _OPTIONS, "distill": _OPTIONS},
    provides={
        "environment": dict.fromkeys(
            (f"{name}:" for name in LIBRARIES), "dschat_lora.addons.environments.libraries:made_by"
        )
    },
)


def episode_prompt(number: int) -> list[dict[str, str]]:
    """The prompt of an episode of ``--num_prompts``, in whose place comes what ``reset`` says."""
    return [{"role": "user", "content": f"Episode {number}"}]
