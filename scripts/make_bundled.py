"""Makes everything under dschat_lora/assets from scratch: data set, tokenizer and tiny base.

python scripts/make_bundled.py --output dschat_lora/assets          all three parts
python scripts/make_bundled.py data --output dschat_lora/assets     one part
"""

import argparse
import logging
from pathlib import Path

PARTS = ("data", "tokenizer", "base")


def main() -> None:
    """Make the parts that the command line names."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help="of data, tokenizer, base")
    parser.add_argument("--output", type=Path, default=Path("dschat_lora/assets"))
    parser.add_argument("--steps", type=int, default=2400, help="training steps of the base")
    arguments = parser.parse_args()
    unknown = set(arguments.parts) - set(PARTS)
    if unknown:
        parser.error(f"there is no part {sorted(unknown)}; the parts are {list(PARTS)}")
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    for part in arguments.parts or PARTS:
        make(part, arguments.output, arguments.steps)


def make(part: str, output: Path, steps: int) -> None:
    """Make one part; torch is only imported for the part that needs it."""
    if part == "data":
        from bundled_text import write_data

        write_data(output / "data")
    elif part == "tokenizer":
        from bundled_tokenizer import write_tokenizer

        write_tokenizer(output / "model")
    else:
        from bundled_base import write_base

        write_base(output / "model", steps=steps)


if __name__ == "__main__":
    main()
