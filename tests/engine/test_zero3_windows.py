"""ZeRO 3 and parameters that some micro-batches of a window do not use."""

import pytest
import torch
from torch import nn

from dschat_lora.engine.build import TrainEngine
from helpers.spread import ALL

pytestmark = pytest.mark.stage
# Each window's micro-batches, by the head they use.
WINDOWS = {
    "unused in the first micro-batch": (("p", "c"),) * 3,
    "unused in the whole window": (("p", "c"), ("p", "p"), ("p", "c"), ("c", "c"), ("p", "p")),
    "used in turn": (("p", "c"), ("c", "p"), ("p", "c")),
}


class TwoHeads(nn.Module):
    """A frozen body and two trained heads, one of which answers."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(8, 16).requires_grad_(False)
        self.p, self.c = nn.Linear(16, 4), nn.Linear(16, 4)

    def forward(self, x, head):
        return getattr(self, head)(torch.tanh(self.body(x)))


def two_heads():
    torch.manual_seed(0)
    return TwoHeads()


def loss_of(model, head, shard):
    x = torch.randn(6, 8, generator=torch.Generator().manual_seed(3))[shard]
    return (model(x, head) - (1.0 if head == "p" else 2.0)).square().sum()


def engine_run(stage, windows):
    """(norm and loss of each window) by the engine, on this rank's share of the rows."""
    from dschat_lora.engine.distributed import rank, sum_over_ranks, world_size
    from dschat_lora.engine.zero import shard_from_rank_zero
    from helpers.runs import engine_settings, release

    settings = engine_settings(stage=stage, micro=6, accumulation=2, max_grad_norm=0.0)
    model = two_heads()
    if stage == 3:
        shard_from_rank_zero(model, settings.deepspeed(3, None))
    trained = [p for p in model.parameters() if p.requires_grad]
    engine = TrainEngine(model, [{"params": trained, "lr": 0.1, "weight_decay": 0.0}], settings)
    seen = []
    for window in windows:
        for index, head in enumerate(window):
            loss = loss_of(engine, head, slice(rank(), None, world_size()))
            engine.backward(loss, last=index == len(window) - 1)
        norm = engine.step().grad_norm
        seen.append((norm, sum_over_ranks([loss.item()])[0]))
    release(engine)
    return seen


def plain_run(windows):
    model, seen = two_heads(), []
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.1, betas=(0.9, 0.95), weight_decay=0.0)
    for window in windows:
        # DeepSpeed gives an unused parameter a gradient of zero, not none.
        optimizer.zero_grad(set_to_none=False)
        for parameter in trained:
            parameter.grad = torch.zeros_like(parameter)
        for head in window:
            loss = loss_of(model, head, slice(None))
            loss.backward()
        norm = torch.stack([p.grad.norm() for p in trained]).norm()
        optimizer.step()
        seen.append((float(norm), loss.item()))
    return seen


@pytest.mark.parametrize("windows", WINDOWS.values(), ids=WINDOWS)
@pytest.mark.parametrize("stage", [1, 2, 3] if ALL else [3])
@pytest.mark.parametrize("size", [1, 2])
def test_no_gradient_of_an_earlier_window_comes_back(ranks, size, stage, windows):
    expected = torch.tensor(plain_run(windows))
    (seen, *_) = ranks(size).run(
        "engine.test_zero3_windows:engine_run", stage=stage, windows=windows
    )
    torch.testing.assert_close(torch.tensor(seen), expected, rtol=1e-5, atol=1e-5)
