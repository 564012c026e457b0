"""What the package lists has its home in the docs and a test: each algorithm, row type and verb."""

import re
from functools import cache
from pathlib import Path
from typing import get_args

import pytest

from dschat_lora.__main__ import VERBS
from dschat_lora.config.stages import DpoConfig
from dschat_lora.data.layouts import PROMPTS
from dschat_lora.data.rows import RowType
from dschat_lora.rl.options.algorithms import ALGORITHMS
from dschat_lora.rl.options.engines import ENGINES
from dschat_lora.rl.options.names import OWN_NAMES

TESTS = Path(__file__).parent
# page -> (what goes before a name in tests that use it, the names)
REGISTRIES = {
    "step3_rlhf.md": ("--algorithm ", ALGORITHMS),
    "step2_dpo.md": ("--loss_type ", get_args(DpoConfig.__annotations__["loss_type"])),
    "data_formats.md": ("(", [*get_args(RowType), *(layout for _, layout in PROMPTS.values())]),
    "commands.md": ("dschat-lora ", VERBS),
}
NAMES = [(page, name) for page, (_, names) in REGISTRIES.items() for name in names]


@cache
def modules():
    """The text of all test modules but this one, and of their tables."""
    paths = [path for path in TESTS.rglob("test_*.py") if path != Path(__file__)]
    paths += TESTS.rglob("*.toml")
    return "\n".join(path.read_text(encoding="utf-8") for path in paths)


@pytest.mark.parametrize(("page", "name"), NAMES)
def test_every_name_of_a_registry_is_in_the_page_that_is_its_home(page, name):
    text = (TESTS.parent / "docs" / page).read_text(encoding="utf-8")
    spelt = re.escape(name).replace(r"\-", "[-, ]+")
    assert re.search(rf"(?<![\w-]){spelt}(?![\w-])", text, re.IGNORECASE), f"docs/{page}: {name}"


@pytest.mark.parametrize(("page", "name"), NAMES)
def test_every_name_of_a_registry_is_used_by_a_test(page, name):
    before = REGISTRIES[page][0]
    used = rf"""(?:["']|{re.escape(before)}){re.escape(name)}["'\s)]"""
    assert re.search(used, modules()), f"no test module names {name!r}"


def test_no_add_on_may_have_a_name_of_the_trunk():
    names = {"algorithm": (*ALGORITHMS,), "rollout_engine": (*ENGINES,)}
    assert {each: OWN_NAMES[each] for each in names} == names
