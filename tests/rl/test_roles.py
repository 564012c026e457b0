"""Four roles on one base: each says what a model of its own would, and none disturbs another."""

import itertools
from dataclasses import replace
from types import SimpleNamespace

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from dschat_lora.models.architecture_checks import check_architecture
from dschat_lora.rl.learn import engines
from dschat_lora.rl.learn.engines import Network
from dschat_lora.rl.response.batch import collate
from dschat_lora.rl.response.response import Response
from helpers.iterations import ragged_responses
from helpers.pairs import plain_scores
from helpers.plain_ppo import said_of, score_of, stock_policy, stock_scorer, values_of
from helpers.roles import LAYERS, asked_of, config_of, networks_of, roles_of, save_adapters
from helpers.spread import ALL
from helpers.tiny import VOCAB, save_tiny_model, tiny_model

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

RESPONSES = ragged_responses(5, seed=4)
WIDTH = max(len(tokens) for _, tokens, _ in RESPONSES)
CLOSE = {"rtol": 1e-5, "atol": 1e-5}
ADAPTERS = config_of(actor={"lora_dim": 3}, critic={"lora_dim": 4})


def batch():
    whole = [Response(tuple(p), tuple(t), True, g) for p, t, g in RESPONSES]
    return collate(whole, range(len(whole)), pad_id=0)


@pytest.fixture(scope="module")
def family(model_directory, tmp_path_factory):
    """``family(kind)``: (base, actor's adapter, reward model's adapter)."""
    root = tmp_path_factory.mktemp("roles")

    def of(kind):
        base = model_directory(kind)
        return base, *save_adapters(kind, base, root / kind)

    return of


def padded(rows):
    return torch.stack([torch.nn.functional.pad(row, (0, WIDTH - len(row))) for row in rows])


def answers(roles):
    """What every role says of the responses; tables by what they hold."""
    engines, each = asked_of(roles), batch()
    said = dict(zip(("logprobs", "entropies"), engines.policy(each, WIDTH), strict=True))
    said["reference"] = engines.policy(each, WIDTH, "reference")[0]
    if roles.critic is not None:
        said["values"] = engines.values(each, WIDTH)
    if roles.reward is not None:
        said["scores"] = engines.scores(each)
    return {name: value.detach() for name, value in said.items()}


@torch.no_grad()
def rollout_logprobs(roles):
    said = []
    for prompt, tokens, _ in RESPONSES:
        ids = torch.tensor([[*prompt, *tokens]])
        table = roles.rollout.eval()(input_ids=ids, use_cache=False).logits[0].log_softmax(-1)
        places = range(len(prompt) - 1, ids.shape[1] - 1)
        said.append(table[places, tokens])
    return padded(said)


@torch.no_grad()
def move(model, by=0.05):
    """Other values of all that trains."""
    generator = torch.Generator().manual_seed(8)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.add_(by * torch.randn(parameter.shape, generator=generator))


@pytest.mark.parametrize("kind", LAYERS if ALL else ["opt", "gpt2"])
def test_roles_say_what_four_separate_stock_models_say(family, kind):
    base, actor, reward = family(kind)
    roles = roles_of(ADAPTERS, actor, reward)
    said = answers(roles)
    with torch.no_grad():
        model, scorer = stock_policy(base, actor), stock_scorer(base, reward)
        both = [said_of(model, p, t) for p, t, _ in RESPONSES]
        logprobs, entropies = (padded([each[n] for each in both]) for n in (0, 1))
        expected = {
            "logprobs": logprobs,
            "entropies": entropies,
            "reference": logprobs,
            "values": padded([values_of(scorer, p, t) for p, t, _ in RESPONSES]),
            "scores": torch.stack([score_of(scorer, p, t) for p, t, _ in RESPONSES]),
        }
        bare = AutoModelForCausalLM.from_pretrained(base).eval()
        unlike = padded([said_of(bare, p, t)[0] for p, t, _ in RESPONSES])
    for name, value in said.items():
        torch.testing.assert_close(value, expected[name], **CLOSE)
    torch.testing.assert_close(rollout_logprobs(roles), expected["logprobs"], **CLOSE)
    assert (unlike - expected["logprobs"]).abs().max() > 0.1


@pytest.mark.parametrize("temperature", [0.6, 1.7])
def test_temperature_is_that_of_actor_and_reference(family, temperature):
    base, actor, reward = family("opt")
    engines, each = asked_of(roles_of(ADAPTERS, actor, reward), temperature=temperature), batch()
    model = stock_policy(base, actor)
    with torch.no_grad():
        both = [said_of(model, p, t, temperature) for p, t, _ in RESPONSES]
        logprobs, entropies = engines.policy(each, WIDTH)
        torch.testing.assert_close(logprobs, padded([each for each, _ in both]), **CLOSE)
        torch.testing.assert_close(entropies, padded([each for _, each in both]), **CLOSE)
        torch.testing.assert_close(engines.policy(each, WIDTH, "reference")[0], logprobs, **CLOSE)


