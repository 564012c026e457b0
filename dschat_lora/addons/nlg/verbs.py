"""The command line of ``dschat-lora nlg`` and ``training/nlg_gpt2``."""

from collections.abc import Callable, Sequence
from functools import partial

from dschat_lora.addons.loralib.seeds import once_or_by_seeds, run_experiment
from dschat_lora.addons.nlg.addon import ADDON
from dschat_lora.addons.nlg.config import DecodeConfig, EvaluateConfig, FormatConfig, NlgConfig
from dschat_lora.addons.nlg.predictions import run_format, scorer_arguments
from dschat_lora.addons.nlg.validation import (
    check_decode,
    check_evaluate,
    check_format,
    check_training,
)
from dschat_lora.config.options import chosen_verb
from dschat_lora.runtime.stage_main import exits, late, run_main


def nlg(argv: list[str]) -> None:
    """Run ``dschat-lora nlg``."""
    run_experiment("nlg", run_nlg, argv, description=f"{ADDON.summaries['nlg']}.")


def run_nlg(
    argv: Sequence[str],
    *,
    command: Sequence[str] | None = None,
    description: str | None = None,
    program: str | None = None,
) -> None:
    """The main function of GPT-2 on tables of data: train, decode, format or evaluate.

    ``beam`` is another name of decode; decode with ``--sample_file``, as the original's
    ``gpt2_decode.py`` has it, is format. ``command`` starts each run of ``--seeds``; the
    description and the program are those of :func:`~dschat_lora.runtime.stage_main.run_main`.
    """
    verb, argv = chosen_verb(argv, ("train", "decode", "beam", "format", "evaluate"))
    if verb == "decode" and any(word.startswith("--sample_file") for word in argv):
        verb = "format"
    if verb == "evaluate":
        argv = scorer_arguments(argv)
    run: Callable[..., None] = partial(
        run_main, argv=argv, description=description, program=program
    )
    if verb == "train":
        train = exits(late("addons.nlg.train:run_training"))
        run(NlgConfig, check_training, once_or_by_seeds("nlg", train, command))
    elif verb in ("decode", "beam"):
        run(DecodeConfig, check_decode, late("addons.nlg.decode:run_decode"))
    elif verb == "format":
        run(FormatConfig, check_format, run_format)
    else:
        run(EvaluateConfig, check_evaluate, late("addons.nlg.evaluate:run_evaluate"))
