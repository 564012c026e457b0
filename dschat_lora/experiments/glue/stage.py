"""GLUE from a checked config: its plan, or training, evaluation and predictions."""

from dschat_lora.experiments.glue.config import GlueConfig
from dschat_lora.experiments.glue.validation import describe_plan


def run_glue(config: GlueConfig) -> None:
    """Train, evaluate and save, or with ``--dry_run`` show what would be done."""
    if config.dry_run:
        describe_plan(config)
        return
    # Imported here, where it is needed: it takes seconds.
    from dschat_lora.experiments.glue.train import run_glue as train

    train(config)
