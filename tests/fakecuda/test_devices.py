"""What is chosen on each card, against the table in the documentation."""

from pathlib import Path

import pytest

from fakecuda.conftest import ROOT

pytestmark = pytest.mark.stage

CARDS = ("h200", "a100", "4090", "3090", "t4")


@pytest.mark.thorough
def test_the_documentation_says_what_is_chosen_on_each_gpu(fake_device):
    text = Path(ROOT / "docs" / "performance_numbers.md").read_text()
    for card in CARDS:
        row = fake_device.run("fakecuda.programs:chosen", card=card)
        assert f"| {' | '.join(row)} |" in text
