"""Objects of the package's add-ons, any of which may not be installed."""

import pytest

from dschat_lora.config.addon_names import ADDONS
from dschat_lora.config.addons import installed, load, provided
from dschat_lora.config.verb_names import VERBS

of_the_whole = pytest.mark.skipif(
    not ADDONS.keys() <= installed().keys(), reason="it tells of add-ons that are not there"
)


def with_addon(name):
    """A mark of tests that need an add-on of the package."""
    return pytest.mark.skipif(name not in installed(), reason=f"the add-on {name} is not there")


# What add-ons write beside what a run of the trunk does.
PAGES = {"report.html"} if "report" in installed() else set()
# The kinds of files of rows in messages, those of add-ons that are there among them.
ROW_FILES = " ".join((".jsonl .json .csv .txt", *provided("row_file"), "(each also .gz or .zst)"))


def of_addon(path):
    """The object ``NAME.MODULE:OBJECT``, or the module, in a list: of an add-on that is there."""
    name = path.partition(".")[0]
    return [load(f"dschat_lora.addons.{path}")] if name in installed() else []


def has_verb(name):
    """Whether ``dschat-lora`` has a verb, its own or that of an add-on that is there."""
    return name in VERBS or any(name in each.verbs for each in installed().values())
