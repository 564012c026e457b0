"""Agents that play episodes through a server of the actor."""

from dschat_lora.config.addons import Addon

_OPTIONS = "dschat_lora.addons.agents.options:AgentOptions"
TIMED_OUT = "timed out"  # what a failure for lack of time begins with
ADDON = Addon(
    "agents",
    options={"rlhf": _OPTIONS, "distill": _OPTIONS},
    needs=("environments", "serving"),
)
