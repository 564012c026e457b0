"""Engines of step 3 whose figures are given, and experience for them."""

import math

import torch
from torch import nn

from dschat_lora.engine.build import StepOutcome
from dschat_lora.lora.casts import FactorCasts
from dschat_lora.rl.learn.engines import Retry
from dschat_lora.rl.learn.experience import Experience
from dschat_lora.rl.learn.reference import ActorAsItWas
from dschat_lora.rl.response.batch import response_mask
from dschat_lora.rl.response.response import Response
from helpers.iterations import ragged_responses

CPU = torch.device("cpu")
RESPONSES = [Response(tuple(p), tuple(t), True, g) for p, t, g in ragged_responses(6, seed=9)]
MASK = response_mask(RESPONSES, CPU)


class Engine:
    """Notes what it is fed, and feeds it back."""

    device = CPU

    def __init__(self):
        self.fed, self.module = [], nn.Linear(1, 1)

    def backward(self, loss, *, last):
        loss.backward()
        self.fed.append((float(loss.detach()), last))


class Roles:
    """Stands for the engines; all figures are given."""

    def __init__(self, *, critic=True, logprob=-1.0, value=0.5, text=2.0):
        self.actor, self.critic = Engine(), Engine() if critic else None
        self.logprob, self.value, self.text = logprob, value, text
        self.passes, self.factors, self.modes = [], [], []
        self.retry, self.reference, self.casts = Retry(), ActorAsItWas(), FactorCasts()

    @property
    def trained(self):
        return {"actor": self.actor} | ({"critic": self.critic} if self.critic else {})

    def policy(self, batch, width, role="actor"):
        if role == "reference":
            return -2.0 * batch.table(batch.step + 1.0, width), None
        self.passes.append(batch.numbers)
        table = batch.table(torch.ones(len(batch.target_ids)), width)
        return (self.logprob * table).requires_grad_(), 0.25 * table

    def outputs(self, batch, width):
        return self.policy(batch, width)

    def values(self, batch, width):
        return (self.value * batch.table(torch.ones(len(batch.target_ids)), width)).requires_grad_()

    def text_loss(self, batch):
        return torch.tensor(self.text * batch.num_targets, requires_grad=True)

    def set_rates(self, factor):
        self.factors.append(factor)
        return {"actor": {"lora": factor}}

    def train(self, roles):
        self.modes.append(f"train {' '.join(sorted(self.trained.keys() & roles))}")

    def eval(self):
        self.modes.append("eval")

    @property
    def reward(self):
        return self.critic

    def scores(self, batch):
        return 10.0 * torch.tensor(batch.numbers, dtype=torch.float32)

    def queue_step(self, roles):
        return lambda: {n: StepOutcome(1.0, False, 1.0) for n in self.trained if n in roles}


def experience(*, unscored=(), known=True, critic=True):
    scores = torch.zeros(len(RESPONSES))
    scores[list(unscored)] = math.nan
    mask = MASK & ~scores.isnan()[:, None]
    zero = torch.zeros(MASK.shape)
    return Experience(
        RESPONSES,
        mask,
        zero,
        scores,
        -1.0 * MASK if known else None,
        0.5 * MASK if known and critic else None,
    )


def tokens_of(*numbers):
    return sum(len(RESPONSES[n].tokens) for n in numbers)
