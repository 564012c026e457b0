"""What each of two processes holds of a model with a large vocabulary, after a step."""

import pytest
import torch

from benchmarks.common.shapes import Shape, random_base

pytestmark = pytest.mark.stage
# Hidden 256, two blocks, and twice 33.5 MB of vocabulary.
SHAPE = Shape(256, 2, 4, 1024, 2**15, 128, 8, 2, 64, 32, "llama")


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    directory = tmp_path_factory.mktemp("large") / "model"
    model = random_base(SHAPE, dtype=torch.float32, device=torch.device("cpu"))
    model.save_pretrained(directory)
    return directory


def test_two_ranks_hold_half_of_weights_and_optimizer_state_and_never_the_whole(ranks, path):
    """Norms and one factor of each pair are on both: hence a little more than half."""
    stored = sum(file.stat().st_size for file in path.glob("*.safetensors"))
    (whole,) = ranks(1).run("helpers.tensor_memory:hold", path=str(path), tensor_parallel=1)
    parts = ranks(2).run("helpers.tensor_memory:hold", path=str(path), tensor_parallel=2)
    # Two blocks of 4 h^2 + 3 x 1024 h; r = 8 on seven layers: 11 h + 3 x 1024 numbers each.
    adapters = 2 * 8 * (11 * 256 + 3 * 1024)
    frozen = 2 * 2**15 * 256 + 2 * (4 * 256**2 + 3 * 1024 * 256) + 5 * 256
    assert whole["weights"] == 4 * (frozen + adapters)
    assert whole["optimizer"] == pytest.approx(8 * adapters, rel=1e-3)  # and counts of steps
    total = whole["weights"] + whole["optimizer"]
    for part in parts:
        assert part["weights"] + part["optimizer"] <= 0.55 * total
        assert part["weights"] >= 0.5 * whole["weights"]
        assert 0.4 * stored < part["reading"] < 0.65 * stored
    assert sum(part["weights"] for part in parts) >= whole["weights"]
