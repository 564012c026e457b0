"""SAPO's loss and its gradient against numbers of TRL."""

import pytest
import torch

from dschat_lora.algos.ppo import loss_divisor, token_weights
from dschat_lora.rl.options.algorithms import PpoConfig

OLD = [[-1.0, -2.0, -0.5, -1.5], [-0.25, -1.0], [-3.0, -0.75, -1.0], [-2.0, -1.0, -0.5, -0.5]]
NEW = [[-0.5, -2.5, -0.5, -1.0], [-1.25, -0.5], [-2.0, -0.75, -2.0], [-1.0, -1.25, -0.25, -1.5]]
ADVANTAGES = [1.5, -0.5, -1.25, 0.25]
# Loss and gradient of the log-probabilities by _compute_loss of a GRPOTrainer of TRL 1.16.0 with
# loss_type="sapo", beta=0, one batch of these four responses and no accumulation, on a CPU.
TRL = {
    (1.0, 1.05): (
        -0.05621592700481415,
        [
            [-0.1393817514181137, -0.054716989398002625, -0.09375, -0.1393817514181137],
            [0.020635180175304413, 0.09195949137210846],
            [0.13745874166488647, 0.1041666716337204, 0.03439197316765785],
            [-0.0219094288, -0.0120211169, -0.0196636561, -0.0052100960],
        ],
    ),
    (0.5, 2.0): (
        -1.3727068901062012,
        [
            [-0.15057234466075897, -0.05631557106971741, -0.09375, -0.15057234466075897],
            [0.015794625505805016, 0.06947069615125656],
            [0.034205496311187744, 0.1041666716337204, 0.026324376463890076],
            [-0.0355077945, -0.0121316249, -0.0199620817, -0.0056069219],
        ],
    ),
}


def padded(rows, value):
    return torch.tensor([[*row, *[value] * (4 - len(row))] for row in rows])


@pytest.mark.parametrize("temperatures", TRL)
def test_loss_and_gradient_are_those_of_trl(temperatures):
    positive, negative = temperatures
    config = PpoConfig(
        algorithm="sapo", sapo_temperature_pos=positive, sapo_temperature_neg=negative
    )
    if temperatures == (1.0, 1.05):
        assert config == PpoConfig(algorithm="sapo")
    old, new = padded(OLD, torch.nan), padded(NEW, torch.nan).requires_grad_()
    mask = ~old.isnan()
    weights = token_weights(mask, config.loss_normalization, max_length=4, dtype=old.dtype)
    parts = config.surrogate(new, old, torch.tensor(ADVANTAGES)[:, None] * weights, mask)
    loss = parts.total / loss_divisor(mask.sum(1).tolist(), config.loss_normalization)
    loss.backward()
    expected, slopes = TRL[temperatures]
    assert loss.item() == pytest.approx(expected, abs=1e-6)
    gradient = torch.where(mask, new.grad, 0)
    torch.testing.assert_close(gradient, padded(slopes, 0.0), atol=1e-6, rtol=0)
    assert parts.clipped == 0
