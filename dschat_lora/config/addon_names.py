"""The add-ons of the package, which no other module of the trunk names."""

from collections.abc import Mapping
from typing import NamedTuple


class Names(NamedTuple):
    """What an add-on of the package is asked for by, with spaces between names."""

    verbs: str = ""  # of dschat-lora
    functions: str = ""  # of dschat_lora in Python
    values: str = ""  # of options, as SEAM=NAME


# In the order of the help.
ADDONS: Mapping[str, Names] = {
    "demo": Names("demo"),
    "planning": Names("plan tune doctor models", "plan tune Plan Tuned"),
    "pipeline": Names("pipeline recipes"),
    "evaluation": Names("eval score", "evaluate"),
    "serving": Names("chat serve"),
    "audit": Names("audit", "audit Audit"),
    "report": Names("report rollouts"),
    "inspect": Names("inspect accept"),
    "trackers": Names(),
    "images": Names(),
    "agents": Names(),
    "tinker": Names("tinker"),
    "trainer": Names(functions="Trainer Sample"),
    "nlg": Names("nlg"),
    "glue": Names("glue"),
}
