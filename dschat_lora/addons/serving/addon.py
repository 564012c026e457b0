"""Models over HTTP and in the terminal."""

from dschat_lora.config.addons import Addon

ADDON = Addon(
    "serving",
    verbs={
        "chat": "dschat_lora.addons.serving.verbs:chat",
        "serve": "dschat_lora.addons.serving.verbs:serve",
    },
    summaries={
        "chat": "chat with models in the terminal",
        "serve": "serve models over HTTP, and a page to compare them",
    },
)
