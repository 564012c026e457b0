"""Pictures in rows of data, for models that see."""

from dschat_lora.config.addons import Addon

ADDON = Addon(
    "images",
    options={
        **dict.fromkeys(("audit", "generate"), "dschat_lora.addons.images.options:ImageOptions"),
        **dict.fromkeys(
            ("sft", "reward", "dpo", "rlhf"),
            "dschat_lora.addons.images.options:TrainedImageOptions",
        ),
    },
    provides={"media": {"images": "dschat_lora.addons.images.families:image_reader"}},
)
