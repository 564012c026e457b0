"""The verb ``distill``."""

from functools import partial

from dschat_lora.commands.train import stage

distill = partial(stage, "distill")
