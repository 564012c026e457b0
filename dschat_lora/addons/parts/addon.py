"""Objects of the user's that are told of every step and iteration of step 3."""

from dschat_lora.config.addons import Addon

_OPTIONS = "dschat_lora.addons.parts.options:PartsOptions"
ADDON = Addon("parts", options={"rlhf": _OPTIONS, "distill": _OPTIONS})
