"""Writes what fits by the planner: tables of docs/memory.md and benchmarks/speed.md.

python scripts/memory_table.py

Nothing is downloaded: ``dschat-lora plan`` knows the shapes of these models.
"""

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from dschat_lora.addons.pipeline.recipe import read_recipe
from dschat_lora.addons.planning.cards import Card, find_card
from dschat_lora.addons.planning.plan import (
    GENERATION,
    StagePlan,
    recomputing_options,
    with_recomputation,
)
from dschat_lora.addons.planning.plan_search import largest_rows, plan_file, plan_stage, planning

ROOT = Path(__file__).resolve().parents[1]
MODELS = ("OPT-1.3B", "OPT-6.7B", "Llama-2-7B", "Llama-3-8B", "Qwen3-8B")
SIZES = ("12GB", "16GB", "24GB", "48GB", "80GB", "141GB")
RANK, LENGTH, DECODED = 16, 1024, 8
RECIPES = ("opt-6.7b_4bit", "llama-2-7b_4bit", "llama-3-8b_4bit", "qwen3-8b_4bit")
RECIPE_SIZES = ("12GB", "16GB", "24GB")
GRPO = ("rlhf.algorithm=grpo", "rlhf.num_generations=4")
_RL = {
    "max_prompt_seq_len": LENGTH // 2,
    "max_answer_seq_len": LENGTH // 2,
    "per_device_generation_batch_size": DECODED,
    "actor_lora_dim": RANK,
}
_GRPO = {"algorithm": "grpo", "num_generations": DECODED, "reward_function": ("math:fsum",)}
LARGEST_MODELS = ("Qwen3-0.6B", "Qwen3-1.7B", "Qwen3-4B", "Qwen3-8B", "Qwen3-14B")
LARGEST_SIZES = ("8GB", "16GB", "24GB", "80GB")
# Name, column of the table of all stages, bits of the base, and options.
LARGEST: tuple[tuple[str, str, int, dict[str, Any]], ...] = (
    ("SFT, 16-bit base", "SFT", 16, {}),
    ("SFT, 4-bit base", "SFT", 4, {}),
    ("DPO, 16-bit base", "DPO", 16, {}),
    ("GRPO, 16-bit base", "PPO", 16, _GRPO),
    ("GRPO, 4-bit base", "PPO", 4, _GRPO),
    ("PPO with a reward model, 16-bit base", "PPO", 16, {}),
)
_SUPERVISED = {"max_seq_len": LENGTH, "lora_dim": RANK}
# Column -> stage, its options, and those that name the model.
STAGES_OF_TABLE: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    "SFT": ("sft", _SUPERVISED, ("model_name_or_path",)),
    "reward": ("reward", _SUPERVISED, ("model_name_or_path",)),
    "DPO": ("dpo", _SUPERVISED, ("model_name_or_path",)),
    "PPO": (
        "rlhf",
        {**_RL, "critic_lora_dim": RANK},
        ("actor_model_name_or_path", "critic_model_name_or_path"),
    ),
}


def rows(
    models: Iterable[str] = MODELS, stages: Iterable[str] = tuple(STAGES_OF_TABLE)
) -> Iterator[str]:
    """Lines of the table, one for each model, stage and kind of base."""
    for model in models:
        for column in stages:
            stage, options, names = STAGES_OF_TABLE[column]
            for bits in (16, 4):
                given = options | dict.fromkeys(names, model)
                given |= {} if bits == 16 else {"base_bits": bits}
                with planning() as home:
                    plan = plan_stage(stage, given, home, card=None).plan
                    cells = [_cell(plan, find_card(size)) for size in SIZES]
                yield f"| {model} | {column} | {bits} | {' | '.join(cells)} |"


def _cell(plan: StagePlan, card: Card) -> str:
    """Rows with activations kept, and recomputed; a dash where not one fits."""
    if plan.phases.get(GENERATION, 0) > card.usable_bytes:
        return "-"
    settings = ((), recomputing_options(plan.config))
    found = [largest_rows(with_recomputation(plan, on), card.usable_bytes) for on in settings]
    kept, again = (next(rows for name, rows in each.items() if "train" in name) for each in found)
    return f"{kept or '-'} / {again}" if again else "-"


def largest_models() -> Iterator[str]:
    """Lines of the README's table: the largest of some models that fits each size of GPU."""
    for label, column, bits, own in LARGEST:
        stage, options, names = STAGES_OF_TABLE[column]
        cells = dict.fromkeys(LARGEST_SIZES, "-")
        for model in LARGEST_MODELS:
            given = options | own | dict.fromkeys(names[: 1 + (column == "PPO" and not own)], model)
            given |= {"base_bits": bits}
            with planning() as home:
                plan = plan_stage(stage, given, home, card=None).plan
            for size in LARGEST_SIZES:
                if _cell(plan, find_card(size)) != "-":
                    cells[size] = model.removeprefix("Qwen3-")
        yield f"| {label} | {' | '.join(cells.values())} |"


def recipe_rows(names: Iterable[str] = RECIPES) -> Iterator[str]:
    """Lines of the table of recipes, one for each stage and algorithm."""
    for name in names:
        for algorithm, changes in (("PPO", ()), ("GRPO", GRPO)):
            recipe = read_recipe(name, overrides=changes)
            with planning() as home:
                for planned in plan_file(recipe, home):
                    is_rlhf = planned.name == "rlhf"
                    if is_rlhf or algorithm == "PPO":
                        label = algorithm if is_rlhf else planned.name
                        yield f"| {name} | {label} | {_recipe_cells(planned.plan)} |"


def _recipe_cells(plan: StagePlan) -> str:
    """What a stage needs in GiB, and on each card the most rows that it trains on and decodes."""
    cells = [f"{plan.peak / 2**30:.3g}"]
    for size in RECIPE_SIZES:
        usable = find_card(size).usable_bytes
        found = largest_rows(plan, usable) if plan.peak <= usable else {}
        cells.append(
            " / ".join(str(rows) for _, rows in sorted(found.items(), reverse=True)) or "-"
        )
    return " | ".join(cells)


def write_table(page: str, name: str, head: Iterable[str], lines: Iterable[str]) -> None:
    """Put a table into a page in place of the last one of that name."""
    names = list(head)
    text = "\n".join([f"| {' | '.join(names)} |", "|" + "---|" * len(names), *lines, ""])
    marks = re.compile(rf"(?<=<!-- table: {name} -->\n).*?(?=<!-- end -->)", re.DOTALL)
    file = ROOT / page
    file.write_text(marks.sub(lambda _: text, file.read_text(encoding="utf-8")), encoding="utf-8")


def main() -> None:
    """Write the tables."""
    head = ["Qwen3 with LoRA", *(f"{size[:-2]} GB" for size in LARGEST_SIZES)]
    write_table("README.md", "largest", head, largest_models())
    head = ["model", "stage", "bits", *(f"{size[:-2]} GB" for size in SIZES)]
    lines = list(rows())
    write_table("benchmarks/speed.md", "rows", head, lines)
    write_table("docs/memory.md", "sft", head, (line for line in lines if "| SFT |" in line))
    head = ["recipe", "stage", "GiB", *(f"{size[:-2]} GB" for size in RECIPE_SIZES)]
    write_table("benchmarks/speed.md", "recipes", head, recipe_rows())


if __name__ == "__main__":
    main()
