"""The command line of ``dschat-lora glue`` and ``training/nlu_glue``."""

from collections.abc import Sequence

from dschat_lora.addons.glue.addon import ADDON
from dschat_lora.addons.glue.config import GlueConfig
from dschat_lora.addons.glue.validation import check_glue, fix_environment
from dschat_lora.addons.loralib.seeds import once_or_by_seeds, run_experiment
from dschat_lora.runtime.stage_main import exits, late, run_main


def glue(argv: list[str]) -> None:
    """Run ``dschat-lora glue``."""
    run_experiment("glue", run_glue, argv, description=f"{ADDON.summaries['glue']}.")


def run_glue(
    argv: Sequence[str],
    *,
    command: Sequence[str] | None = None,
    description: str | None = None,
    program: str | None = None,
) -> None:
    """The main function of GLUE.

    ``command`` starts each run of ``--seeds``; the description and the program are those of
    :func:`~dschat_lora.runtime.stage_main.run_main`.
    """
    fix_environment()

    def run_once(config: GlueConfig) -> None:
        # A dry run does without the seconds that the imports of training take.
        if config.dry_run:
            late("addons.glue.validation:describe_plan")(config)
        else:
            late("addons.glue.train:run_glue")(config)

    main = once_or_by_seeds("glue", exits(run_once), command)
    run_main(GlueConfig, check_glue, main, argv=argv, description=description, program=program)
