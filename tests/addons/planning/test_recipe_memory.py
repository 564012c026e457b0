"""The pipelines under configs/recipes take the memory that they state."""

import re
from pathlib import Path

import pytest

from dschat_lora.addons.pipeline.recipe import read_recipe
from dschat_lora.addons.planning.cards import find_card
from dschat_lora.addons.planning.plan_search import plan_file, planning
from helpers.spread import ALL

ROOT = Path(__file__).resolve().parents[3]
RECIPES = sorted((ROOT / "configs" / "recipes").glob("*.yaml"))
STATED = re.compile(r"^#\s+(\w+)\s+([\d.]+) GiB", re.MULTILINE)


pytestmark = pytest.mark.usefixtures("own_directory", "first_rows")


def stated(path):
    """GiB of each stage as the recipe's comment says."""
    sizes = STATED.findall(path.read_text(encoding="utf-8"))
    return {name: float(number) for name, number in sizes}


@pytest.mark.parametrize(
    "path", [path for path in RECIPES if ALL or path.stem == "bundled"], ids=lambda path: path.stem
)
def test_recipe_states_the_memory_that_is_planned(path):
    # The bundled one is stated as it runs on a CPU.
    stages = read_recipe(str(path)).stages if path.stem == "bundled" else ()
    recipe = read_recipe(str(path), overrides=[f"{stage}.dtype=fp32" for stage in stages])
    with planning() as home:
        plans = plan_file(recipe, home)
        peaks = {each.name: each.plan.peak / 2**30 for each in plans}
    assert stated(path) == {name: float(f"{peak:.3g}") for name, peak in peaks.items()}
    if path.stem.endswith("_4bit"):
        assert max(peaks.values()) * 2**30 <= find_card("12GB").usable_bytes


def test_llama_has_one_frozen_base_for_every_role():
    """7 billion weights in bf16 are 12.6 GiB: no second copy fits into what is stated."""
    rlhf = stated(ROOT / "configs" / "recipes" / "llama-2-7b.yaml")["rlhf"]
    assert 12.6 < rlhf < 2 * 12.6 + 4


def test_document_has_the_memory_that_recipes_state():
    text = (ROOT / "docs" / "addons" / "pipeline.md").read_text(encoding="utf-8")
    for path in RECIPES:
        (row,) = (line for line in text.splitlines() if f"{path.name}` |" in line)
        assert [float(cell) for cell in row.split("|")[4:7]] == list(stated(path).values())
