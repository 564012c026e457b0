"""The pipelines under configs/recipes can be run as they stand."""

import json
import re
import shlex
from pathlib import Path

import pytest

from dschat_lora import __main__ as command
from dschat_lora.addons.pipeline.recipe import check_stages, read_recipe
from dschat_lora.commands.stages import STAGES
from dschat_lora.config.addons import verbs
from dschat_lora.config.bundled import recipes
from dschat_lora.config.options import build_config, command_line, parse_config

ROOT = Path(__file__).resolve().parents[3]
RECIPES = sorted((ROOT / "configs" / "recipes").glob("*.yaml"))


pytestmark = pytest.mark.usefixtures("own_directory", "first_rows")


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


def test_recipes_and_documents_name_recipes_that_exist():
    texts = [*RECIPES, ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    named = set()
    for path in texts:
        for words in re.findall(r"dschat-lora pipeline ([^\n`]+)", path.read_text("utf-8")):
            file = shlex.split(words)[0]
            if file.startswith("configs/"):
                assert (ROOT / file).is_file(), f"{path} names {file}"
                named.add(ROOT / file)
    assert named == set(RECIPES)


def test_every_recipe_is_listed_with_a_line_and_the_verb_that_takes_it(monkeypatch, capsys):
    def run(*argv):
        monkeypatch.setattr("sys.argv", ["dschat-lora", "recipes", *argv])
        command.main()
        return capsys.readouterr().out

    out = run()
    for name in recipes():
        assert re.search(rf"^{re.escape(name)} +\w.*$", out, re.MULTILINE)
    listed = json.loads(run("--json"))
    files = [*(ROOT / "configs" / "recipes").rglob("*.yaml")]
    assert {Path(each["path"]).resolve() for each in listed} == {file.resolve() for file in files}
    for each in listed:
        assert 10 < len(each["summary"]) < 140
        program, name, *_ = shlex.split(each["command"])
        assert (program, name in {*command.VERBS, *verbs()}) == ("dschat-lora", True)