@pytest.mark.parametrize("kind", LAYERS)
def test_all_roles_and_the_rollout_hold_the_very_same_base(family, kind):
    _, actor, reward = family(kind)
    roles = roles_of(ADAPTERS, actor, reward)
    # below the head: what a language model's own head is tied to may be elsewhere
    trees = [m.model.base_model for m in roles.models.values()] + [roles.rollout.base_model]
    shared = [
        {
            name: p
            for name, p in tree.named_parameters()
            if "lora_" not in name and "trained" not in name
        }
        for tree in trees
    ]
    assert len(shared) == 5
    for other in shared[1:]:
        assert other.keys() == shared[0].keys()
        for name, parameter in other.items():
            assert parameter is shared[0][name]
            assert parameter.data_ptr() == shared[0][name].data_ptr()
    assert all(not p.requires_grad for p in shared[0].values())
    factors = [
        p for m in roles.models.values() for n, p in m.model.named_parameters() if "lora_" in n
    ]
    assert len({p.data_ptr() for p in factors}) == len(factors)


def test_each_role_trains_what_it_should(family):
    _, actor, reward = family("opt")
    roles = roles_of(ADAPTERS, actor, reward)
    trains = {
        name: {n.rpartition(".")[2] for n, p in m.model.named_parameters() if p.requires_grad}
        for name, m in roles.models.items()
    }
    factors = {"lora_A", "lora_B"}
    assert trains == {
        "actor": factors,
        "reference": set(),
        "critic": {*factors, "weight"},
        "reward": set(),
    }
    assert roles.trained.keys() == {"actor", "critic"}
    names = [n for n, p in roles.critic.model.named_parameters() if p.requires_grad]
    assert [n for n in names if "lora_" not in n] == ["score.trained.weight"]
    assert not roles.reference.model.training
    assert not roles.reward.model.training


@pytest.mark.parametrize(("role", "figure"), [("actor", "logprobs"), ("critic", "values")])
def test_a_moved_role_moves_no_other_one_and_the_actor_the_rollout(family, role, figure):
    roles = roles_of(ADAPTERS, *family("llama")[1:])
    before = answers(roles)
    move(roles.models[role].model)
    after = answers(roles)
    assert (after[figure] - before[figure]).abs().max() > 0.01
    torch.testing.assert_close(rollout_logprobs(roles), after["logprobs"], **CLOSE)
    for name in {"logprobs", "reference", "values", "scores"} - {figure}:
        assert torch.equal(after[name], before[name])


def learn(roles, steps=3):
    """Some steps of torch's own AdamW on whatever trains."""
    trained = [p for m in roles.trained.values() for p in m.model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.02, weight_decay=0.1)
    engines = asked_of(roles)
    for _ in range(steps):
        loss = engines.policy(batch(), WIDTH)[0].sum()
        if roles.critic is not None:
            loss = loss + engines.values(batch(), WIDTH).square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def test_learning_leaves_base_reference_and_reward_bit_identical(family):
    _, actor, reward = family("opt")
    roles = roles_of(ADAPTERS, actor, reward)
    kept = {n: p for n, p in roles.whole().named_parameters() if not p.requires_grad}
    copies = {n: p.detach().clone() for n, p in kept.items()}
    before = answers(roles)
    learn(roles)
    after = answers(roles)
    assert [n for n, p in kept.items() if not torch.equal(p, copies[n])] == []
    for name in ("reference", "scores"):
        assert torch.equal(after[name], before[name])
    for name in ("logprobs", "values"):
        assert (after[name] - before[name]).abs().max() > 0.01


def test_a_new_adapter_starts_as_the_reference(model_directory):
    base = model_directory("opt")
    roles = roles_of(config_of(actor={"lora_dim": 2}, ppo={"algorithm": "rloo"}), base, None)
    said = answers(roles)
    torch.testing.assert_close(said["logprobs"], said["reference"])
    assert any(p.requires_grad for p in roles.actor.model.parameters())
    assert roles.critic is None
    assert roles.reward is None
    move(roles.actor.model)
    assert torch.equal(answers(roles)["reference"], said["reference"])


# ---------------------------------------------------------------------------- other bases


