"""What a run takes, which settings are good, and whether a machine can train."""

from dschat_lora.config.addons import Addon

ADDON = Addon(
    "planning",
    verbs={
        "plan": "dschat_lora.addons.planning.verbs:plan",
        "tune": "dschat_lora.addons.planning.verbs:tune",
        "doctor": "dschat_lora.addons.planning.verbs:doctor",
        "models": "dschat_lora.addons.planning.verbs:models",
    },
    summaries={
        "plan": "estimate the memory and time of a run, and what fits",
        "tune": "search for learning rate, rank and batch size by short runs",
        "doctor": "check whether this machine can train",
        "models": "list supported model types and their features",
    },
    functions={
        name: f"dschat_lora.addons.planning.python:{name}"
        for name in ("plan", "tune", "Plan", "Tuned")
    },
    provides={
        "advice": {
            "supervised_memory": "dschat_lora.addons.planning.memory_advice:advise_supervised",
            "rl_memory": "dschat_lora.addons.planning.memory_advice:advise_rl",
            "launches": "dschat_lora.addons.planning.launches:micro_batch_advice",
        }
    },
    needs=("pipeline", "report"),
)
