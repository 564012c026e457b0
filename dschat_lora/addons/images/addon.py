"""Pictures in rows of data, for models that see."""

from dschat_lora.config.addons import Addon

ADDON = Addon(
    "images",
    options={
        **dict.fromkeys(
            ("sft", "reward", "dpo", "rlhf"),
            "dschat_lora.addons.images.options:TrainingImageOptions",
        ),
        **dict.fromkeys(
            ("audit", "eval", "score", "serve", "chat"),
            "dschat_lora.addons.images.options:ImageOptions",
        ),
        "generate": "dschat_lora.addons.images.options:PromptImageOptions",
    },
    provides={
        "media": {"images": "dschat_lora.addons.images.media:image_reader"},
        "rest": {"images": "dschat_lora.addons.images.beside:load_adapted"},
        "thumbnails": {"images": "dschat_lora.addons.images.pictures:thumbnails"},
    },
)
