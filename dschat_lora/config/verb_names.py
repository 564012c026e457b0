"""The verbs of ``dschat-lora`` that are no add-on's: what each does, in a line of the help."""

from collections.abc import Mapping

GROUPS: Mapping[str, Mapping[str, str]] = {
    "train": {
        "sft": "Step 1: supervised fine-tuning of a causal language model",
        "reward": "Step 2: train a reward model on pairs of answers",
        "dpo": "DPO, ORPO, SimPO or KTO: preference optimization without a reward model",
        "rlhf": "Step 3: train an actor on its own responses by PPO, RLOO or GRPO",
    },
    "use": {
        "generate": "generate answers to prompts",
        "merge": "merge an adapter into its base model",
    },
}
VERBS = {name: summary for verbs in GROUPS.values() for name, summary in verbs.items()}
# Those that take options of add-ons.
COMMANDS = ("sft", "reward", "dpo", "rlhf", "generate")
