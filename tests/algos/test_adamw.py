"""AdamW in the original's form: goldens of a run of its own code, and torch's where they agree."""

import pytest
import torch

from dschat_lora.algos.adamw import adamw_
from dschat_lora.engine.build import SteppedAdamW

START = [1.0, -2.0, 0.5]
GRADIENTS = [[0.1, -0.2, 0.3], [0.05, 0.1, -0.3], [-0.2, 0.0, 0.1]]
OPTIONS = {"lr": 1e-2, "eps": 1e-6, "weight_decay": 0.01}
# weights after each step, printed by the original code in float64
CORRECTED = [
    [0.989904161, -1.989802581, 0.4899520539],
    [0.980486943, -1.986940873, 0.4904292826],
    [0.9824519734, -1.984683883, 0.4893098203],
]
UNCORRECTED = [  # beta2 0.98
    [0.9928301392, -1.992729889, 0.4928798059],
    [0.9838062438, -1.989980646, 0.4933329782],
    [0.9860010149, -1.987463375, 0.4920824898],
]


def trajectory(*, betas, **options):
    """The weights after each step."""
    weights = [torch.tensor(START, dtype=torch.float64)]
    means, squares = [torch.zeros_like(weights[0])], [torch.zeros_like(weights[0])]
    for step, gradient in enumerate(GRADIENTS, start=1):
        gradients = [torch.tensor(gradient, dtype=torch.float64)]
        adamw_(weights, gradients, means, squares, step=step, betas=betas, **(OPTIONS | options))
        yield weights[0]


@pytest.mark.parametrize(
    ("correct_bias", "beta2", "expected"),
    [(True, 0.999, CORRECTED), (False, 0.98, UNCORRECTED)],
    ids=["corrected", "uncorrected"],
)
def test_three_steps_are_the_originals(correct_bias, beta2, expected):
    points = trajectory(betas=(0.9, beta2), correct_bias=correct_bias, decay_after_update=True)
    for point, golden in zip(points, expected, strict=True):
        wanted = torch.tensor(golden, dtype=torch.float64)
        torch.testing.assert_close(point, wanted, rtol=1e-9, atol=0)


def test_with_decay_before_the_update_torch_differs_by_its_epsilon_alone():
    options = {"betas": (0.9, 0.999), "eps": 1e-15}
    leaf = torch.nn.Parameter(torch.tensor(START, dtype=torch.float64))
    torchs = torch.optim.AdamW([leaf], **(OPTIONS | options))
    ours = trajectory(correct_bias=True, decay_after_update=False, **options)
    for point, gradient in zip(ours, GRADIENTS, strict=True):
        leaf.grad = torch.tensor(gradient, dtype=torch.float64)
        torchs.step()
        torch.testing.assert_close(point, leaf.detach(), rtol=1e-12, atol=0)


class Recorder:
    """An update that notes what it is given."""

    def __init__(self):
        self.calls = []

    def __call__(self, parameters, gradients, means, squares, *, step, lr, **rest):
        self.calls.append((step, lr, [g.tolist() for g in gradients]))
        torch._foreach_add_(parameters, gradients, alpha=-lr)


def stepped(update, *parameters):
    groups = [{"params": list(parameters), "lr": 0.5, "weight_decay": 0.0}]
    return SteppedAdamW(groups, update, betas=(0.9, 0.99), eps=1e-6)


def test_a_step_divides_by_the_scale_and_one_that_is_left_out_does_not_count():
    leaf, unused = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
    optimizer = stepped(update := Recorder(), leaf, unused)
    leaf.grad = torch.tensor([4.0, -8.0])
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(4.0), torch.tensor(1.0)
    optimizer.step()
    assert update.calls == []
    assert leaf.tolist() == [1.0, 1.0]
    optimizer.found_inf = torch.tensor(0.0)
    optimizer.step()
    optimizer.step()
    assert update.calls == [(1, 0.5, [[1.0, -2.0]]), (2, 0.5, [[1.0, -2.0]])]
    assert optimizer.state.keys() == {leaf}
