"""Measures of trained models on rows and on tasks."""

from dschat_lora.config.addons import Addon

ADDON = Addon(
    "evaluation",
    verbs={
        "eval": "dschat_lora.addons.evaluation.verbs:evaluate",
        "score": "dschat_lora.addons.evaluation.verbs:score",
    },
    summaries={
        "eval": "measure perplexity, preference accuracy or rewards on data",
        "score": "score answers with a reward model",
    },
    options={
        **dict.fromkeys(
            ("sft", "reward", "dpo"), "dschat_lora.addons.evaluation.options:TaskOptions"
        ),
        "generate": "dschat_lora.addons.evaluation.options:KeepOptions",
    },
    functions={"evaluate": "dschat_lora.addons.evaluation.python:evaluate"},
)
