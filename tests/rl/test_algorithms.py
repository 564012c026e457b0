"""Each algorithm's loss and gradient of an iteration against its paper written as a slow loop."""

import math
import statistics
from dataclasses import replace
from functools import partial

import pytest
import torch

from dschat_lora.rl.learn.experience import Experience, Steps, advantages_and_returns
from dschat_lora.rl.learn.update import Updater
from dschat_lora.rl.options.algorithms import PpoConfig
from dschat_lora.rl.response.batch import Minibatch, collate, response_mask
from dschat_lora.rl.response.response import Response
from helpers.given_engines import CPU, Roles
from helpers.iterations import ragged_responses

LONGEST = 12
CUT = (2, 7)  # responses without end of sequence
UNSCORED = 4
RESPONSES = [
    Response(tuple(p), tuple(t), n not in CUT, g)
    for n, (p, t, g) in enumerate(ragged_responses(9, group_size=3, seed=4))
]
MASK = response_mask(RESPONSES, CPU)


pytestmark = pytest.mark.usefixtures("one_rank")


class Given(Roles):
    """Engines of an actor alone, whose log-probabilities are given."""

    def __init__(self, logprobs):
        super().__init__(critic=False)
        self.leaf = logprobs.requires_grad_()

    def policy(self, batch, width):
        rows = self.leaf[list(batch.numbers)]
        return rows, torch.zeros_like(rows)


def table(seed, scale=0.4):
    generator = torch.Generator().manual_seed(seed)
    values = scale * torch.randn(MASK.shape, generator=generator, dtype=torch.float64) - 1
    return torch.where(MASK, values, 0)


SCORES = torch.tensor([1.0, 0.0, 3.0, 2.0, math.nan, 5.0, -1.0, 0.5, 0.25], dtype=torch.float64)
OLD, REFERENCE, NEW, DRAWN = table(1), table(2), table(3), table(4)


def drawn_from(logprobs):
    """The responses as drawn from a distribution with these (N, R) log-probabilities."""
    return [
        replace(response, sampler_logprobs=tuple(row[: len(response.tokens)].tolist()))
        for response, row in zip(RESPONSES, logprobs, strict=True)
    ]


def fed(config, responses=RESPONSES):
    """(loss, gradient of the log-probabilities) of one step on all responses, in two batches."""
    mask = MASK & ~SCORES.isnan()[:, None]
    experience = Experience(responses, mask, REFERENCE, SCORES, OLD, None)
    roles = Given(NEW.clone())
    targets = partial(
        advantages_and_returns,
        rewards=SCORES.nan_to_num(0.0),
        config=config,
        kl_coef=config.kl_coef,
    )
    step = Minibatch(list(range(9)), [[0, 3, 6, 8, 2], [1, 4, 5, 7]])
    updater = Updater(
        roles,
        config,
        experience,
        Steps([step], partial(collate, RESPONSES, pad_id=0)),
        estimate_advantages=targets,
        kl_coef=config.kl_coef,
        entropy_coef=config.entropy_coef,
        max_length=LONGEST,
    )
    (result,) = (read() for read in updater.queue_steps(lambda _: 1.0))
    total = sum(loss for loss, _ in roles.actor.fed)
    assert result.loss == pytest.approx(total, abs=1e-10)
    return total, torch.where(MASK, roles.leaf.grad, 0)


def tokens(row, *tensors):
    """Scalars of a response's tokens."""
    return list(zip(*(t[row, : len(RESPONSES[row].tokens)] for t in tensors), strict=True))


KEPT = [n for n in range(9) if n != UNSCORED]


def compared(scores, kind):
    """Advantages by comparison with the responses to the same prompt that count."""
    advantages = {}
    for n in KEPT:
        own = [scores[m] for m in KEPT if RESPONSES[m].group == RESPONSES[n].group]
        if kind == "rloo":
            advantages[n] = scores[n] - (sum(own) - scores[n]) / (len(own) - 1)
        else:
            spread = statistics.stdev(own) + 1e-4 if kind == "grpo" else 1.0
            advantages[n] = (scores[n] - statistics.mean(own)) / spread
    return {n: [value] * len(RESPONSES[n].tokens) for n, value in advantages.items()}


