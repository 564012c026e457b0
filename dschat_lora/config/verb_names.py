"""The verbs of ``dschat-lora`` that are no add-on's: what each does, in a line of the help."""

from collections.abc import Mapping

GROUPS: Mapping[str, Mapping[str, str]] = {
    "train": {
        "sft": "Step 1: supervised fine-tuning of a causal language model",
        "reward": "Step 2: a reward model from pairs of answers",
        "dpo": "DPO, ORPO, SimPO or KTO: a policy without a reward model",
        "rlhf": "Step 3: PPO, RLOO or GRPO of an actor on its own responses",
        "demo": "train on the bundled model and data, show what changed",
    },
    "look": {
        "recipes": "list the recipes that come with the package",
        "audit": "show what a stage would learn of data",
        "inspect": "say what a directory is, and how it came about",
        "report": "one page about runs: curves, results, time, settings",
        "rollouts": "look through a run's responses of step 3",
    },
    "use": {
        "generate": "answer prompts",
        "merge": "base and adapter as one transformers directory",
        "accept": "vouch for an adapter that was changed on purpose",
    },
}
VERBS = {name: summary for verbs in GROUPS.values() for name, summary in verbs.items()}
# Those that take options of add-ons.
COMMANDS = ("sft", "reward", "dpo", "rlhf", "audit", "generate")
