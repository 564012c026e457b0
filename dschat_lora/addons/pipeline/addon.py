"""All stages of a YAML file."""

from dschat_lora.config.addons import Addon

ADDON = Addon(
    "pipeline",
    verbs={name: f"dschat_lora.addons.pipeline.verbs:{name}" for name in ("pipeline", "recipes")},
    summaries={
        "pipeline": "run or resume all stages of a YAML file",
        "recipes": "list the recipes that come with the package",
    },
    needs=("report",),
    provides={"options_file": {"stages": "dschat_lora.addons.pipeline.recipe:options_of_stage"}},
)
