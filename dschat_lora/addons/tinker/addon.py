"""The Tinker API."""

from dschat_lora.config.addons import Addon

ADDON = Addon(
    "tinker",
    verbs={"tinker": "dschat_lora.addons.tinker.verbs:tinker"},
    summaries={"tinker": "train and sample over the Tinker API, on this machine"},
    needs=("serving",),
)