def estimate(name, p, q):
    ratio = q - p
    return {"k1": -ratio, "k2": ratio**2 / 2, "k3": ratio.exp() - 1 - ratio}[name]


def slow(kind, loss, *, low, high, mean, kl=None, beta=0.0, where="loss", cut=True, cap=None):
    """The loss by a loop over responses and tokens."""
    new = NEW.clone().requires_grad_()
    scores = {n: SCORES[n].item() for n in KEPT}
    paid = {
        n: [estimate(kl or "k1", p, q).item() for p, q in tokens(n, OLD, REFERENCE)] for n in KEPT
    }
    price = beta if where == "reward" else 0.0
    if kind == "returns":
        advantages = {
            n: [scores[n] - price * sum(paid[n][t:]) for t in range(len(paid[n]))] for n in KEPT
        }
    else:
        advantages = compared({n: scores[n] - price * sum(paid[n]) for n in KEPT}, kind)
    if kind in ("returns", "whitened"):
        every = [a for values in advantages.values() for a in values]
        centre, spread = statistics.mean(every), math.sqrt(statistics.pvariance(every) + 1e-8)
        advantages = {n: [(a - centre) / spread for a in v] for n, v in advantages.items()}
    losses = []
    for n in KEPT if cut else [n for n in KEPT if n not in CUT]:
        pairs, drawn = tokens(n, new, OLD, REFERENCE), [d.item() for (d,) in tokens(n, DRAWN)]
        of_response = sum(p - o for p, o, _ in pairs) / len(pairs)
        own = []
        for (p, o, q), a, d in zip(pairs, advantages[n], drawn, strict=True):
            if cap:
                a *= min(math.exp(o.item()) / math.exp(d), cap)
            ratio = torch.exp(of_response if loss == "gspo" else p - o)
            near = ratio.clamp(1 - low, 1 + high)
            value = (
                -near.detach() * a * p if loss == "cispo" else -torch.minimum(ratio * a, near * a)
            )
            if where == "loss" and beta:
                value = value + beta * estimate(kl, p, q)
            own.append(value)
        losses.append(own)
    if mean == "token":
        total = sum(map(sum, losses)) / sum(map(len, losses))
    elif mean == "sequence":
        total = sum(sum(own) / len(own) for own in losses) / len(losses)
    else:
        total = sum(sum(own) / LONGEST for own in losses) / len(losses)
    total.backward()
    return total.item(), torch.where(MASK, new.grad, 0)


CLIP = {"low": 0.2, "high": 0.2}
TOKEN, HIGHER = {**CLIP, "mean": "token"}, {"low": 0.2, "high": 0.28, "mean": "token", "cut": False}
PAID = {**TOKEN, "beta": 0.1, "where": "reward"}
K2, K3 = ({**TOKEN, "beta": 0.1, "kl": name} for name in ("k2", "k3"))
# name: (options, how it compares, its loss, the slow loop's arguments)
CASES = {
    "rloo": ({}, "rloo", "clip", PAID),
    "grpo": ({}, "grpo", "clip", K3),
    "dr_grpo": ({}, "dr_grpo", "clip", {**CLIP, "mean": "constant"}),
    "dapo": ({}, "grpo", "clip", HIGHER),
    "gspo": ({}, "grpo", "gspo", {"low": 3e-4, "high": 4e-4, "mean": "sequence"}),
    "reinforce_pp": ({}, "returns", "clip", PAID),
    "reinforce_pp_baseline": ({}, "whitened", "clip", K2),
    "cispo": ({}, "grpo", "cispo", {"low": 1.0, "high": 4.0, "mean": "token"}),
    "grpo by sequence": (
        {"algorithm": "grpo", "loss_normalization": "sequence", "cliprange": 0.1},
        *("grpo", "clip", {**K3, "low": 0.1, "high": 0.1, "mean": "sequence"}),
    ),
    "rloo with k2 in the loss": (
        {"algorithm": "rloo", "kl_in": "loss", "kl_estimator": "k2", "cliprange_high": 0.5},
        *("rloo", "clip", {**K2, "high": 0.5}),
    ),
    "gspo with k3 in the reward": (
        {"algorithm": "gspo", "kl_in": "reward", "kl_coef": 0.3, "cliprange": 0.05},
        *("grpo", "gspo", {**PAID, "low": 0.05, "high": 0.05, "mean": "sequence"}),
    ),
    "reinforce_pp with k2 in the loss": (
        {"algorithm": "reinforce_pp", "kl_in": "loss", "kl_estimator": "k2"},
        *("returns", "clip", K2),
    ),
    "dapo with a divergence": (
        {"algorithm": "dapo", "kl_coef": 0.2},
        *("grpo", "clip", {**HIGHER, "beta": 0.2, "kl": "k3"}),
    ),
}
CASES["gspo with k3 in the reward"][-1].update(beta=0.3, kl="k3")


