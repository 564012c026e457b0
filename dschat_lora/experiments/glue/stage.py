"""GLUE from a checked config: its plan, or training, evaluation and predictions."""

from dschat_lora.experiments.glue.config import GlueConfig
from dschat_lora.experiments.glue.validation import describe_plan, fix_environment


def run_glue(config: GlueConfig) -> None:
    """Train, evaluate and save, or with ``--dry_run`` show what would be done."""
    if config.dry_run:
        describe_plan(config)
        return
    fix_environment(config.seed)
    # Imported here: torch reads the environment as it is imported.
    from dschat_lora.experiments.glue.train import run_glue as train

    train(config)
