"""The bundled tiny model and data set: their paths."""

from dschat_lora.config.bundled import BUNDLED_DATA, BUNDLED_MODEL

__all__ = ["BUNDLED_DATA", "BUNDLED_MODEL"]
