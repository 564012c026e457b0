"""A model with its optimizer and sampler, for training loops of one's own."""

from dschat_lora.config.addons import Addon

ADDON = Addon(
    "trainer",
    functions={
        "Trainer": "dschat_lora.addons.trainer.trainer:Trainer",
        "Sample": "dschat_lora.addons.trainer.sampling:Sample",
    },
)
