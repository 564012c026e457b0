"""The command lines of the papers' experiments: GPT-2 on tables of data, and GLUE."""

import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from dschat_lora.config.options import chosen_verb, flatten
from dschat_lora.experiments.glue.config import GlueConfig
from dschat_lora.experiments.glue.validation import check_glue, fix_environment
from dschat_lora.experiments.nlg.config import DecodeConfig, EvaluateConfig, NlgConfig
from dschat_lora.experiments.nlg.original import scorer_arguments
from dschat_lora.experiments.nlg.scorer_files import FormatConfig, check_format, run_format
from dschat_lora.experiments.nlg.validation import check_decode, check_evaluate, check_training
from dschat_lora.pipeline.launch import (
    launch_command,
    launch_stage,
    launcher_command,
    run_or_end,
    split_launcher_options,
)
from dschat_lora.runtime.seeds import run_seeds
from dschat_lora.runtime.stage_main import exits, late, run_main

SUMMARIES = {
    "nlg": "GPT-2 puts data into words: train, decode, format or evaluate",
    "glue": "GLUE with RoBERTa or DeBERTa-v2",
}


def run_nlg(
    argv: Sequence[str],
    *,
    description: str | None = None,
    program: str | None = None,
    command: Sequence[str] | None = None,
) -> None:
    """The main function of GPT-2 on tables of data: train, decode, format or evaluate.

    ``beam`` is another name of decode; decode with ``--sample_file``, as the original's
    ``gpt2_decode.py`` has it, is format. ``command`` starts each run of ``--seeds``.
    """
    verb, argv = chosen_verb(argv, ("train", "decode", "beam", "format", "evaluate"))
    if verb == "decode" and any(word.startswith("--sample_file") for word in argv):
        verb = "format"
    if verb == "evaluate":
        argv = scorer_arguments(argv)
    run = partial(run_main, description=description, argv=argv, program=program)
    if verb == "train":
        main_function = exits(late("experiments.nlg.train:run_training"))
        run(NlgConfig, check_training, _once_or_by_seeds("nlg", main_function, command))
    elif verb in ("decode", "beam"):
        run(DecodeConfig, check_decode, late("experiments.nlg.decode:run_decode"))
    elif verb == "format":
        run(FormatConfig, check_format, run_format)
    else:
        run(EvaluateConfig, check_evaluate, late("experiments.nlg.evaluate:run_evaluate"))


def run_glue(
    argv: Sequence[str],
    *,
    description: str | None = None,
    program: str | None = None,
    command: Sequence[str] | None = None,
) -> None:
    """The main function of GLUE; ``command`` starts each run of ``--seeds``."""
    fix_environment()
    run = _once_or_by_seeds("glue", exits(late("experiments.glue.stage:run_glue")), command)
    run_main(GlueConfig, check_glue, run, description=description, argv=argv, program=program)


def _once_or_by_seeds(
    name: str, run_once: Callable[..., None], command: Sequence[str] | None
) -> Callable[[Any], None]:
    """What a checked config is given to: one run, or as many as ``--seeds`` says."""
    prefix = command or (sys.executable, "-m", "dschat_lora", name)

    def run(config: GlueConfig | NlgConfig) -> None:
        if config.seeds > 1 and not flatten(config)["dry_run"]:
            run_seeds(config, name=name, prefix=prefix, run=run_or_end)
        else:
            run_once(config)

    return run


def experiment(name: str, argv: list[str]) -> None:
    """The experiment of a paper in this process, or in those that the launcher starts.

    Of several seeds each run has processes of the launcher.
    """
    launcher, rest = split_launcher_options(argv)
    command = None
    if launcher is not None:
        command = launch_command(name, launcher, (), program=launcher_command())
        if not any(word.split("=")[0] == "--seeds" for word in rest):
            launch_stage(name, launcher, rest)
    texts = {"description": f"{SUMMARIES[name]}.", "program": f"dschat-lora {name}"}
    {"nlg": run_nlg, "glue": run_glue}[name](rest, **texts, command=command)
