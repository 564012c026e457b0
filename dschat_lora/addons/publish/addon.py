"""Adapters and models for others: upload to the Hugging Face Hub, conversion to GGUF."""

from dschat_lora.config.addons import Addon

ADDON = Addon(
    "publish",
    verbs={
        "push": "dschat_lora.addons.publish.verbs:push",
        "export": "dschat_lora.addons.publish.verbs:export",
    },
    summaries={
        "push": "upload an adapter or model to the hub",
        "export": "convert an adapter or model to GGUF",
    },
)
