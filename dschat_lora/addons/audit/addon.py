"""What a stage would learn of data, and filters of their rows."""

from dschat_lora.config.addons import Addon

ADDON = Addon(
    "audit",
    verbs={"audit": "dschat_lora.addons.audit.verbs:audit"},
    summaries={"audit": "show what a stage would train on"},
    options={"audit": "dschat_lora.addons.audit.config:FilterConfig"},
    functions={name: f"dschat_lora.addons.audit.python:{name}" for name in ("audit", "Audit")},
    needs=("report",),
)
