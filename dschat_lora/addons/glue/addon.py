"""GLUE, as in LoRA's paper."""

from dschat_lora.config.addons import Addon

ADDON = Addon(
    "glue",
    verbs={"glue": "dschat_lora.addons.glue.verbs:glue"},
    summaries={"glue": "GLUE with RoBERTa or DeBERTa-v2"},
    titles={"glue": "GLUE"},
    needs=("loralib",),
    # of transformers' Trainer, but for the model of the last step
    writes=(
        *("all_results.json", "eval_results.json", "train_results.json", "trainer_state.json"),
        "last",
    ),
)
