"""The bundled tiny model and data set, and the table of types of models: their paths."""

from dschat_lora.config.bundled import BUNDLED_DATA, BUNDLED_MODEL, FAMILIES

__all__ = ["BUNDLED_DATA", "BUNDLED_MODEL", "FAMILIES"]
