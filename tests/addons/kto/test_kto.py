"""KTO's objective: the divergence of a whole step, metrics by label, and advice on weights."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from dschat_lora.addons.kto import objective as kto
from dschat_lora.addons.kto.batch import UnpairedCollator
from dschat_lora.addons.kto.objective import balance_warning, kto_objective, means_by_label
from dschat_lora.addons.kto.options import KtoOptions
from dschat_lora.config.stages import DpoConfig
from dschat_lora.data.samples import UnpairedSample


def sample(own, mismatched, label, reference):
    """One-token prompts and answers of these tokens."""
    tokens = np.array([3, *own], np.int32), np.array(mismatched, np.int32)
    return UnpairedSample(*tokens, 1, label, reference)


# Log-probability of a token: minus a tenth of its number.
SAMPLES = [
    sample([10, 5], [20], 1, (-3.5, -5.0)),  # log-ratios 2 and 3
    sample([20], [10, 20], 0, (-1.0, -2.0)),  # -1 and -1
    sample([30], [10], 1, (-4.0, -2.0)),  # 1 and 1
]


class Engine:
    """Gives log-probabilities by rule, and remembers in which mode."""

    def __init__(self):
        self.module, self.device = SimpleNamespace(training=True), "cpu"
        self.asked = []

    def __call__(self, *, target_ids, **rest):
        self.asked.append((self.module.training, torch.is_grad_enabled(), len(target_ids)))
        return (-target_ids.float() / 10).requires_grad_()

    def eval(self):
        self.module.training = False

    def train(self):
        self.module.training = True


@pytest.fixture(autouse=True)
def one_process(monkeypatch):
    monkeypatch.setattr(kto, "sum_tensor_", lambda tensor: tensor)


def objective(beta=0.1, **weights):
    config = DpoConfig(loss_type="kto", beta=beta)
    return kto_objective(config, KtoOptions(**weights), lambda answers: answers.reference)


@pytest.mark.parametrize("sizes", [(3,), (2, 1), (1, 1, 1)])
def test_divergence_is_that_of_the_whole_step_whatever_its_micro_batches(sizes):
    rest, engine = list(SAMPLES), Engine()
    batches = [UnpairedCollator(0)([[rest.pop(0)] for _ in range(size)]) for size in sizes]
    loss_of = objective(beta=0.5, undesirable_weight=2.0).loss_of(engine, batches)
    assert [asked[:2] for asked in engine.asked] == [(False, False)] * len(sizes)
    results = [loss_of(engine, batch) for batch in batches]
    assert engine.module.training
    kl = (3 - 1 + 1) / 3
    leads = torch.tensor([2 - kl, kl + 1, 1 - kl])
    expected = torch.tensor([1.0, 2.0, 1.0]) * (1 - torch.sigmoid(0.5 * leads))
    assert sum(r.total for r in results).item() == pytest.approx(expected.sum().item())
    found = {n: torch.cat([r.columns[n] for r in results]).tolist() for n in results[0].columns}
    assert objective().mean_over == "num_samples"
    assert found == {
        "accuracy": pytest.approx([1.0, 1.0, 0.5]),
        "desirable": [1.0, 0.0, 1.0],
        "kl": pytest.approx([kl] * 3),
        "chosen_score": pytest.approx([1.0, 0.0, 0.5]),
        "rejected_score": pytest.approx([0.0, -0.5, 0.0]),
        "chosen_length": [2.0, 0.0, 1.0],
        "rejected_length": [0.0, 1.0, 0.0],
        "chosen_logps": pytest.approx([-1.5, 0.0, -3.0]),
        "rejected_logps": pytest.approx([0.0, -2.0, 0.0]),
    }
    means = objective().combine({name: sum(column) / 3 for name, column in found.items()})
    assert means["chosen_score"] == means["rewards/chosen"] == pytest.approx(0.75)
    assert means["rejected_score"] == means["rewards/rejected"] == pytest.approx(-0.5)
    assert means["margin"] == means["rewards/margins"] == pytest.approx(1.25)
    assert means["logps/chosen"] == pytest.approx(-2.25)
    assert means["chosen_length"] == pytest.approx(1.5)


@pytest.mark.parametrize("label", [0, 1])
def test_metrics_of_a_label_that_no_answer_has_are_none(label):
    engine = Engine()
    batch = UnpairedCollator(0)([[sample([10], [20], label, (-3.0, -5.0))]])
    result = objective().loss(engine, batch)
    means = means_by_label({n: c.mean().item() for n, c in result.columns.items()})
    absent, present = ("chosen", "rejected") if label == 0 else ("rejected", "chosen")
    assert means[f"{absent}_score"] is None
    assert means["margin"] is None
    assert means[f"{present}_score"] == pytest.approx(0.1 * 2.0)


@pytest.mark.parametrize(
    ("good", "bad", "weights", "advice"),
    [
        (100, 100, {}, None),
        (100, 75, {}, None),
        (
            100,
            50,
            {},
            ["2 times", "--desirable_weight 0.5 to 0.667", "--undesirable_weight 1.5 to 2"],
        ),
        (100, 50, {"undesirable_weight": 1.5}, None),
        (100, 50, {"desirable_weight": 0.5}, None),
        (50, 100, {}, ["0.5 times", "--desirable_weight 2 to 2.67"]),
        (50, 100, {"desirable_weight": 2.67}, None),
        (100, 0, {}, ["all answers have one label"]),
        (100, 100, {"undesirable_weight": 0.0}, ["inf times"]),
    ],
)
def test_weights_are_to_make_up_for_unequal_numbers(good, bad, weights, advice):
    warning = balance_warning(good, bad, KtoOptions(**weights))
    if advice is None:
        assert warning is None
    else:
        assert all(words in warning for words in advice), warning
