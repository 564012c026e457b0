"""Agents that play episodes through a server of the actor."""

from dschat_lora.config.addons import Addon

ADDON = Addon("agents", needs=("serving",))
