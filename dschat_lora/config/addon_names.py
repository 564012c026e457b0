"""The verbs of ``dschat-lora``, and the add-ons of the package, which no other module names."""

from collections.abc import Mapping
from typing import NamedTuple


class Verb(NamedTuple):
    """What a verb does, in a line, and the function of its arguments."""

    summary: str
    run: str  # MODULE:FUNCTION, which is imported when it is chosen


class Names(NamedTuple):
    """What an add-on of the package is asked for by, with spaces between names."""

    verbs: str = ""  # of dschat-lora
    functions: str = ""  # of dschat_lora in Python


_COMMANDS = "dschat_lora.commands"
_STAGES = {
    "sft": "Step 1: supervised fine-tuning of a causal language model",
    "reward": "Step 2: a reward model from pairs of answers",
    "dpo": "DPO, ORPO, SimPO or KTO: a policy without a reward model",
    "rlhf": "Step 3: PPO, RLOO or GRPO of an actor on its own responses",
    "distill": "On-policy distillation: a student's own responses, scored by a teacher",
}
_OTHERS = {
    "generate": "answer prompts",
    "merge": "base and adapter as one transformers directory",
    "push": "upload an adapter or a model to the hub",
    "export": "convert an adapter or a model to GGUF",
    "extract": "LoRA and head of a full checkpoint to PEFT",
}
VERBS: Mapping[str, Verb] = {
    **{name: Verb(summary, f"{_COMMANDS}.train:{name}") for name, summary in _STAGES.items()},
    **{name: Verb(summary, f"{_COMMANDS}.verbs:{name}") for name, summary in _OTHERS.items()},
}
GROUPS = {
    "train": (*_STAGES,),
    "use": ("generate", "merge", "push", "export", "extract"),
}
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
    "nlg": Names("nlg"),
    "glue": Names("glue"),
}