@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradient_are_those_of_the_paper(name):
    options, *kinds, rest = CASES[name]
    total, gradient = fed(PpoConfig(**(options or {"algorithm": name})))
    expected, slope = slow(*kinds, **rest)
    assert total == pytest.approx(expected, abs=1e-10)
    torch.testing.assert_close(gradient, slope, atol=1e-10, rtol=0)
    assert slope.abs().max() > 1e-3


WEIGHTED = ("rloo", "grpo", "gspo", "cispo")


@pytest.mark.parametrize("name", WEIGHTED)
def test_tokens_of_another_sampler_weigh_by_their_ratio_of_probabilities(name):
    _, *kinds, rest = CASES[name]
    config = PpoConfig(algorithm=name, importance_cap=1.5)
    total, gradient = fed(config, drawn_from(DRAWN))
    expected, slope = slow(*kinds, **rest, cap=1.5)
    assert total == pytest.approx(expected, abs=1e-10)
    torch.testing.assert_close(gradient, slope, atol=1e-10, rtol=0)
    unweighted, _ = slow(*kinds, **rest)
    assert abs(unweighted - expected) > 1e-4


@pytest.mark.parametrize("name", WEIGHTED)
def test_where_sampler_and_policy_agree_the_weights_change_no_bit(name):
    plain = fed(PpoConfig(algorithm=name), drawn_from(OLD))
    total, gradient = fed(PpoConfig(algorithm=name, importance_cap=1.0), drawn_from(OLD))
    assert total == plain[0]
    assert torch.equal(gradient, plain[1])


def test_options_that_are_typed_come_before_those_of_the_algorithm():
    config = PpoConfig(algorithm="dapo", cliprange=0.1, cliprange_high=0.3, dynamic_sampling=0)
    assert (config.cliprange_low, config.cliprange_high) == (0.1, 0.3)
    assert (config.dynamic_sampling, config.kl_coef) == (0, 0.0)
    assert config.mask_truncated_completions is True
    typed = PpoConfig(algorithm="dapo", kl_coef=0.5, mask_truncated_completions=False)
    assert (typed.kl_coef, typed.mask_truncated_completions) == (0.5, False)


@pytest.mark.parametrize("name", ["ppo", "rloo", "grpo"])
def test_the_first_three_algorithms_keep_their_options(name):
    config = PpoConfig(algorithm=name)
    assert (config.cliprange_low, config.cliprange_high, config.kl_coef) == (0.2, 0.2, 0.1)
    assert (config.loss_normalization, config.dynamic_sampling) == ("token", 0)
    assert not config.mask_truncated_completions
    assert (config.kl_in, config.kl_estimator) == (
        ("loss", "k3") if name == "grpo" else ("reward", "k1")
    )
