"""loralib's and DeepSpeed-Chat's names for LoRA, and adapters of full checkpoints."""

from dschat_lora.config.addons import Addon

ADDON = Addon(
    "loralib",
    verbs={"extract": "dschat_lora.addons.loralib.verbs:extract"},
    summaries={"extract": "extract the LoRA weights and head of a full checkpoint to PEFT"},
    functions={
        name: f"dschat_lora.addons.loralib.deepspeed_chat:{name}"
        for name in (
            "convert_linear_layer_to_lora",
            "convert_lora_to_linear_layer",
            "only_optimize_lora_parameters",
            "make_model_gradient_checkpointing_compatible",
            "get_optimizer_grouped_parameters",
        )
    },
    writes=("seeds.json",),
)
