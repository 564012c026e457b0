"""How rows of several sequences are computed differs between devices; both ways run here."""

import pytest

from dschat_lora.models.backbone import Backbone
from helpers.spread import ALL


@pytest.fixture(params=["blocks", "dense"] if ALL else ["blocks"])
def both_ways(request, monkeypatch):
    """Once as on a CPU, sample by sample, and once as on a GPU, under a dense mask."""
    if request.param == "dense":
        monkeypatch.setattr(Backbone, "skips_padding", lambda self, device: False)
    return request.param
