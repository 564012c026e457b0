"""KTO: a policy from single answers that are good or bad."""

from dschat_lora.config.addons import Addon

ADDON = Addon(
    "kto",
    options={"dpo": "dschat_lora.addons.kto.options:KtoOptions"},
    provides={"answer_loss": {"kto": "dschat_lora.addons.kto.objective:KTO"}},
)
