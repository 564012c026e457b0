"""Which tests run by which command, and that each add-on has tests, a page and a smoke test."""

from pathlib import Path
from types import SimpleNamespace

import pytest

TESTS = Path(__file__).parent
ROOT = TESTS.parent
# Where a test lies, and its mark.
ITEMS = {
    "trunk": ("lora/test_layers.py", None),
    "long": ("lora/test_layers.py", "thorough"),
    "smoke": ("addons/one/test_a.py", "smoke"),
    "one": ("addons/one/test_b.py", None),
    "two": ("addons/two/test_c.py", None),
    "two_long": ("addons/two/test_c.py", "thorough"),
}


@pytest.mark.parametrize(
    ("arguments", "taken"),
    [
        ("tests", "trunk smoke"),
        ("tests/lora", "trunk smoke"),  # pytest itself collects no others there
        ("tests/addons", "trunk smoke one two"),
        ("tests/addons/two", "trunk smoke two"),
        ("tests/addons/one/test_b.py tests/lora", "trunk smoke one"),
        ("tests/addons/two/test_c.py::test_x", "trunk long smoke one two two_long"),
    ],
)
def test_what_is_named_on_the_command_line_is_taken(arguments, taken, request, monkeypatch):
    hooks = request.config.pluginmanager.get_plugin(str(TESTS / "conftest.py"))
    monkeypatch.setattr(hooks, "ALL", False)
    left = []
    config = SimpleNamespace(
        args=arguments.split(),
        invocation_params=SimpleNamespace(dir=ROOT),
        hook=SimpleNamespace(pytest_deselected=lambda items: left.extend(items)),
    )
    items = [
        SimpleNamespace(
            name=name, path=TESTS / path, get_closest_marker=lambda each, mark=mark: each == mark
        )
        for name, (path, mark) in ITEMS.items()
    ]
    every = list(items)
    hooks.pytest_collection_modifyitems(config, items)
    assert [item.name for item in items] == taken.split()
    assert [item for item in every if item not in items] == left


@pytest.mark.parametrize(
    "name", sorted(path.parent.name for path in ROOT.glob("dschat_lora/addons/*/addon.py"))
)
def test_each_addon_has_tests_and_a_smoke_test(name):
    texts = [path.read_text("utf-8") for path in (TESTS / "addons" / name).rglob("test_*.py")]
    assert texts
    assert any("pytest.mark.smoke" in text for text in texts)
