"""Verbs of the ``dschat-lora`` command."""

import argparse

from dschat_lora import __version__


def main() -> None:
    """Run the verb given on the command line."""
    parser = argparse.ArgumentParser(prog="dschat-lora", description="LoRA RLHF on DeepSpeed")
    parser.add_argument("--version", action="version", version=f"dschat-lora {__version__}")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    demo = verbs.add_parser("demo", help="train on the bundled model and data, show what changed")
    demo.add_argument("--output_dir", help="default: the first free of output/demo, -2, -3, ...")
    arguments = parser.parse_args()

    from dschat_lora.demo import run_demo  # heavy, and not wanted for --help

    run_demo(arguments.output_dir)


if __name__ == "__main__":
    main()
