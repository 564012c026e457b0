"""All stages on the bundled model and data, and what changed."""

from dschat_lora.config.addons import Addon

ADDON = Addon(
    "demo",
    verbs={"demo": "dschat_lora.addons.demo.demo:demo"},
    summaries={"demo": "train on the bundled model and data, show what changed"},
    needs=("report",),
)
