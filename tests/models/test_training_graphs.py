"""Passes that are replayed on padded micro-batches give what each gives as it is."""

import warnings
from functools import partial

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from dschat_lora.config.groups import LoraConfig
from dschat_lora.data.batch import PairCollator, SampleCollator
from dschat_lora.lora.model import apply_lora
from dschat_lora.models import attention, training_graphs
from dschat_lora.models import backbone as backbone_module
from dschat_lora.models.causal_lm import CausalLMLogprobs, CausalLMLoss, Policy
from dschat_lora.models.reward_model import RewardModel
from dschat_lora.models.training_graphs import TrainingGraphs
from dschat_lora.rl.response.batch import collate
from dschat_lora.rl.response.response import Response
from helpers.iterations import ragged_responses
from helpers.pairs import ragged_pairs
from helpers.spread import ALL
from helpers.tape import Tape
from helpers.tiny import ragged_samples, random_model, tiny_model
from helpers.varlen import masked_attention


@pytest.fixture(autouse=True)
def on_gpu(monkeypatch):
    """Every device has the kernel, and small micro-batches have several shapes."""
    for module in (attention, backbone_module):
        monkeypatch.setattr(module, "has_varlen", lambda device, dtype: True)
    monkeypatch.setattr(attention, "kernel", lambda: masked_attention)
    for name, value in {"_FEWEST_TOKENS": 8, "_FEWEST_SEQUENCES": 2, "_SHORTEST": 4}.items():
        monkeypatch.setattr(training_graphs, name, value)


class Recorder:
    """What records on a CPU; the tapes that it made."""

    def __init__(self):
        self.tapes = []

    def __call__(self, step):
        self.tapes.append(Tape(step))
        return self.tapes[-1]


def adapted(model, **options):
    model.requires_grad_(False)
    apply_lora(model, LoraConfig(lora_dim=3, **options), seed=0)
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(1)
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn(parameter.shape))
    return model


def text_loss(network, batch):
    return network(
        batch.input_ids,
        batch.position_ids,
        batch.segment_ids,
        batch.logit_positions,
        batch.target_ids,
        batch.spans,
    )


def texts(packed):
    """Micro-batches of rows of one sample, or several, of changing lengths."""
    samples, size = ragged_samples(24, longest=9), 2 if packed else 1
    rows = [samples[i : i + size] for i in range(0, len(samples), size)]
    return [SampleCollator(0)(rows[i : i + 2]) for i in range(0, len(rows), 2)]


def pair_batches():
    pairs = [each.sample() for each in ragged_pairs(12, longest=5)]
    return [PairCollator(0, "shared")([pairs[i : i + 2]]) for i in range(0, 12, 2)]


def pair_loss(network, batch, *, places="logit_positions", targets=("target_ids",)):
    found = network(
        batch.input_ids,
        batch.position_ids,
        batch.segment_ids,
        batch.branch_ids,
        getattr(batch, places),
        *(getattr(batch, name) for name in targets),
        spans=batch.spans,
    )
    return torch.nn.functional.softplus((found * torch.linspace(-1, 2, len(found))).sum())


def responses():
    drawn = [Response(tuple(p), tuple(t), True, g) for p, t, g in ragged_responses(12, seed=2)]
    return [collate(drawn, range(i, i + 2), pad_id=0) for i in range(0, 12, 2)]


def policy_loss(network, batch):
    inputs = *batch.inputs, batch.logit_positions, batch.target_ids
    logprobs, _ = network(*inputs, 0.7, batch.spans)
    weights = torch.linspace(-1.0, 2.0, len(logprobs))
    return -(weights * torch.exp(logprobs / 3).clamp(0.5, 1.2)).sum()


def scorer(kind):
    config = tiny_model(kind).config
    config.num_labels = 1
    auto = AutoModelForSequenceClassification
    return RewardModel(adapted(random_model(config, auto=auto), modules_to_save=("score",)))


CASES = {
    "texts": (lambda kind: CausalLMLoss(adapted(tiny_model(kind))), text_loss, partial(texts, 0)),
    "packed": (lambda kind: CausalLMLoss(adapted(tiny_model(kind))), text_loss, partial(texts, 1)),
    "pairs": (
        lambda kind: CausalLMLogprobs(adapted(tiny_model(kind))),
        pair_loss,
        pair_batches,
    ),
    "rewards": (
        scorer,
        partial(pair_loss, places="ends", targets=()),
        pair_batches,
    ),
    "policy": (lambda kind: Policy(adapted(tiny_model(kind))), policy_loss, responses),
}


def train(network, loss_of, batches, *, accumulation=2, times=2):
    """Losses, gradient norms and weights of steps over all micro-batches, ``times`` over."""
    network.train()
    trained = [p for p in network.parameters() if p.requires_grad]
    losses, norms = [], []
    for _ in range(times):
        for number, batch in enumerate(batches, 1):
            loss = loss_of(network, batch)
            loss.backward()
            losses.append(loss.detach())
            if number % accumulation == 0:
                norms.append(torch.nn.utils.clip_grad_norm_(trained, 0.01))
                with torch.no_grad():
                    for parameter in trained:
                        parameter -= parameter.grad
                        parameter.grad = None
    return torch.stack(losses), torch.stack(norms), [p.detach().clone() for p in trained]


def both(make, loss_of, batches, **options):
    """What :func:`train` gives with every operation launched, and with graphs; and these.

    In double precision: steps make more of the last digits of losses that these models have.
    """
    plain = train(make().double(), loss_of, batches, **options)
    network, record = make().double(), Recorder()
    network.backbone.graphs = TrainingGraphs(network.model.base_model, record)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = train(network, loss_of, batches, **options)
    return plain, found, record


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kind", ("llama", "opt", "qwen3") if ALL else ("llama",))
def test_steps_are_those_without_graphs(kind, case):
    make, loss_of, batches = CASES[case]
    plain, found, record = both(partial(make, kind), loss_of, batches())
    torch.testing.assert_close(found, plain)
    assert len(record.tapes) >= 4  # two shapes or more, of which each has two passes
