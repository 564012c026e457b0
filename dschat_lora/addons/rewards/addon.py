"""Rewards that come along, servers that score, and functions written for other libraries."""

from dschat_lora.config.addons import Addon

_HERE = "dschat_lora.addons.rewards"
ADDON = Addon(
    "rewards",
    provides={
        "reward_function": {
            "builtin:": f"{_HERE}.builtin:builtin_function",
            **dict.fromkeys(("http://", "https://"), f"{_HERE}.external:RemoteReward"),
        },
        "reward_form": {
            "verl": f"{_HERE}.conventions:of_verl",
            "openrlhf": f"{_HERE}.conventions:of_openrlhf",
        },
    },
)
