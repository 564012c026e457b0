"""Rows that are read, tokenised and packed while training, and tar files in WebDataset's form."""

from dschat_lora.config.addons import Addon

ADDON = Addon(
    "streaming",
    options=dict.fromkeys(
        ("sft", "reward", "dpo", "rlhf", "distill", "audit", "nlg"),
        "dschat_lora.addons.streaming.options:StreamingOptions",
    ),
    provides={"row_file": {".tar": "dschat_lora.addons.streaming.tar_rows:tar_rows"}},
)
