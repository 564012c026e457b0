"""Verbs of the ``dschat-lora`` command."""

import argparse

from dschat_lora import __version__
from dschat_lora.checkpoint.adapter_config import accept_adapter
from dschat_lora.cli.options import fail, parse_config
from dschat_lora.config import ScoreConfig
from dschat_lora.preflight import check_score
from dschat_lora.report.terminal import fall_silent, in_words, say_once


def main() -> None:
    """Run the verb given on the command line."""
    parser = argparse.ArgumentParser(prog="dschat-lora", description="LoRA RLHF on DeepSpeed")
    parser.add_argument("--version", action="version", version=f"dschat-lora {__version__}")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    demo = verbs.add_parser("demo", help="train on the bundled model and data, show what changed")
    demo.add_argument("--output_dir", help="default: the first free of output/demo, -2, -3, ...")
    accept = verbs.add_parser("accept", help="vouch for an adapter that was changed on purpose")
    accept.add_argument("adapter", help="its directory, whose manifest is written anew")
    verbs.add_parser("score", help="score answers by a reward model", add_help=False)
    arguments, rest = parser.parse_known_args()
    if arguments.verb == "score":
        _score(rest)
        return
    if rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if arguments.verb == "accept":
        _accept(arguments.adapter)
        return

    from dschat_lora.demo import run_demo  # heavy, and not wanted for --help

    run_demo(arguments.output_dir)


def _accept(directory: str) -> None:
    try:
        accept_adapter(directory)
    except (ValueError, OSError) as error:
        fail(str(error))
    say_once(f"{directory}: its files are the ones its manifest says")


def _score(argv: list[str]) -> None:
    try:
        config = parse_config(
            ScoreConfig, argv, description=ScoreConfig.__doc__, program="dschat-lora score"
        )
        check_score(config)

        from dschat_lora.score import score_files  # heavy, and not wanted for a wrong option

        score_files(config)
    except BrokenPipeError:
        fall_silent()  # whoever reads has read enough
    except KeyboardInterrupt:
        fail("stopped; --output_path was not written", code=130)
    except (ValueError, OSError) as error:
        fail(in_words(error), code=1 if isinstance(error, OSError) else 2)
    except RuntimeError as error:
        if type(error).__name__ != "OutOfMemoryError":  # torch's own, which is not imported here
            raise
        fail("the GPU is full: lower --per_device_eval_batch_size or --max_seq_len", code=1)


if __name__ == "__main__":
    main()