def test_a_reward_model_on_another_base_has_one_of_its_own(family, model_directory, tmp_path):
    base, actor, _ = family("opt")
    other = tiny_model("opt")
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.1)
    other.save_pretrained(tmp_path / "other")
    _, reward = save_adapters("opt", str(tmp_path / "other"), tmp_path)
    roles = roles_of(ADAPTERS, actor, reward)
    said = answers(roles)
    with torch.no_grad():
        model = stock_policy(base, actor)
        scorer = stock_scorer(str(tmp_path / "other"), reward)
        expected = padded([said_of(model, p, t)[0] for p, t, _ in RESPONSES])
        torch.testing.assert_close(said["logprobs"], expected, **CLOSE)
        scores = torch.stack([score_of(scorer, p, t) for p, t, _ in RESPONSES])
        values = padded([values_of(scorer, p, t) for p, t, _ in RESPONSES])
    torch.testing.assert_close(said["scores"], scores, **CLOSE)
    torch.testing.assert_close(said["values"], values, **CLOSE)

    def inputs(role):
        return role.model.get_input_embeddings().weight.data_ptr()

    assert inputs(roles.actor) == inputs(roles.reference)
    assert inputs(roles.critic) == inputs(roles.reward) != inputs(roles.actor)


@pytest.mark.parametrize("critic_dim", [0, 4])
def test_full_fine_tuning_has_copies_that_do_not_move(family, critic_dim):
    base, _, reward = family("opt")
    merged = peft.PeftModel.from_pretrained(
        AutoModelForSequenceClassification.from_pretrained(base, num_labels=1), reward
    )
    directory = f"{reward}-merged"
    merged.merge_and_unload().save_pretrained(directory)
    config = config_of(actor={"lora_dim": 0}, critic={"lora_dim": critic_dim})
    roles = roles_of(config, base, directory)
    before = answers(roles)
    torch.testing.assert_close(before["logprobs"], before["reference"])
    scorer = stock_scorer(base, reward)
    with torch.no_grad():
        scores = torch.stack([score_of(scorer, p, t) for p, t, _ in RESPONSES])
        values = padded([values_of(scorer, p, t) for p, t, _ in RESPONSES])
    torch.testing.assert_close(before["scores"], scores, **CLOSE)
    torch.testing.assert_close(before["values"], values, **CLOSE)
    learn(roles)
    after = answers(roles)
    for name in ("reference", "scores"):
        assert torch.equal(after[name], before[name])
    for name in ("logprobs", "values"):
        assert (after[name] - before[name]).abs().max() > 0.01
    torch.testing.assert_close(rollout_logprobs(roles), after["logprobs"], **CLOSE)
    actor, reference = (
        {p.data_ptr() for p in m.model.parameters()} for m in (roles.actor, roles.reference)
    )
    assert not actor & reference
    critic, fixed = (
        {n: p.data_ptr() for n, p in m.model.named_parameters()}
        for m in (roles.critic, roles.reward)
    )
    common = set(critic.values()) & set(fixed.values())
    # the critic's new adapter stands on the reward model's weights, its own head included
    assert bool(common) == (critic_dim > 0)
    assert len(common) == (len(fixed) if critic_dim else 0)


@pytest.mark.parametrize("kind", ["opt", "llama"])
@pytest.mark.parametrize(("actor_dim", "critic_dim"), [(3, 3), (0, 4), (0, 0), (3, 0)])
def test_without_a_reward_model_values_start_at_zero_over_the_actors_hidden_states(
    model_directory, kind, actor_dim, critic_dim
):
    base = model_directory(kind)
    config = config_of(actor={"lora_dim": actor_dim}, critic={"lora_dim": critic_dim})
    roles = roles_of(config, base, None)
    assert roles.reward is None
    assert not answers(roles)["values"].any()
    hidden_of = tiny_model(kind).base_model
    head = drawn_head(roles)
    assert head.requires_grad
    said = answers(roles)
    with torch.no_grad():
        expected = padded(
            [
                (hidden_of(torch.tensor([[*p, *t]]))[0][0] @ head[0])[len(p) - 1 : -1]
                for p, t, _ in RESPONSES
            ]
        )
    torch.testing.assert_close(said["values"], expected, **CLOSE)
    learn(roles)
    after = answers(roles)
    assert torch.equal(after["reference"], said["reference"])
    assert (after["values"] - said["values"]).abs().max() > 0.01


def drawn_head(roles):
    """The weights of the critic's head, which are 0, drawn at random."""
    score = roles.critic.model.score
    head = getattr(score, "trained", score).weight
    assert not head.any()
    with torch.no_grad():
        return head.normal_(std=0.2, generator=torch.Generator().manual_seed(3))


