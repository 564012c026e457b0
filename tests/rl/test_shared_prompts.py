"""Responses to one prompt as branches of one row: what roles say of them is the same."""

from dataclasses import replace

import pytest
import torch

from dschat_lora.rl.response.batch import collate, make_minibatches, response_mask
from dschat_lora.rl.response.response import Episode, Response, TokenSequence
from helpers.iterations import ragged_responses
from helpers.roles import asked_of, config_of, roles_of, save_adapters
from helpers.rounding import assert_same_sums

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

FOUND = ragged_responses(7, group_size=3, seed=4)
WHOLE = [Response(tuple(p), tuple(t), True, g) for p, t, g in FOUND]
# What an environment says between turns of the actor is in the branch, and nothing predicts it.
MASKED = (*(n != 1 for n in range(len(WHOLE[4].tokens) + 2)),)
RESPONSES = [
    *WHOLE[:4],
    replace(WHOLE[4], tokens=(*WHOLE[4].tokens, 5, 9), actor_mask=MASKED),
    *WHOLE[5:],
]
ORDER = [4, 0, 6, 2, 3, 1]  # of unlike groups in turn, one member left out
WIDTH = max(len(each.tokens) for each in RESPONSES)
ADAPTERS = config_of(actor={"lora_dim": 3}, critic={"lora_dim": 4})


def outputs(engines, batch):
    """What the roles say, and the gradients of a sum that weighs every number differently."""
    logprobs, entropies = engines.policy(batch, WIDTH)
    values = engines.values(batch, WIDTH)
    tables = [
        logprobs,
        entropies,
        engines.policy(batch, WIDTH, "reference")[0],
        values,
        engines.scores(batch),
    ]
    weights = torch.linspace(-1, 2, logprobs.numel()).view(logprobs.shape)
    modules = torch.nn.ModuleList([engines.actor, engines.critic])
    parameters = [p for p in modules.parameters() if p.requires_grad]
    return tables, torch.autograd.grad(
        (weights * (logprobs + values)).sum(), parameters, allow_unused=True
    )


@pytest.mark.parametrize(("kind", "whole"), [("opt", False), ("llama", False), ("llama", True)])
def test_roles_say_the_same_of_branches_as_of_rows_and_learn_the_same(
    kind, whole, model_directory, tmp_path
):
    adapters = save_adapters(kind, model_directory(kind), tmp_path)
    engines = asked_of(roles_of(ADAPTERS, *adapters))
    for name in ("actor", "reference"):
        engines.actor.policy(name).full_logits = whole
    alone, shared = (
        collate(RESPONSES, ORDER, 0, shares_prompts=shares) for shares in (False, True)
    )
    assert shared.input_ids.shape[0] == 3 < alone.input_ids.shape[0] == len(ORDER)
    (expected, slopes), (said, own) = outputs(engines, alone), outputs(engines, shared)
    for value, wanted in zip([*said, *own], [*expected, *slopes], strict=True):
        assert (value is None) == (wanted is None)
        if wanted is not None:
            assert_same_sums(value, wanted)
    assert any(slope is not None and slope.abs().max() > 0.01 for slope in own)


# The same, two of a prompt as one response: an agent's that gave two answers to one question.
JOINED = replace(
    RESPONSES[4],
    episode=Episode(
        earlier_sequences=tuple(
            TokenSequence(each.prompt, each.tokens, each.actor_mask)
            for each in (RESPONSES[6], RESPONSES[3])
        )
    ),
)


@pytest.mark.parametrize("shares", [False, True])
def test_sequences_of_one_response_are_learnt_as_responses_of_their_own_one_after_another(
    shares, model_directory, tmp_path
):
    adapters = save_adapters("llama", model_directory("llama"), tmp_path)
    engines = asked_of(roles_of(ADAPTERS, *adapters))
    parts = [RESPONSES[6], RESPONSES[3], RESPONSES[4]]
    width = sum(each.num_actor_tokens for each in parts)
    apart = collate([*parts, RESPONSES[0]], range(4), 0)
    joined = collate([JOINED, RESPONSES[0]], range(2), 0, shares_prompts=shares)
    assert joined.input_ids.shape[0] == (3 if shares else 4)
    assert response_mask([JOINED], "cpu").sum() == width == JOINED.num_actor_tokens
    parameters = [p for p in engines.actor.parameters() if p.requires_grad]
    tables = []
    for batch in (apart, joined):
        logprobs, _ = engines.policy(batch, width)
        tables.append([logprobs, engines.values(batch, width), engines.scores(batch)])
    sizes = [each.num_actor_tokens for each in parts]
    rows = [torch.cat([t[n, :size] for n, size in enumerate(sizes)]) for t in tables[0][:2]]
    for own_table, row, apart_table in zip(tables[1][:2], rows, tables[0][:2], strict=True):
        assert_same_sums(own_table[0], row)
        assert_same_sums(own_table[1], apart_table[3])
    # The reward model reads the last one.
    assert_same_sums(tables[1][2], tables[0][2][2:])
    weights = torch.linspace(-1, 2, width)
    own = torch.autograd.grad((weights * tables[1][0][0]).sum(), parameters, allow_unused=True)
    wanted = torch.autograd.grad((weights * rows[0]).sum(), parameters, allow_unused=True)
    for slope, expected in zip(own, wanted, strict=True):
        if expected is not None:
            assert_same_sums(slope, expected)


def test_a_row_holds_the_prompt_once_and_then_each_response():
    responses = [
        Response((3, 4), (5, 6), True, 0),
        Response((7,), (8,), True, 1),
        Response((3, 4), (9, 10, 11), False, 0, actor_mask=(True, False, True)),
    ]
    batch = collate(responses, [0, 1, 2], 17, shares_prompts=True)
    assert batch.input_ids.tolist() == [[3, 4, 5, 6, 9, 10, 11], [7, 8, 17, 17, 17, 17, 17]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 2, 3, 4], [0, 1, 0, 0, 0, 0, 0]]
    assert batch.logit_positions.tolist() == [1, 2, 7, 1, 5]
    assert batch.target_ids.tolist() == [5, 6, 8, 9, 11]
    assert batch.owner.tolist() == [0, 0, 1, 2, 2]
    assert batch.step.tolist() == [0, 1, 0, 0, 1]
    assert batch.ends.tolist() == [3, 8, 6]
    assert batch.spans.lengths == ((4, 4), (3, 5), (2, 2))
    assert batch.counts.num_tokens == 9
    # causal pairs of 4 tokens, three more that see the prompt and 1, 2, 3 of their own, and of 2
    assert batch.counts.num_attended == 10 + (6 + 6) + 3


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("micro", [4, 6])
def test_responses_to_a_prompt_share_a_micro_batch_where_they_can(world_size, micro):
    groups = [n // 4 for n in range(20)]
    lengths = [(7 * n) % 11 + 1 for n in range(20)]
    ranks = [
        make_minibatches(
            lengths,
            rows_per_step=20,
            micro_batch_size=micro,
            rank=rank,
            world_size=world_size,
            key=("k",),
            groups=groups,
        )
        for rank in range(world_size)
    ]
    batches = [batch for (step,) in ranks for batch in step.micro_batches]
    assert len({len(step.micro_batches) for (step,) in ranks}) == 1
    assert sorted(n for batch in batches for n in batch) == list(range(20))
    assert max(map(len, batches)) <= micro
    prompts = sum(len({groups[n] for n in batch}) for batch in batches)
    # A micro-batch that ends within a group begins it anew.
    assert prompts <= 5 + len(batches) - 1
    if micro == 4 and world_size == 1:
        assert prompts == 5
