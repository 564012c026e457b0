"""The names of the package's add-ons, which nothing else outside of ``addons/`` has."""

from collections.abc import Mapping
from typing import NamedTuple


class Names(NamedTuple):
    """What an add-on of the package is asked for by, with spaces between names."""

    verbs: str = ""  # of dschat-lora
    functions: str = ""  # of dschat_lora in Python


ADDONS: Mapping[str, Names] = {
    "agents": Names(),
    "audit": Names(),
    "evaluation": Names("eval score", "evaluate"),
    "glue": Names("glue"),
    "nlg": Names("nlg"),
    "pipeline": Names("pipeline"),
    "planning": Names("plan tune doctor models", "plan tune Plan Tuned"),
    "serving": Names("chat serve"),
    "tinker": Names("tinker"),
}
