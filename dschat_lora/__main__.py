"""Verbs of the ``dschat-lora`` command."""

import argparse
from itertools import takewhile
from pathlib import Path
from typing import Any

from dschat_lora import __version__
from dschat_lora.checkpoint.adapter_config import accept_adapter
from dschat_lora.config.options import Parser, fail, parse_config, unknown_option
from dschat_lora.config.stages import AuditConfig, ScoreConfig
from dschat_lora.report.rollout_words import show_rollouts
from dschat_lora.report.terminal import error_message, log_once, silence_stdout
from dschat_lora.runtime.validation import check_audit, check_score
from dschat_lora.serving.verbs import chat, serve


def main() -> None:
    """Run the verb given on the command line."""
    parser = argparse.ArgumentParser(prog="dschat-lora", description="LoRA RLHF on DeepSpeed")
    parser.add_argument("--version", action="version", version=f"dschat-lora {__version__}")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    demo = verbs.add_parser("demo", help="train on the bundled model and data, show what changed")
    demo.add_argument("--output_dir", help="default: the first free of output/demo, -2, -3, ...")
    demo.add_argument("--seed", type=int, default=1234, help="of all stages (default: 1234)")
    accept = verbs.add_parser("accept", help="vouch for an adapter that was changed on purpose")
    accept.add_argument("adapter", help="its directory, whose manifest is written anew")
    verbs.add_parser("audit", help="show what a stage would learn of data", add_help=False)
    verbs.add_parser("score", help="score answers by a reward model", add_help=False)
    verbs.add_parser("extract", help="LoRA and head of a full checkpoint to PEFT", add_help=False)
    verbs.add_parser("pipeline", help="run all stages of a YAML file, or go on", add_help=False)
    verbs.add_parser("rollouts", help="look through a run's responses of step 3", add_help=False)
    verbs.add_parser("chat", help="chat with models in the terminal", add_help=False)
    verbs.add_parser("serve", help="serve models over HTTP, and a page to compare", add_help=False)
    arguments, rest = parser.parse_known_args()
    own_parsers = {
        **{"audit": _audit, "score": _score, "extract": _extract, "pipeline": _pipeline},
        **{"rollouts": _rollouts, "chat": chat, "serve": serve},
    }
    if arguments.verb in own_parsers:
        own_parsers[arguments.verb](rest)
    elif rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    elif arguments.verb == "accept":
        _accept(arguments.adapter)
    else:
        from dschat_lora.pipeline.demo import run_demo  # heavy, and not wanted for --help

        run_demo(arguments.output_dir, seed=arguments.seed)


def _accept(directory: str) -> None:
    try:
        accept_adapter(directory)
    except (ValueError, OSError) as error:
        fail(str(error))
    log_once(f"{directory}: its files are the ones its manifest says")


def _audit(argv: list[str]) -> None:
    paths = list(takewhile(lambda word: not word.startswith("-"), argv))
    options = [*(["--data_path", *paths] if paths else []), *argv[len(paths) :]]
    try:
        config = parse_config(
            AuditConfig, options, description=AuditConfig.__doc__, program="dschat-lora audit DATA"
        )
        config = check_audit(config)

        from dschat_lora.runtime.data_audit import audit_data  # heavy

        taken = audit_data(config)
    except BrokenPipeError:
        return silence_stdout()  # whoever reads has read enough
    except (ValueError, OSError) as error:
        fail(error_message(error), code=1 if isinstance(error, OSError) else 2)
    if not taken:
        raise SystemExit(1)


def _score(argv: list[str]) -> None:
    try:
        config = parse_config(
            ScoreConfig, argv, description=ScoreConfig.__doc__, program="dschat-lora score"
        )
        check_score(config)

        # Heavy, and not wanted for a wrong option.
        from dschat_lora.supervised.score import score_files

        score_files(config)
    except BrokenPipeError:
        silence_stdout()  # whoever reads has read enough
    except KeyboardInterrupt:
        fail("stopped; --output_path was not written", code=130)
    except (ValueError, OSError) as error:
        fail(error_message(error), code=1 if isinstance(error, OSError) else 2)
    except RuntimeError as error:
        if type(error).__name__ != "OutOfMemoryError":  # torch's own, which is not imported here
            raise
        fail("the GPU is full: lower --per_device_eval_batch_size or --max_seq_len", code=1)