def test_the_actors_adapter_is_continued_under_the_critics_new_head(family):
    base, actor, _ = family("llama")
    roles = roles_of(ADAPTERS, actor, None)
    model = stock_policy(base, actor).get_base_model()
    model.score = torch.nn.Linear(32, 1, bias=False)
    with torch.no_grad():
        model.score.weight.copy_(drawn_head(roles))
        expected = padded([plain_scores(model, [*p, *t])[len(p) - 1 : -1] for p, t, _ in RESPONSES])
    said = answers(roles)
    torch.testing.assert_close(said["values"], expected, **CLOSE)
    move(roles.actor.model)
    assert torch.equal(answers(roles)["values"], said["values"])


def test_without_a_critic_the_reward_model_is_the_actors_companion(family):
    base, actor, reward = family("opt")
    config = config_of(actor={"lora_dim": 3}, critic={"lora_dim": 4}, ppo={"algorithm": "grpo"})
    roles = roles_of(config, actor, reward)
    assert roles.critic is None
    own, none = networks_of(roles)
    assert none is None
    assert set(own.roles) == {"actor", "reference", "reward"}
    scorer = stock_scorer(base, reward)
    with torch.no_grad():
        expected = torch.stack([score_of(scorer, p, t) for p, t, _ in RESPONSES])
    torch.testing.assert_close(answers(roles)["scores"], expected, **CLOSE)


def test_a_mistake_names_the_roles_own_option(family, tmp_path):
    base, actor, _ = family("opt")
    with pytest.raises(ValueError, match=r"--critic_model_name_or_path .* not of a reward model"):
        roles_of(ADAPTERS, actor, actor)
    with pytest.raises(ValueError, match=r"--critic_model_name_or_path .* has no score head"):
        roles_of(ADAPTERS, actor, base)
    config = config_of(actor={"lora_dim": 3, "lora_module_name": "nothing"})
    with pytest.raises(ValueError, match=r"--actor_lora_module_name"):
        roles_of(config, base, None)


def test_base_trained_too_has_no_sharing(family):
    _, actor, reward = family("opt")
    config = config_of(
        actor={"lora_dim": 3}, critic={"lora_dim": 4}, classic={"only_optimize_lora": False}
    )
    roles = roles_of(config, actor, reward)
    each = [{p.data_ptr() for p in m.model.parameters()} for m in roles.models.values()]
    for one, other in itertools.combinations(each, 2):
        assert not one & other
    before = answers(roles)
    learn(roles)
    after = answers(roles)
    for name in ("reference", "scores"):
        assert torch.equal(after[name], before[name])


# ---------------------------------------------------------------------------- the network


def test_a_network_asks_the_role_that_is_named():
    class Says(torch.nn.Module):
        def forward(self, *args):
            return self, args

    roles = {"actor": Says(), "reference": Says()}
    network = Network(**roles)
    assert network("reference", 1, 2) == (roles["reference"], (1, 2))
    assert network("actor") == (roles["actor"], ())


def test_meta_roles_have_the_shapes_of_real_ones(family):
    _, actor, reward = family("llama")
    real, empty = (roles_of(ADAPTERS, actor, reward, meta=meta).whole() for meta in (False, True))
    shapes = [{n: p.shape for n, p in each.named_parameters()} for each in (real, empty)]
    assert shapes[0] == shapes[1]
    assert all(p.is_meta for p in empty.parameters())


def test_a_tied_head_stays_tied_in_every_tree(tmp_path):
    save_tiny_model("opt", tmp_path / "base")
    roles = roles_of(
        config_of(actor={"lora_dim": 2}, ppo={"algorithm": "rloo"}), tmp_path / "base", None
    )
    for model in (roles.actor.model, roles.reference.model, roles.rollout):
        assert model.get_output_embeddings().weight is model.get_input_embeddings().weight


@pytest.mark.parametrize("unlike", ["actor", "critic"])
def test_roles_of_an_architecture_that_mixes_rows_all_make_their_own_masks(
    family, monkeypatch, unlike
):
    asked = asked_of(roles_of(ADAPTERS, *family("opt")[1:]))
    networks = {"actor": asked.actor, "critic": asked.critic}
    mixing = [role.backbone for role in networks[unlike].roles.values()]

    def mixes(backbone, **options):
        report = check_architecture(backbone, **options)
        return replace(report, packing_is_exact=backbone not in mixing)

    monkeypatch.setattr(engines, "check_architecture", mixes)
    device = torch.device("cpu")
    wrapped = {n: SimpleNamespace(module=m, device=device) for n, m in networks.items()}
    said = engines.resolve_architecture(replace(asked, **wrapped), VOCAB, run=None)
    for name, network in networks.items():
        for role in network.roles.values():
            assert role.backbone.own_mask == (name == unlike)
    assert not said.shares_prompts
