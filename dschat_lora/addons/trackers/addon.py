"""Trackers that get the numbers of a run."""

from dschat_lora.config.addons import Addon

ADDON = Addon(
    "trackers",
    options=dict.fromkeys(
        ("sft", "reward", "dpo", "rlhf", "distill", "nlg"),
        "dschat_lora.addons.trackers.options:TrackerOptions",
    ),
    writes=("wandb", "trackers.json"),
)
