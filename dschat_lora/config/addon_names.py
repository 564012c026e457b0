"""The add-ons of the package, which no other module of the trunk names."""

from collections.abc import Mapping
from typing import NamedTuple


class Names(NamedTuple):
    """What an add-on of the package is asked for by, with spaces between names."""

    verbs: str = ""  # of dschat-lora
    functions: str = ""  # of dschat_lora in Python
    values: str = ""  # of options, as SEAM=NAME
    seams: str = ""  # of its own, under which others may provide too


# In the order of the help.
ADDONS: Mapping[str, Names] = {
    "planning": Names("plan tune doctor models", "plan tune Plan Tuned"),
    "pipeline": Names("pipeline"),
    "evaluation": Names("eval score", "evaluate"),
    "serving": Names("chat serve"),
    "audit": Names(),
    "images": Names(),
    "environments": Names(seams="environment"),
    "agents": Names(),
    "tinker": Names("tinker"),
    "trainer": Names(functions="Trainer Sample"),
    "nlg": Names("nlg"),
    "glue": Names("glue"),
}
