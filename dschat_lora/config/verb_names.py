"""The verbs of ``dschat-lora`` that are no add-on's: what each does, in a line of the help."""

from collections.abc import Mapping

GROUPS: Mapping[str, Mapping[str, str]] = {
    "train": {
        "sft": "Step 1: supervised fine-tuning of a causal language model",
        "reward": "Step 2: a reward model from pairs of answers",
        "dpo": "DPO, ORPO, SimPO or KTO: a policy without a reward model",
        "rlhf": "Step 3: PPO, RLOO or GRPO of an actor on its own responses",
    },
    "use": {
        "generate": "answer prompts",
        "merge": "base and adapter as one transformers directory",
    },
}
VERBS = {name: summary for verbs in GROUPS.values() for name, summary in verbs.items()}
# Those that take options of add-ons.
COMMANDS = ("sft", "reward", "dpo", "rlhf", "generate")
