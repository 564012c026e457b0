"""Pairs that share a row score as each answer alone, before and after a model is saved."""

import functools
import itertools
from dataclasses import replace
from pathlib import Path

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForSequenceClassification

from dschat_lora.checkpoint.export import save_adapter, save_merged
from dschat_lora.config.groups import LoraConfig, ModelConfig
from dschat_lora.config.stages import DpoConfig, RewardConfig
from dschat_lora.data.batch import PairCollator
from dschat_lora.lora.model import adapter_parameters, apply_lora
from dschat_lora.lora.trained import TrainedModule
from dschat_lora.models.architecture_checks import check_architecture
from dschat_lora.models.backbone import Backbone
from dschat_lora.models.build import build_causal_lm, build_reward_model
from dschat_lora.models.causal_lm import CausalLMLogprobs, LogprobHead
from dschat_lora.models.reward_model import RewardModel, init_head_
from dschat_lora.models.source import find_model
from dschat_lora.supervised.pair_objectives import (
    answer_logprobs,
    dpo_objective,
    reward_objective,
    score_ends,
)
from helpers.pairs import (
    Answers,
    plain_bradley_terry,
    plain_dpo,
    plain_logprobs,
    plain_per_token,
    plain_scores,
    ragged_pairs,
    with_a_prefix,
)
from helpers.rounding import assert_same_gradients, gradients_of
from helpers.runs import CARD, NoTokenizer
from helpers.spread import ALL, pairwise
from helpers.tiny import VOCAB, softcapped_model, tiny_model, trained

pytestmark = pytest.mark.usefixtures("both_ways")

CPU = torch.device("cpu")
WINDOW = 4
# The sequences are longer than Mistral's window; every kind of position embedding is there.
KINDS = ("opt", "mistral", *("gpt2", "neox", "llama", "qwen2") * ALL)
LAYOUTS = ("shared", "separate", "alone")
ATTENTIONS = ("sdpa", "eager")
CLOSE = {"rtol": 1e-5, "atol": 1e-5}


HEAD_AND_FACTORS = LoraConfig(lora_dim=3, modules_to_save=("score",))
FACTORS = LoraConfig(lora_dim=3)


def policy(kind, lora=FACTORS, attention="sdpa", **changes):
    """A random model, with an adapter of random factors unless ``lora`` is None."""
    changes |= {"sliding_window": WINDOW} if kind == "mistral" else {}
    model = tiny_model(kind, attention, **changes)
    return model if lora is None else trained(model, lora)


def reward_model(kind, lora=HEAD_AND_FACTORS, attention="sdpa"):
    return policy(kind, lora, attention, num_labels=1)


def pairs_of():
    return [*ragged_pairs(5, seed=1), *with_a_prefix(), Answers([5, 6], [7], [8, 9, 10], 1.0)]


@torch.no_grad()
def known(pairs, model):
    """The same pairs with a reference that is up to three nats from the model's own."""
    offsets = itertools.cycle([-1.0, 2.0, 3.0, -0.5, 0.25, -2.0, 1.0])

    def reference(pair):
        return tuple(
            plain_logprobs(model, sequence, len(pair.prompt)).sum().item() + next(offsets)
            for sequence in pair.sequences
        )

    return [replace(pair, reference=reference(pair)) for pair in pairs]


def batch_of(pairs, layout, **options):
    samples = [pair.sample() for pair in pairs]
    rows = [samples[:3], samples[3:4], samples[4:]]
    if layout == "alone":
        rows = [[sample] for sample in samples]
    return PairCollator(0, layout, **options)([row for row in rows if row])


def trainable(model):
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


REWARD_LOSSES = {
    "bradley_terry": (RewardConfig(), plain_bradley_terry),
    "centred": (
        RewardConfig(center_rewards_coefficient=0.3),
        functools.partial(plain_bradley_terry, center=0.3),
    ),
    "per_token": (RewardConfig(reward_loss="per_token"), plain_per_token),
}
DPO_LOSSES = {
    "sigmoid": DpoConfig(beta=0.3),
    "conservative": DpoConfig(beta=0.3, label_smoothing=0.2),
    "hinge": DpoConfig(beta=0.3, loss_type="hinge"),
    "ipo": DpoConfig(beta=0.3, loss_type="ipo"),
    "by length": DpoConfig(beta=2.0, length_normalization=True),
    "hinge by length": DpoConfig(beta=2.0, loss_type="hinge", length_normalization=True),
    "with the chosen answer's loss": DpoConfig(beta=0.3, rpo_alpha=0.7),
    "ipo with the chosen answer's loss": DpoConfig(beta=0.3, loss_type="ipo", rpo_alpha=0.7),
}


