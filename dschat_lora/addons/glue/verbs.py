"""The command line of ``dschat-lora glue`` and ``training/nlu_glue``."""

from collections.abc import Sequence

from dschat_lora.addons.glue.config import GlueConfig
from dschat_lora.addons.glue.validation import check_glue, fix_environment
from dschat_lora.commands.seeds import experiment, once_or_by_seeds
from dschat_lora.runtime.stage_main import exits, late, run_main

SUMMARY = "GLUE with RoBERTa or DeBERTa-v2"


def glue(argv: list[str]) -> None:
    """Run ``dschat-lora glue``."""
    experiment("glue", run_glue, f"{SUMMARY}.", argv)


def run_glue(
    argv: Sequence[str],
    *,
    description: str | None = None,
    program: str | None = None,
    command: Sequence[str] | None = None,
) -> None:
    """The main function of GLUE; ``command`` starts each run of ``--seeds``."""
    fix_environment()

    def run_once(config: GlueConfig) -> None:
        # A dry run does without the seconds that the imports of training take.
        if config.dry_run:
            late("addons.glue.validation:describe_plan")(config)
        else:
            late("addons.glue.train:run_glue")(config)

    run = once_or_by_seeds("glue", exits(run_once), command)
    run_main(GlueConfig, check_glue, run, description=description, argv=argv, program=program)
