"""What tests of distillation share."""

import pytest

from dschat_lora.rl.loop.build import build_engines


@pytest.fixture
def built(monkeypatch):
    """Setups of the runs, from which engines were built."""
    setups = []
    monkeypatch.setattr(
        "dschat_lora.rl.loop.train.build_engines",
        lambda setup: setups.append(setup) or build_engines(setup),
    )
    return setups