def reference_of(batch):
    return batch.reference


# Of models in fp64: in fp32, on some machines, rounding alone moves a gradient by as much as is
# allowed.
def check_reward(model, name, pairs, batch):
    config, plainly = REWARD_LOSSES[name]
    loss = reward_objective(config).loss(RewardModel(model), batch).total
    expected = plainly(model, pairs)
    torch.testing.assert_close(loss.to(expected.dtype), expected, **CLOSE)
    assert_same_gradients(gradients_of(loss, model), gradients_of(expected, model))


def check_dpo(model, name, pairs, batch, network=None):
    config = DPO_LOSSES[name]
    network = network or CausalLMLogprobs(model)
    loss = dpo_objective(config, reference_of).loss(network, batch).total
    expected = plain_dpo(model, pairs, config)
    torch.testing.assert_close(loss, expected, **CLOSE)
    assert_same_gradients(gradients_of(loss, model), gradients_of(expected, model))


WAYS = ("blocks", "dense")
# Of what is computed alike whatever the loss, each loss has one by default.
WAY_OF = {
    name: (LAYOUTS[n % 3], WAYS[n % 2], KINDS[n // 2 % 2], ATTENTIONS[n // 4 % 2 * (n % 2)])
    for n, name in enumerate(DPO_LOSSES)
}


def way_of(row):
    return row["layout"], row["both_ways"], row["kind"], row["attention"]


def in_pairs(allowed, **factors):
    """Every two values of the factors, and of both ways, in a case together."""
    factors |= {"attention": ATTENTIONS, "both_ways": WAYS}

    def can_be(row):
        # Only sdpa goes sample by sample.
        return (row["attention"], row["both_ways"]) != ("eager", "blocks") and allowed(row)

    cases = [tuple(row.values()) for row in pairwise(factors, can_be)]
    return pytest.mark.parametrize(tuple(factors), cases, indirect=["both_ways"])


@in_pairs(lambda row: True, kind=KINDS, name=tuple(REWARD_LOSSES), layout=LAYOUTS)
def test_loss_and_gradient_of_scores_are_those_of_two_forward_passes(kind, name, layout, attention):
    model, pairs = reward_model(kind, attention=attention).double(), pairs_of()
    assert any("score" in n for n in trainable(model))
    check_reward(model, name, pairs, batch_of(pairs, layout))


@in_pairs(
    lambda row: ALL or WAY_OF[row["name"]] == way_of(row),
    name=tuple(DPO_LOSSES),
    layout=LAYOUTS,
    kind=KINDS,
)
def test_loss_and_gradient_of_dpo_are_those_of_two_forward_passes(name, layout, kind, attention):
    model = policy(kind, attention=attention).double()
    pairs = known(pairs_of(), model)
    check_dpo(model, name, pairs, batch_of(pairs, layout))


@pytest.mark.parametrize("kind", ["opt", "llama"])
def test_every_weight_has_the_gradient_of_two_forward_passes_where_all_train(kind):
    model, pairs = reward_model(kind, lora=None).double(), pairs_of()
    for name in REWARD_LOSSES:
        check_reward(model, name, pairs, batch_of(pairs, "shared"))
    model = policy(kind, lora=None).double()
    pairs = known(pairs, model)
    for rows in (3, 1000):
        network = CausalLMLogprobs(model)
        network.head.rows = rows
        check_dpo(model, "by length", pairs, batch_of(pairs, "shared"), network)


HEADS = {
    "adapted": LoraConfig(lora_dim=3, target_modules=("lm_head", "q_proj")),
    "trained in full": LoraConfig(lora_dim=3, modules_to_save=("lm_head",)),
    "of a base that trains too": LoraConfig(lora_dim=3, only_optimize_lora=False),
    "more than a linear layer": FACTORS,
}


@pytest.mark.parametrize("head", HEADS)
def test_any_head_is_called_a_chunk_at_a_time_and_gets_its_gradient_if_it_trains(head):
    model = policy("llama", lora=HEADS[head]).double()
    pairs = known(pairs_of(), model)
    network = CausalLMLogprobs(model)
    if head == "more than a linear layer":
        network.head = LogprobHead(nn.Sequential(model.get_output_embeddings()), VOCAB)
        assert not network.head.plain
    else:
        assert any("lm_head" in name for name in trainable(model))
    network.head.rows = 3
    check_dpo(model, "by length", pairs, batch_of(pairs, "shared"), network)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_logits_that_the_model_transforms_are_taken_whole(layout):
    model = softcapped_model(sliding_window=WINDOW)
    apply_lora(model, FACTORS, seed=0)
    model.double()
    pairs = known(pairs_of(), model)
    network = CausalLMLogprobs(model)
    network.full_logits = True
    check_dpo(model, "sigmoid", pairs, batch_of(pairs, layout), network)
    with torch.no_grad():
        linear = answer_logprobs(CausalLMLogprobs(model), batch_of(pairs, layout))
        whole = answer_logprobs(network, batch_of(pairs, layout))
    assert (linear - whole).abs().max() > 0.1


def test_an_architecture_under_its_own_mask_has_a_row_for_each_sequence():
    language, reward = tiny_model("bloom", None), tiny_model("bloom", None, num_labels=1)
    assert not check_architecture(Backbone(language), vocab_size=VOCAB, device=CPU).tree_is_exact
    pairs = known(pairs_of(), language)
    batch = batch_of(pairs, "alone")
    policy_network, reward_network = CausalLMLogprobs(language), RewardModel(reward)
    policy_network.backbone.own_mask = reward_network.backbone.own_mask = True
    check_dpo(language, "sigmoid", pairs, batch, policy_network)
    with torch.no_grad():
        scores = score_ends(reward_network, batch)
    torch.testing.assert_close(scores, stock_scores(reward), **CLOSE)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", ["shared", "separate"])
def test_padding_and_neighbours_have_no_influence(kind, layout):
    model, pairs = RewardModel(reward_model(kind)), pairs_of()

    def scores(pairs, **options):
        batch = PairCollator(options.pop("pad", 0), layout, **options)(
            [[pair.sample() for pair in pairs]]
        )
        with torch.no_grad():
            return score_ends(model, batch).reshape(2, -1)

    alone = scores(pairs[:1])
    # rows of one width run the same kernels: nothing may move at all
    wide, other_padding = (scores(pairs[:2], pad=pad, multiple_of=64) for pad in (0, 17))
    assert torch.equal(wide, other_padding)
    changed = Answers([9] * len(pairs[1].prompt), pairs[1].chosen, pairs[1].rejected)
    neighbour = scores([pairs[0], changed], multiple_of=64)
    assert torch.equal(neighbour[:, 0], wide[:, 0])
    assert not torch.equal(neighbour[:, 1], wide[:, 1])
    torch.testing.assert_close(wide[:, :1], alone, **CLOSE)
    behind = scores([pairs[1], pairs[0]])
    torch.testing.assert_close(behind[:, 1:], alone, **CLOSE)


@pytest.mark.parametrize("config", [RewardConfig(), RewardConfig(reward_loss="per_token")])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_batch_without_pairs_has_no_loss_and_zero_gradient_everywhere(layout, config):
    empty = PairCollator(0, layout).empty()
    dpo = dpo_objective(DpoConfig(rpo_alpha=1.0), reference_of)
    for objective, network in (
        (reward_objective(config), RewardModel(reward_model("opt"))),
        (dpo, CausalLMLogprobs(policy("opt"))),
        (dpo, CausalLMLogprobs(policy("opt", lora=None))),
        (dpo, whole := CausalLMLogprobs(policy("opt"))),
    ):
        network.full_logits = network is whole
        result = objective.loss(network, empty)
        result.total.backward()
        assert result.total.item() == 0.0
        assert all(values.shape == (0,) for values in result.columns.values())
        for parameter in trainable(network.model).values():
            assert parameter.grad is not None
            assert parameter.grad.abs().max() == 0


def test_scores_of_a_16_bit_model_keep_more_digits_than_its_states():
    model = reward_model("llama").to(torch.bfloat16)
    batch = batch_of(pairs_of(), "shared")
    scores = score_ends(RewardModel(model), batch)
    assert scores.dtype == torch.float32
    assert (scores != scores.to(torch.bfloat16).float()).any()


# Reward models built, saved and read again


saves = pytest.mark.usefixtures("one_rank")
quiet = pytest.mark.filterwarnings("ignore::UserWarning")


def built(path, lora=FACTORS, *, build=build_reward_model, pad=0, seed=0, meta=False, **options):
    tokenizer = NoTokenizer()
    tokenizer.pad_token_id = pad
    options |= {"dtype": torch.float32, "seed": seed, "meta": meta}
    return build(find_model(str(path)), tokenizer, ModelConfig(), lora, **options)


def move(model, by=0.1):
    """As training would: every trained value by something else."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in trainable(model).values():
            parameter.add_(by * torch.randn(parameter.shape, generator=generator))
    return model.eval()


def save(adapted, directory, base):
    options = {"base": str(base), "tokenizer": NoTokenizer(), "task_type": adapted.task}
    save_adapter(Path(directory), adapted.model, adapted.lora, card=CARD, **options)
    return directory


PROBE = torch.arange(3, 12)[None]


def merge(directory, model, *, max_kl):
    options = {"tokenizer": NoTokenizer(), "probe_ids": PROBE, "dropouts": {}}
    return save_merged(directory, model, max_kl=max_kl, **options)


@torch.no_grad()
def scores_of(model):
    """By our layout of trees, with the whole of our code."""
    return score_ends(RewardModel(model.eval()), batch_of(pairs_of(), "shared"))


@torch.no_grad()
def stock_scores(model):
    """By the model's own forward pass, a sequence at a time."""
    sequences = [p.sequences[side] for side in (0, 1) for p in pairs_of()]
    each = [model.eval()(input_ids=torch.tensor([s])).logits[0, 0] for s in sequences]
    return torch.stack(each)


def head_of(model):
    return (model.score.trained if isinstance(model.score, TrainedModule) else model.score).weight


def test_new_head_depends_on_the_seed_alone(model_directory):
    path = model_directory("opt")
    torch.manual_seed(1)
    first = built(path).model
    torch.manual_seed(2)
    again = built(path, LoraConfig(lora_dim=7, target_modules=("fc1",))).model
    full = built(path, LoraConfig()).model
    assert torch.equal(head_of(first), head_of(again))
    assert torch.equal(head_of(first), head_of(full))
    assert not torch.equal(head_of(first), head_of(built(path, seed=1).model))
    assert head_of(first).shape == (1, 32)


def test_new_head_has_the_deviation_of_the_paper_and_no_bias():
    # 1 / sqrt(H + 1); the standard deviation of 40,000 draws is within 2 % of it
    head = nn.Linear(39_999, 1)
    init_head_(head, seed=3)
    assert head.weight.std().item() == pytest.approx(40_000**-0.5, rel=0.02)
    assert abs(head.weight.mean().item()) < 5 / 40_000
    assert head.bias.tolist() == [0.0]
    small = nn.Linear(3, 10_000, bias=False)
    init_head_(small, seed=3)
    assert small.weight.std().item() == pytest.approx(0.5, rel=0.03)


@pytest.mark.parametrize("kind", ["opt", "gpt2", "llama"])
def test_factors_and_head_train_and_nothing_else(model_directory, kind):
    adapted = built(model_directory(kind))
    names = trainable(adapted.model)
    assert any("score" in name for name in names)
    assert all("lora_" in name or name == "score.trained.weight" for name in names)
    assert names.keys() == adapter_parameters(adapted.model).keys()
    assert adapted.task == "SEQ_CLS"
    assert adapted.lora.modules_to_save == ("score",)
    named = LoraConfig(lora_dim=3, modules_to_save=("score",))
    assert built(model_directory(kind), named).lora.modules_to_save == ("score",)
    assert adapted.model.config.num_labels == 1
    assert adapted.model.config.pad_token_id == 0
    full = built(model_directory(kind), LoraConfig()).model
    assert len(trainable(full)) == len(list(full.parameters()))


def test_padding_that_stock_transformers_skips_is_the_tokenizers(model_directory):
    # The stock model scores the last token that is no padding, by its configuration.
    model = built(model_directory("llama"), pad=9).model.eval()
    padded, plain = torch.tensor([[5, 6, 7, 9, 9]]), torch.tensor([[5, 6, 7]])
    with torch.no_grad():
        torch.testing.assert_close(model(input_ids=padded).logits, model(input_ids=plain).logits)


def test_stock_transformers_scores_an_end_that_is_the_padding_too(model_directory):
    model = built(model_directory("llama"), pad=NoTokenizer.eos_token_id).model.eval()
    ended = [5, 6, 7, NoTokenizer.eos_token_id]
    with torch.no_grad():
        expected = plain_scores(model, ended)[-1]
        torch.testing.assert_close(model(input_ids=torch.tensor([ended])).logits[0, 0], expected)


def test_shape_alone_has_the_same_parameters(model_directory):
    whole = built(model_directory("opt")).model
    shape = built(model_directory("opt"), meta=True).model
    assert all(p.is_meta for p in shape.parameters())
    assert {n: (p.shape, p.requires_grad) for n, p in shape.named_parameters()} == {
        n: (p.shape, p.requires_grad) for n, p in whole.named_parameters()
    }


@pytest.mark.parametrize("kind", ["opt", "llama"])
@saves
def test_adapter_of_a_language_model_is_continued_under_a_new_head(model_directory, kind, tmp_path):
    base = model_directory(kind)
    first = built(base, build=build_causal_lm)
    move(first.model)
    save(first, tmp_path / "adapter", base)
    reward = built(tmp_path, seed=4)
    language = adapter_parameters(first.model)
    continued = adapter_parameters(reward.model)
    assert continued.keys() - language.keys() == {"score.trained.weight"}
    assert all(torch.equal(continued[name], value) for name, value in language.items())
    assert torch.equal(head_of(reward.model), head_of(built(base, seed=4).model))
    assert reward.lora.modules_to_save == ("score",)
    # and it is a reward model from then on
    move(reward.model)
    save(reward, tmp_path / "reward", base)
    again = built(tmp_path / "reward", new_head=False).model
    assert torch.equal(scores_of(again), scores_of(reward.model))


@pytest.mark.parametrize("kind", ["opt", "gpt2", "llama"])
@quiet
@saves
def test_stock_peft_gives_the_scores_of_our_adapter(model_directory, kind, tmp_path):
    base = model_directory(kind)
    reward = built(base, LoraConfig(lora_dim=3, lora_alpha=7))
    untrained = scores_of(reward.model)
    move(reward.model)
    save(reward, tmp_path / "adapter", base)
    ours = scores_of(reward.model)
    stock = AutoModelForSequenceClassification.from_pretrained(base, num_labels=1, pad_token_id=0)
    theirs = peft.PeftModel.from_pretrained(stock, tmp_path / "adapter")
    torch.testing.assert_close(ours, stock_scores(theirs), **CLOSE)
    assert (ours - untrained).abs().max() > 0.1
    # Continued here with another seed, its head and factors are those that were saved.
    again = built(tmp_path, seed=9).model
    assert torch.equal(scores_of(again), ours)
    assert torch.equal(scores_of(built(tmp_path, new_head=False).model), ours)


@quiet
def test_reward_adapter_of_peft_gives_its_scores_here(model_directory, tmp_path):
    base = model_directory("llama")
    stock = AutoModelForSequenceClassification.from_pretrained(base, num_labels=1, pad_token_id=0)
    theirs = peft.get_peft_model(
        stock,
        peft.LoraConfig(
            r=3, lora_alpha=7, target_modules=["q_proj", "down_proj"], task_type="SEQ_CLS"
        ),
    )
    move(theirs)
    expected = stock_scores(theirs)
    theirs.save_pretrained(tmp_path)
    for new_head in (True, False):
        ours = built(tmp_path, new_head=new_head).model
        torch.testing.assert_close(scores_of(ours), expected, **CLOSE)


@pytest.mark.parametrize("kind", ["opt", "llama"])
@saves
def test_merged_reward_model_scores_as_the_unmerged_in_stock_transformers(
    model_directory, kind, tmp_path
):
    reward = built(model_directory(kind), LoraConfig(lora_dim=3, lora_alpha=7))
    move(reward.model)
    merge(tmp_path / "model", reward.model, max_kl=1e-6)
    expected = stock_scores(reward.model)
    merged = AutoModelForSequenceClassification.from_pretrained(tmp_path / "model")
    torch.testing.assert_close(stock_scores(merged), expected, **CLOSE)
    torch.testing.assert_close(scores_of(reward.model), expected, **CLOSE)
    # a base for further training as it is
    again = built(tmp_path / "model", LoraConfig(), new_head=False).model
    torch.testing.assert_close(scores_of(again), expected, **CLOSE)


@saves
def test_merge_of_a_reward_model_is_measured_in_scores_however_large(model_directory, tmp_path):
    reward = built(model_directory("opt"), LoraConfig(lora_dim=3, lora_alpha=7))
    move(reward.model)
    with torch.no_grad():
        reward.model.score.trained.weight.mul_(50)  # scores at which a sigmoid is flat
    model = reward.model.bfloat16()
    for parameter in adapter_parameters(model).values():
        parameter.data = parameter.data.float()
    report = merge(tmp_path / "model", model, max_kl=1e9)
    merged = AutoModelForSequenceClassification.from_pretrained(
        tmp_path / "model", dtype=torch.bfloat16
    )
    with torch.no_grad():
        scores = [m.score(m.base_model(input_ids=PROBE)[0]).double() for m in (model, merged)]
    shift = scores[1] - scores[0]
    assert report.max_abs_logit == pytest.approx(shift.abs().max().item())
    win = torch.sigmoid(shift)
    kl = -(torch.log(2 * win) + torch.log(2 * (1 - win))) / 2
    assert report.kl_nats_per_token == pytest.approx(kl.mean().item(), rel=1e-3)
    assert report.kl_nats_per_token > 1e-6


@saves
def test_reward_adapter_without_its_head_is_refused(model_directory, tmp_path):
    base = model_directory("opt")
    save(built(base), tmp_path / "adapter", base)
    weights = tmp_path / "adapter" / "adapter_model.safetensors"
    tensors = {k: v for k, v in load_file(weights).items() if "score" not in k}
    save_file(tensors, weights, metadata={"format": "pt"})
    (tmp_path / "adapter" / "manifest.json").unlink()
    for new_head in (True, False):
        with pytest.raises(
            ValueError, match=r"of a reward model, but its score head is missing; save"
        ):
            built(tmp_path, new_head=new_head)


@saves
def test_reward_adapter_that_names_no_head_is_refused(model_directory, tmp_path):
    base = model_directory("opt")
    language = built(base, build=build_causal_lm)
    save(replace(language, task="SEQ_CLS"), tmp_path / "adapter", base)
    with pytest.raises(ValueError, match=r"is the adapter of a reward model, but its score head"):
        built(tmp_path)


def test_a_classifier_of_several_labels_is_refused(tmp_path):
    tiny_model("llama", num_labels=3).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"a reward model must have one score, but it has 3"):
        built(tmp_path)


@saves
def test_no_head_is_drawn_where_there_must_be_one(model_directory, tmp_path):
    base = model_directory("opt")
    with pytest.raises(ValueError, match=r"is not a reward model: it has no score head"):
        built(base, LoraConfig(), new_head=False)
    save(built(base, build=build_causal_lm), tmp_path / "adapter", base)
    with pytest.raises(ValueError, match=r"is an adapter of a CAUSAL_LM model, not of a reward"):
        built(tmp_path, new_head=False)


@pytest.mark.parametrize("lora", [LoraConfig(), FACTORS], ids=["all weights", "adapter"])
def test_a_head_that_the_files_bring_is_kept(tmp_path, lora):
    stock = reward_model("llama", lora=None)
    stock.save_pretrained(tmp_path)
    ours = built(tmp_path, lora, seed=8).model
    assert torch.equal(head_of(ours), stock.score.weight)
    torch.testing.assert_close(scores_of(ours), stock_scores(stock), **CLOSE)
