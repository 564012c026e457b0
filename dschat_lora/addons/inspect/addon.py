"""What a directory is, and whether its files are as they were written."""

from dschat_lora.config.addons import Addon

ADDON = Addon(
    "inspect",
    verbs={name: f"dschat_lora.addons.inspect.verbs:{name}" for name in ("inspect", "accept")},
    summaries={
        "inspect": "say what a directory is, and how it came about",
        "accept": "vouch for an adapter that was changed on purpose",
    },
)
