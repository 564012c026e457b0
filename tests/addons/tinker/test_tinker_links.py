"""What the server writes to a run's directory stays there."""

import pytest

from dschat_lora.addons.tinker.store import RunStore
from helpers.links import KINDS, check_links_within_are_followed, check_no_link_is_followed

pytestmark = pytest.mark.smoke


@pytest.fixture
def out(tmp_path):
    (tmp_path / "out").mkdir()
    return tmp_path / "out"


def append(out):
    RunStore(out, "run").append_metrics({})


@pytest.mark.parametrize("kind", KINDS)
def test_no_metric_is_written_through_a_link_out_of_the_directory(out, kind):
    check_no_link_is_followed(out, append, "metrics.jsonl", kind)


def test_links_within_the_directory_are_followed(out):
    check_links_within_are_followed(out, append)
