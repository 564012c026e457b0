"""The pipelines under configs/recipes can be run as they stand, in the memory they state."""

import re
import shlex
from pathlib import Path

import pytest

from dschat_lora.addons.pipeline.recipe import check_stages, read_recipe
from dschat_lora.addons.planning.plan_search import plan_file, planning
from dschat_lora.commands.stages import STAGES
from dschat_lora.config.options import build_config, command_line, parse_config
from dschat_lora.perf.cards import find_card
from helpers.spread import ALL

ROOT = Path(__file__).resolve().parents[2]
RECIPES = sorted((ROOT / "configs" / "recipes").glob("*.yaml"))
STATED = re.compile(r"^#\s+(\w+)\s+([\d.]+) GiB", re.MULTILINE)


@pytest.fixture(autouse=True)
def _in_a_directory_of_its_own(tmp_path, monkeypatch, first_rows):
    monkeypatch.chdir(tmp_path)  # where nothing of an earlier run lies


def stated(path):
    """GiB of each stage as the recipe's comment says."""
    found = STATED.findall(path.read_text(encoding="utf-8"))
    return {name: float(number) for name, number in found}


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_recipe_is_what_its_stages_take(path):
    recipe = read_recipe(str(path))
    assert list(recipe.stages) == ["sft", "reward", "rlhf"]
    assert recipe.directory == Path("output") / path.stem
    assert recipe.launcher.num_gpus == 1
    for name, options in recipe.stages.items():
        config = build_config(STAGES[name].config, options)
        assert config.given == options.keys()
        assert parse_config(STAGES[name].config, command_line(options)) == config
    checked = check_stages(recipe)
    assert checked["rlhf"].actor.lora_dim == checked["sft"].lora.lora_dim > 0
    assert checked["rlhf"].critic.lora_dim == checked["reward"].lora.lora_dim > 0
    assert not any("target_modules" in options for options in recipe.stages.values())


@pytest.mark.parametrize(
    "path",
    [path for path in RECIPES if ALL or path.stem == "bundled"],
    ids=lambda path: path.stem,
)
def test_recipe_states_the_memory_that_is_planned(path):
    # The bundled one is stated as it runs on a CPU.
    stages = read_recipe(str(path)).stages if path.stem == "bundled" else ()
    recipe = read_recipe(str(path), overrides=[f"{stage}.dtype=fp32" for stage in stages])
    with planning() as home:
        plans = plan_file(recipe, home)
        peaks = {each.name: each.plan.memory.peak / 2**30 for each in plans}
    assert stated(path) == {name: float(f"{peak:.3g}") for name, peak in peaks.items()}
    if path.stem.endswith("_4bit"):
        assert max(peaks.values()) * 2**30 <= find_card("12GB").usable_bytes


def test_llama_has_one_frozen_base_for_every_role():
    """7 billion weights in bf16 are 12.6 GiB: no second copy fits into what is stated."""
    rlhf = stated(ROOT / "configs" / "recipes" / "llama-2-7b.yaml")["rlhf"]
    assert 12.6 < rlhf < 2 * 12.6 + 4


def test_recipes_and_documents_name_recipes_that_exist():
    texts = [*RECIPES, ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    found = set()
    for path in texts:
        for words in re.findall(r"dschat-lora pipeline ([^\n`]+)", path.read_text("utf-8")):
            file = shlex.split(words)[0]
            if file.startswith("configs/"):
                assert (ROOT / file).is_file(), f"{path} names {file}"
                found.add(ROOT / file)
    assert found == set(RECIPES)


def test_document_has_the_memory_that_recipes_state():
    text = (ROOT / "docs" / "pipeline.md").read_text(encoding="utf-8")
    for path in RECIPES:
        (row,) = (line for line in text.splitlines() if f"{path.name}` |" in line)
        assert [float(cell) for cell in row.split("|")[4:7]] == list(stated(path).values())
