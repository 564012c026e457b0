"""Log-probabilities and entropies of a policy against torch's own, gradients included."""

import pytest
import torch
from torch import nn

from dschat_lora.config.groups import LoraConfig
from dschat_lora.lora.model import apply_lora
from dschat_lora.models.causal_lm import Policy, PolicyHead
from dschat_lora.rl.response.batch import collate
from dschat_lora.rl.response.response import Response
from helpers.iterations import ragged_responses
from helpers.plain_ppo import said_of
from helpers.rounding import assert_same_gradients, gradients_of
from helpers.spread import ALL, pairwise
from helpers.tiny import softcapped_model, tiny_model

CLOSE = {"rtol": 1e-5, "atol": 1e-5}
RESPONSES = ragged_responses(4, seed=2)
FACTORS = LoraConfig(lora_dim=3)
ADAPTED_HEAD = LoraConfig(lora_dim=3, target_modules=("lm_head", "q_proj"))
SAVED_HEAD = LoraConfig(lora_dim=3, modules_to_save=("lm_head",))


def adapted(model, lora):
    if lora is not None:
        apply_lora(model, lora, seed=0)
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(1)
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn(parameter.shape))
    return model


def batch():
    whole = [Response(tuple(p), tuple(t), True, g) for p, t, g in RESPONSES]
    return collate(whole, range(len(whole)), pad_id=0)


def asked(policy, temperature, each=None):
    each = each or batch()
    return policy(*each.inputs, each.logit_positions, each.target_ids, temperature)


def plainly(model, temperature):
    both = [said_of(model, prompt, tokens, temperature) for prompt, tokens, _ in RESPONSES]
    return [torch.cat(each) for each in zip(*both, strict=True)]


def objective(logprobs, entropies, *, entropy):
    """Every token with a weight of its own."""
    weights = torch.linspace(-1.0, 2.0, len(logprobs))
    total = (weights * torch.exp(logprobs / 3)).sum()
    return total + (entropies * weights.flip(0)).sum() if entropy else total


def check(model, policy, temperature, *, entropy):
    result, expected = asked(policy, temperature), plainly(model, temperature)
    for ours, theirs in zip(result, expected, strict=True):
        assert ours.dtype == torch.float32
        torch.testing.assert_close(ours, theirs, **CLOSE)
    ours, theirs = (
        gradients_of(objective(*each, entropy=entropy), model) for each in (result, expected)
    )
    assert_same_gradients(ours, theirs, least=0.1)


@pytest.mark.parametrize("rows", [1, 3, 1000])
@pytest.mark.parametrize("temperature", [1.0, 0.5, 2.0][:: 1 if ALL else 2])
@pytest.mark.parametrize("kind", ["opt", "gpt2", "neox", "llama"][:: 1 if ALL else 3])
def test_logprobs_and_gradient_are_those_of_log_softmax(kind, temperature, rows):
    model = adapted(tiny_model(kind), FACTORS)
    policy = Policy(model)
    policy.head.rows = rows
    check(model, policy, temperature, entropy=False)


@pytest.mark.parametrize("rows", [2, 1000])
@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_entropy_that_trains_has_the_gradient_of_torchs_categorical(temperature, rows):
    model = adapted(tiny_model("llama"), FACTORS)
    policy = Policy(model, entropy_trains=True)
    policy.head.rows = rows
    check(model, policy, temperature, entropy=True)


def test_entropy_that_is_only_reported_has_no_gradient():
    _, entropies = asked(Policy(adapted(tiny_model("opt"), FACTORS)), 1.0)
    assert not entropies.requires_grad


HEADS = {"adapted": ADAPTED_HEAD, "saved": SAVED_HEAD, "every weight": None}
HEAD_FACTORS = {
    "head": tuple(HEADS),
    "rows": (2, 1000),
    "temperature": (1.0, 0.7),
    "entropy": (True, False),
}


@pytest.mark.parametrize(
    tuple(HEAD_FACTORS), [tuple(row.values()) for row in pairwise(HEAD_FACTORS)]
)
def test_a_head_that_trains_gets_its_gradient(head, rows, temperature, entropy):
    lora = HEADS[head]
    model = adapted(tiny_model("llama"), lora)
    policy = Policy(model, entropy_trains=entropy)
    policy.head.rows = rows
    check(model, policy, temperature, entropy=True)


def test_a_bias_of_the_head_is_divided_by_the_temperature_too():
    generator = torch.Generator().manual_seed(4)
    head = nn.Linear(5, 7).requires_grad_(False)
    hidden = torch.randn(6, 5, generator=generator, requires_grad=True)
    tokens = torch.tensor([0, 6, 3, 3, 1, 2])
    for trains in (False, True):
        ours = PolicyHead(head, 7, entropy_trains=trains)(hidden, tokens, 0.4)
        over_tokens = torch.distributions.Categorical(logits=head(hidden) / 0.4)
        torch.testing.assert_close(ours[0], over_tokens.log_prob(tokens))
        torch.testing.assert_close(ours[1].detach(), over_tokens.entropy().detach())


def test_logits_that_the_model_transforms_are_taken_whole():
    model = adapted(softcapped_model(), FACTORS)
    whole = Policy(model)
    whole.full_logits = True
    for temperature in (1.0, 0.6):
        check(model, whole, temperature, entropy=True)
        linear = asked(Policy(model), temperature)[0]
        assert (linear - plainly(model, temperature)[0]).abs().max() > 0.1


@pytest.mark.parametrize("entropy_trains", [True, False])
def test_without_a_token_the_graph_spans_what_trains(entropy_trains):
    model = adapted(tiny_model("opt"), FACTORS)
    policy = Policy(model, entropy_trains=entropy_trains)
    logprobs, entropies = asked(policy, 0.5, collate([], [], pad_id=0))
    assert logprobs.shape == entropies.shape == (0,)
    (logprobs.sum() + entropies.sum()).backward()
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            assert parameter.grad is not None, name
            assert not parameter.grad.any()


def test_what_was_trained_and_what_is_only_asked_are_the_same_bits():
    model = adapted(tiny_model("opt"), FACTORS)
    for trains in (False, True):
        policy = Policy(model, entropy_trains=trains)
        policy.train()
        learning = asked(policy, 0.7)
        policy.eval()
        with torch.no_grad():
            asked_alone = asked(policy, 0.7)
        for ours, theirs in zip(learning, asked_alone, strict=True):
            assert torch.equal(ours.detach(), theirs)
