"""Values of options that add-ons provide, by a name or by how they begin."""

import pytest

from dschat_lora.config import addons
from dschat_lora.config.addon_names import Names


@pytest.fixture(autouse=True)
def of_one_addon(monkeypatch):
    monkeypatch.setattr(addons, "provided", lambda seam: {"brief": "a:b", "http://": "a:c"})
    monkeypatch.setattr(addons, "ADDONS", {"absent": Names(values="reward_function=built:")})


@pytest.mark.parametrize(
    ("value", "name"),
    [("brief", "brief"), ("http://a/b", "http://"), ("briefly", ""), ("http", ""), ("http:a", "")],
)
def test_a_name_that_ends_in_a_colon_or_a_slash_has_all_values_that_begin_so(value, name):
    assert addons.provided_name("reward_function", value) == name


def test_a_value_of_an_addon_that_is_not_installed_names_it():
    with pytest.raises(
        ValueError, match=r"^--reward_function built:in is of the add-on absent, which is not ins"
    ):
        addons.provided_name("reward_function", "built:in")
    assert addons.provided_name("rollout_engine", "built:in") == ""
