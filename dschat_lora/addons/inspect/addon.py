"""What a directory is, and whether its files are as they were written."""

from dschat_lora.config.addons import Addon

ADDON = Addon(
    "inspect",
    verbs={name: f"dschat_lora.addons.inspect.verbs:{name}" for name in ("inspect", "accept")},
    summaries={
        "inspect": "describe a directory and where it comes from",
        "accept": "accept an adapter whose files were changed on purpose",
    },
)
