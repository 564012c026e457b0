"""The add-ons of the package, which no other module of the trunk names."""

from collections.abc import Mapping
from typing import NamedTuple


class Names(NamedTuple):
    """What an add-on of the package is asked for by, with spaces between names."""

    verbs: str = ""  # of dschat-lora
    functions: str = ""  # of dschat_lora in Python
    values: str = ""  # of options, as SEAM=NAME
    seams: str = ""  # of its own, under which others may provide too

    def under(self, seam: str) -> list[str]:
        """The ``values`` of a seam."""
        pairs = (value.split("=") for value in self.values.split())
        return [name for key, name in pairs if key == seam]


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
    "streaming": Names(),
    "kto": Names(values="answer_loss=kto"),
    "images": Names(),
    "environments": Names(seams="environment"),
    "engines": Names(values="rollout_engine=vllm rollout_engine=http: rollout_engine=https:"),
    "agents": Names(),
    "distill": Names("distill", "distill", "algorithm=distill"),
    "parts": Names(),
    "diagnostics": Names(),
    "rewards": Names(
        values="reward_function=builtin: reward_function=http:// reward_function=https://"
    ),
    "publish": Names("push export"),
    "bases": Names(
        values="stored_form=int8 stored_form=fp8 stored_form=mxfp4 stored_form=gptq "
        "stored_form=awq base_file=gguf"
    ),
    "loralib": Names(
        "extract",
        "convert_linear_layer_to_lora convert_lora_to_linear_layer only_optimize_lora_parameters "
        "make_model_gradient_checkpointing_compatible get_optimizer_grouped_parameters",
    ),
    "tinker": Names("tinker"),
    "trainer": Names(functions="Trainer Sample"),
    "nlg": Names("nlg"),
    "glue": Names("glue"),
}
