"""Bases in GGUF files, FP8, MXFP4, int8, GPTQ and AWQ; how far apart an adapter's two bases are."""

from dschat_lora.config.addons import Addon

_FORMS = "dschat_lora.addons.bases.forms"
ADDON = Addon(
    "bases",
    provides={
        "stored_form": {
            each: f"{_FORMS}:{each.upper()}" for each in ("int8", "fp8", "mxfp4", "gptq", "awq")
        },
        "base_file": {"gguf": f"{_FORMS}:GGUF"},
        "base_distance": {"KL": "dschat_lora.addons.bases.distance:distance"},
    },
)
