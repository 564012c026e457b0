"""What types of models can do, as found by trying each: the table in ``families.json``.

The file is ``{"transformers": version, "types": {type: {column: true | "reason"}}, "left_out":
{type: "reason"}}``. A reason says why not; a column that a type lacks was not tried.
``tests/addons/planning/families_table.py`` writes the file. Imports nothing heavy: the page of the
documentation is made of it too.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

FAMILIES = Path(__file__).with_name("families.json")
Cell = bool | str | None
# What is tried, by column.
COLUMNS = {
    "trains": "three steps of SFT give the losses and the adapter of stock transformers with PEFT",
    "experts": "experts of a mixture learn",
    "packed": "several samples share a row, with the same loss as alone",
    "rollouts": "sampling matches generate, with the log-probabilities of training",
    "ppo": "an iteration of PPO",
    "grpo": "an iteration of GRPO",
    "four_bit": "LoRA on a base with 4-bit transformer blocks",
    "tensor_parallel": "one model on several processes",
    "merge": "base and adapter as one model of stock transformers",
    "peft": "adapters can be exchanged with stock PEFT",
    "serve": "several requests and adapters in one batch, with unchanged logits",
    "gguf": "llama.cpp's converter supports the class",
}
_SHORT = {
    **{"ppo": "PPO", "grpo": "GRPO", "four_bit": "4-bit"},
    **{"tensor_parallel": "TP", "peft": "PEFT", "gguf": "GGUF"},
}
NO_EXPERTS = "it has no experts"


@dataclass(frozen=True)
class Families:
    """The table, and the version of transformers that it holds for."""

    transformers: str
    types: Mapping[str, Mapping[str, Cell]]
    left_out: Mapping[str, str]  # types that were not tried, and why

    def why_not(self) -> dict[str, dict[str, list[str]]]:
        """Types by the reason that speaks against them, by column."""
        kinds: dict[str, dict[str, list[str]]] = {column: {} for column in COLUMNS}
        for kind, cells in self.types.items():
            for column, cell in cells.items():
                if isinstance(cell, str) and cell != NO_EXPERTS:
                    kinds[column].setdefault(cell, []).append(kind)
        return {column: reasons for column, reasons in kinds.items() if reasons}

    def rows(self) -> list[list[str]]:
        """The table in words, a row for each type."""
        return [
            [kind, *(word(cells.get(column)) for column in COLUMNS)]
            for kind, cells in sorted(self.types.items())
        ]


def read_families() -> Families:
    """The table that comes with the package."""
    return Families(**json.loads(FAMILIES.read_text(encoding="utf-8")))


def word(cell: Cell) -> str:
    """A cell in one word: yes, no, - where there is nothing to try, ? where nobody did."""
    if cell is None:
        return "?"
    return "yes" if cell is True else "-" if cell == NO_EXPERTS else "no"


def short(column: str) -> str:
    """A column's name on the terminal and in the documentation."""
    return _SHORT.get(column, column)


def page() -> str:
    """The table as a page of the documentation."""
    return "\n".join(_lines_of_page(read_families())) + "\n"


def _lines_of_page(found: Families) -> Iterator[str]:
    yield "# Types of models, and what each can do\n"
    yield (
        f"Made by a program from tests with transformers {found.transformers}: a tiny random model "
        "of each type is trained, sampled, merged and loaded again beside stock transformers and "
        "PEFT. `dschat-lora models` prints this table, and `dschat-lora models MODEL` says the "
        "same of a model. A type that is not listed is tried by the probe at the start of its run. "
        "`?` was not tried.\n"
    )
    yield f"| type | {' | '.join(map(short, COLUMNS))} |"
    yield "|---" * (len(COLUMNS) + 1) + "|"
    yield from (f"| {kind} | {' | '.join(words)} |" for kind, *words in found.rows())
    yield "\n## What a column says\n"
    yield from (f"* **{short(column)}**: {what}." for column, what in COLUMNS.items())
    yield "\n## Why not\n"
    for column, reasons in found.why_not().items():
        yield f"**{short(column)}**\n"
        yield from (f"* {_text(why)}: {', '.join(kinds)}" for why, kinds in reasons.items())
        yield ""
    yield "## Not tried\n"
    by_reason: dict[str, list[str]] = {}
    for kind, reason in found.left_out.items():
        by_reason.setdefault(reason, []).append(kind)
    yield from (f"* {_text(why)}: {', '.join(kinds)}" for why, kinds in by_reason.items())


def _text(reason: str) -> str:
    """A reason as text, in which names of options and of weights are no markup."""
    return reason.replace("_", r"\_").replace("*", r"\*").replace("<", "&lt;")
