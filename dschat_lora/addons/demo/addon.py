"""All stages on the bundled model and data, and what changed."""

from dschat_lora.config.addons import Addon

ADDON = Addon(
    "demo",
    verbs={"demo": "dschat_lora.addons.demo.demo:demo"},
    summaries={"demo": "run all stages on the bundled model and data"},
    needs=("report",),
)
