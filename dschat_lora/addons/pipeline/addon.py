"""All stages of a YAML file."""

from dschat_lora.config.addons import Addon

ADDON = Addon(
    "pipeline",
    verbs={"pipeline": "dschat_lora.addons.pipeline.verbs:pipeline"},
    summaries={"pipeline": "run all stages of a YAML file, or go on"},
    provides={"options_file": {"stages": "dschat_lora.addons.pipeline.recipe:options_of_stage"}},
)