def _rollouts(argv: list[str]) -> None:
    parser = Parser(
        "dschat-lora rollouts",
        "Look through the responses that a run of step 3 kept: by default the best and the worst.",
    )
    parser.add_argument("run", metavar="OUT", help="output directory of the run")
    for name, what in (
        ("best", "responses of the highest reward"),
        ("worst", "responses of the lowest reward"),
        (
            "changed",
            "prompts whose mean reward changed most, by the best response before and after",
        ),
    ):
        parser.add_argument(f"--{name}", metavar="N", type=int, default=0, help=f"show N {what}")
    parser.add_argument("--contains", metavar="TEXT", help="only where prompt or response has TEXT")
    parser.add_argument(
        "--prompt", metavar="TEXT", help="responses to prompts with TEXT, over time"
    )
    parser.add_argument(
        "--limit", metavar="N", type=int, default=20, help="most of these two (default: 20)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    try:
        chosen = vars(parser.parse_args(argv))
        for name in ("best", "worst", "changed", "limit"):
            if chosen[name] < 0:
                raise ValueError(f"--{name} must be >= 0, got {chosen[name]}")
        if not any(chosen[n] for n in ("best", "worst", "changed", "contains", "prompt")):
            chosen |= {"best": 3, "worst": 3}
        show_rollouts(Path(chosen.pop("run")), **chosen)
    except BrokenPipeError:
        silence_stdout()  # whoever reads has read enough
    except (ValueError, OSError) as error:
        fail(error_message(error), code=1 if isinstance(error, OSError) else 2)


def _extract(argv: list[str]) -> None:
    parser = Parser(
        "dschat-lora extract",
        "Write the LoRA factors and the head that a full checkpoint holds as an "
        "adapter that PEFT loads.",
    )
    parser.add_argument(
        "checkpoint",
        metavar="CHECKPOINT",
        help="directory (the Trainer's checkpoint-N), or file of a model's or of LoRA weights",
    )
    parser.add_argument(
        "--base", metavar="MODEL", required=True, help="hub name or directory of the clean base"
    )
    parser.add_argument(
        "--lora_alpha", metavar="X", type=float, help="of the training; no checkpoint says it"
    )
    parser.add_argument(
        "--enable_lora", metavar="PART", nargs="*", default=[], help="q, k, v of packed layers"
    )
    parser.add_argument("--output_dir", metavar="DIR", help="default: CHECKPOINT/adapter")
    try:
        chosen = _parsed(parser, argv, ["base", "lora_alpha", "enable_lora", "output_dir"])

        from dschat_lora.checkpoint.extract import extract  # heavy, and not wanted for --help

        chosen["enable_lora"] = tuple(chosen["enable_lora"])
        extract(**chosen, say=log_once)
    except (ValueError, OSError) as error:
        fail(error_message(error), code=1 if isinstance(error, OSError) else 2)


def _pipeline(argv: list[str]) -> None:
    parser = Parser(
        "dschat-lora pipeline",
        "Run the stages of a YAML file one after another; those that are finished are "
        "skipped, one that was stopped goes on.",
    )
    parser.add_argument("file", metavar="FILE", help="YAML file of the stages and their options")
    parser.add_argument("--output_dir", metavar="DIR", help="instead of the file's output_dir")
    parser.add_argument("--num_gpus", metavar="N", type=int, help="processes, one for each GPU")
    parser.add_argument(
        "--dry_run", action="store_true", help="check all stages, say what would run, and stop"
    )
    parser.add_argument(
        "--from",
        dest="redo_from",
        metavar="STAGE",
        help="do this stage and all later ones again, over what they left",
    )
    parser.add_argument(
        "--set",
        dest="overrides",
        metavar="STAGE.OPTION=VALUE",
        nargs="+",
        action="extend",
        default=[],
        help="options instead of the file's",
    )
    try:
        chosen = _parsed(parser, argv, ["output_dir", "num_gpus", "dry_run", "from", "set"])
    except ValueError as error:
        fail(str(error))

    from dschat_lora.pipeline.run import run_pipeline  # not wanted for --help

    run_pipeline(**chosen)


def _parsed(parser: Parser, argv: list[str], names: list[str]) -> dict[str, Any]:
    """Values of a verb's arguments; an option that is none of ``names`` is a ValueError."""
    chosen, unknown = parser.parse_known_args(argv)
    if unknown:
        raise ValueError(unknown_option(unknown[0], names))
    return vars(chosen)


if __name__ == "__main__":
    main()
