"""Warnings of known failures of step 3, and runs that end at one."""

from dschat_lora.config.addons import Addon

_OPTIONS = "dschat_lora.addons.diagnostics.options:DiagnosticsOptions"
ADDON = Addon("diagnostics", options={"rlhf": _OPTIONS, "distill": _OPTIONS})
