"""GPT-2 on E2E, WebNLG and DART, as in LoRA's paper."""

from dschat_lora.config.addons import Addon

ADDON = Addon(
    "nlg",
    verbs={"nlg": "dschat_lora.addons.nlg.verbs:nlg"},
    summaries={"nlg": "data-to-text generation with GPT-2: train, decode, format or evaluate"},
    titles={"nlg": "Text generation from data"},
    provides={
        "row_format": {
            "E2E": "dschat_lora.addons.nlg.formats:E2E",
            "WebNLG": "dschat_lora.addons.nlg.formats:WEBNLG",
            "DART": "dschat_lora.addons.nlg.formats:DART",
            "token ids": "dschat_lora.addons.nlg.formats:TOKEN_IDS",
        }
    },
    needs=("loralib",),
    writes=("lora",),
)
