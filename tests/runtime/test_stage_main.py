"""What runs a verb is imported when it is called, and stays."""

import gc
import sys
import warnings

import pytest

from dschat_lora.runtime import stage_main
from dschat_lora.runtime.stage_main import late

NAME = "late_module_of_a_test"


@pytest.fixture
def module(tmp_path, monkeypatch):
    """``module(text)``: calls a function of a module of this text, as :func:`late` does."""
    package = sys.modules["dschat_lora"]
    monkeypatch.setattr(stage_main, "_is_command", True)
    monkeypatch.setattr(package, "__path__", [*package.__path__, str(tmp_path)])

    def call(text):
        (tmp_path / f"{NAME}.py").write_text(text, encoding="utf-8")
        return late(f"{NAME}:function")

    yield call
    sys.modules.pop(f"dschat_lora.{NAME}", None)


def test_nothing_is_collected_while_it_is_imported_and_what_it_made_is_never_looked_at(module):
    function = module(
        "import gc\nenabled, made = gc.isenabled(), [[]]\nfunction = lambda: (enabled, made)"
    )
    enabled, made = function()
    assert not enabled
    assert gc.isenabled()
    assert not any(each is made for each in gc.get_objects())


def test_what_is_made_after_the_import_is_collected_as_ever(module):
    function = module("function = lambda: [[]]")
    made = [function(), function()]
    assert all(any(each is one for each in gc.get_objects()) for one in made)


def test_an_import_that_fails_leaves_the_collector_on(module):
    with pytest.raises(ZeroDivisionError):
        module("1 / 0")()
    assert gc.isenabled()


def test_a_warning_of_the_package_is_one_line(monkeypatch):
    monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)
    stage_main.prepare_process()
    places = (stage_main.__file__, "/elsewhere/module.py")
    ours, other = (warnings.formatwarning("slow", UserWarning, each, 7) for each in places)
    assert ours == "note: slow\n"
    assert other == "/elsewhere/module.py:7: UserWarning: slow\n"
