"""DPO's loss, gradient and rewards are those of TRL's trainer on its own batch."""

import functools
import math
from dataclasses import fields

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from datasets import Dataset
from transformers import AutoTokenizer

from dschat_lora.assets import BUNDLED_MODEL
from dschat_lora.config.groups import LoraConfig
from dschat_lora.config.options import flatten
from dschat_lora.config.stages import DpoConfig, DpoStageConfig
from dschat_lora.data.batch import PairCollator
from dschat_lora.data.samples import UnpairedSample
from dschat_lora.lora.model import adapter_parameters, apply_lora
from dschat_lora.models.causal_lm import CausalLMLogprobs
from dschat_lora.supervised.pair_objectives import answer_logprobs, dpo_objective
from helpers.addons import with_addon
from helpers.pairs import Answers
from helpers.rounding import assert_same_gradients
from helpers.spread import ALL
from helpers.tiny import tiny_model

trl = pytest.importorskip("trl")
peft = pytest.importorskip("peft")

pytestmark = [pytest.mark.stage, pytest.mark.filterwarnings("ignore::UserWarning")]

R, ALPHA, BETA = 3, 6, 0.3
ROWS = [
    {"prompt": "Who is there?", "chosen": " A friend of yours.", "rejected": " Nobody."},
    {"prompt": "Say one", "chosen": " one", "rejected": " one and two and three"},
    {"prompt": "The sea is", "chosen": " wide and deep", "rejected": " wide"},
    {"prompt": "2 + 2 =", "chosen": " 4", "rejected": " 5"},
]


@functools.cache
def tokenizer():
    return AutoTokenizer.from_pretrained(BUNDLED_MODEL)


def tiny(kind):
    ids = {"pad_token_id": tokenizer().pad_token_id, "bos_token_id": 0, "eos_token_id": 0}
    return tiny_model(kind, vocab_size=len(tokenizer()), **ids)


def trl_trainer(trainer_class, config_class, kind, directory, rows, *, adapted=True, **options):
    """TRL's trainer over the tiny model, which has moved away from its reference."""
    config = config_class(
        output_dir=str(directory),
        use_cpu=True,
        bf16=False,
        report_to="none",
        per_device_train_batch_size=len(rows),
        gradient_checkpointing=False,
        disable_tqdm=True,
        **options,
    )
    lora = peft.LoraConfig(r=R, lora_alpha=ALPHA, target_modules="all-linear")
    trainer = trainer_class(
        model=tiny(kind),
        args=config,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer(),
        **{"peft_config": lora} if adapted else {"ref_model": tiny(kind)},
    )
    move_away(trainer.model)
    return trainer


def same_columns(columns, metrics, names):
    """Means of ours are its metrics."""
    for name in names:
        ours, wanted = columns[name].mean().item(), metrics[name]
        assert ours == pytest.approx(np.mean(wanted), rel=1e-5, abs=1e-5), name


def move_away(model):
    """Move what trains, so that the model is not what it was."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.03 * torch.randn(parameter.shape, generator=generator))
    model.eval()


def pairs_of(batch, reference):
    """Its collated batch as pairs: rows are all chosen, then all rejected sequences."""
    ids, real, answer = (batch[k] for k in ("input_ids", "attention_mask", "completion_mask"))
    half, pairs = len(ids) // 2, []
    for row in range(half):
        answers = [ids[r][(real[r] == 1) & (answer[r] == 1)].tolist() for r in (row, row + half)]
        prompts = [ids[r][(real[r] == 1) & (answer[r] == 0)].tolist() for r in (row, row + half)]
        assert prompts[0] == prompts[1]
        assert answers[0][-1] == answers[1][-1] == tokenizer().eos_token_id
        pairs.append(Answers(prompts[0], *answers, reference=reference(row)))
    return pairs


def our_policy(trainer, kind, adapted):
    """Our model with the trainer's values, and {our name: their name} of what trains."""
    model = tiny(kind)
    if not adapted:
        model.load_state_dict(trainer.model.state_dict())
        return model, {name: name for name, _ in model.named_parameters()}
    apply_lora(model, LoraConfig(lora_dim=R, lora_alpha=ALPHA), seed=0)
    theirs = dict(trainer.model.named_parameters())
    names = {name: f"base_model.model.{name}.default.weight" for name in adapter_parameters(model)}
    assert set(names.values()) == {n for n, p in theirs.items() if p.requires_grad}
    with torch.no_grad():
        for name, parameter in adapter_parameters(model).items():
            parameter.copy_(theirs[names[name]])
    return model, names


def collate(pairs, layout):
    rows = [[pair.sample()] for pair in pairs]
    if layout == "packed":
        return PairCollator(0, "shared")([[pair for row in rows for pair in row]])
    return PairCollator(0, layout)(rows)


def compare(kind, directory, config, *, adapted, layout="packed", rows=ROWS, **options):
    classes = trl.DPOTrainer, trl.DPOConfig
    options |= {"beta": BETA, "adapted": adapted}
    trainer = trl_trainer(*classes, kind, directory, rows, **options)
    examples = [trainer.train_dataset[i] for i in range(len(rows))]
    theirs = trainer.data_collator(examples)
    loss = trainer._compute_loss(trainer.model, dict(theirs), False)
    loss.backward()

    model, names = our_policy(trainer, kind, adapted)
    base = CausalLMLogprobs(tiny(kind))

    def reference(batch):
        assert batch.reference.isnan().all()
        return answer_logprobs(base, batch)

    batch = collate(pairs_of(theirs, lambda row: (math.nan, math.nan)), layout)
    result = dpo_objective(config, reference).loss(CausalLMLogprobs(model), batch)
    ours = result.total / batch.num_samples
    torch.testing.assert_close(ours, loss.detach(), rtol=1e-5, atol=1e-5)
    ours.backward()
    same_gradients(model, names, trainer.model)
    metrics = trainer._metrics["eval"]
    shared = [name for name in metrics if name.startswith(("rewards/", "logps/"))]
    assert len(shared) == 6
    same_columns(result.columns, metrics, shared)
    assert 0 < abs(metrics["rewards/margins"][0]) < 10


def same_gradients(model, names, theirs):
    ours, expected = dict(model.named_parameters()), dict(theirs.named_parameters())
    assert_same_gradients(
        {name: ours[name].grad for name in names},
        {name: expected[other].grad for name, other in names.items()},
        least=1e-3,
    )


def default_of(config_class, name):
    return {field.name: field.default for field in fields(config_class)}[name]


VARIANTS = {
    "sigmoid": ({"loss_type": "sigmoid"}, DpoConfig(beta=BETA)),
    "hinge": ({"loss_type": "hinge"}, DpoConfig(beta=BETA, loss_type="hinge")),
    "ipo": ({"loss_type": "ipo"}, DpoConfig(beta=BETA, loss_type="ipo")),
    "by length": ({"loss_type": "sigmoid_norm"}, DpoConfig(beta=BETA, length_normalization=True)),
}


@pytest.mark.parametrize("adapted", [True, False], ids=["adapter", "all weights"])
@pytest.mark.parametrize("kind", ["opt", "llama"] if ALL else ["llama"])
@pytest.mark.parametrize(("options", "config"), VARIANTS.values(), ids=VARIANTS)
def test_loss_gradient_and_rewards_are_trls(kind, options, config, adapted, tmp_path):
    compare(kind, tmp_path, config, adapted=adapted, **options)


@pytest.mark.parametrize("layout", ["shared", "separate", "alone"])
def test_loss_is_trls_in_every_layout(layout, tmp_path):
    compare("opt", tmp_path, DpoConfig(beta=BETA), adapted=True, layout=layout)


@pytest.mark.parametrize("row", range(len(ROWS)))
def test_loss_of_a_pair_with_the_chosen_answers_own_is_trls(row, tmp_path):
    # Of several pairs TRL takes the mean over all tokens, here each answer counts alike.
    options = {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.7]}
    config = DpoConfig(beta=BETA, rpo_alpha=0.7)
    compare("llama", tmp_path, config, adapted=True, rows=ROWS[row : row + 1], **options)


# ---------------------------------------------------------------------------- without a reference


def answers_of(batch):
    """Its collated batch as pairs."""
    pairs = []
    for row in range(len(batch["chosen_labels"])):
        answers, prompts = [], []
        for name in ("chosen", "rejected"):
            ids, labels, real = (
                batch[f"{name}_{part}"][row] for part in ("input_ids", "labels", "attention_mask")
            )
            answers.append(ids[(real == 1) & (labels != -100)].tolist())
            prompts.append(ids[(real == 1) & (labels == -100)].tolist())
        assert prompts[0] == prompts[1]
        pairs.append(Answers(prompts[0], *answers))
    return pairs


def chosen_cross_entropy(trainer, batch):
    """The mean over the tokens of all chosen answers, from TRL's logits.

    Its ORPO takes that over the prompts too, as the published code does unless told not to.
    """
    logits = trainer.concatenated_forward(trainer.model, batch)[2]
    labels = batch["chosen_labels"]
    width = min(labels.shape[1] - 1, logits.shape[1])
    return F.cross_entropy(
        logits[:, :width].flatten(0, 1), labels[:, 1 : width + 1].flatten(), ignore_index=-100
    )


def compare_reference_free(kind, directory, config, *, layout="packed", rows=ROWS, **options):
    from trl.experimental import cpo, orpo

    classes = {
        "orpo": (orpo.ORPOTrainer, orpo.ORPOConfig),
        "simpo": (cpo.CPOTrainer, cpo.CPOConfig),
    }
    options |= {"max_length": 64}
    trainer = trl_trainer(*classes[config.loss_type], kind, directory, rows, **options)
    batch = trainer.data_collator([trainer.train_dataset[i] for i in range(len(rows))])
    loss, metrics = trainer.get_batch_loss_metrics(trainer.model, batch)
    if config.loss_type == "orpo":
        own = chosen_cross_entropy(trainer, batch)
        chosen, rejected = trainer.concatenated_forward(trainer.model, batch)[:2]
        losses = trainer.odds_ratio_loss(chosen, rejected)[0]
        assert loss.item() == pytest.approx(metrics["nll_loss"] - losses.mean().item(), abs=1e-6)
        loss, metrics["nll_loss"] = own - losses.mean(), own.item()
    loss.backward()

    model, names = our_policy(trainer, kind, True)
    ours = collate(answers_of(batch), layout)
    result = dpo_objective(config).loss(CausalLMLogprobs(model), ours)
    mean = result.total / ours.num_samples
    if result.chosen_nll is not None:
        nll = result.chosen_nll / ours.num_chosen_targets
        assert nll.item() == pytest.approx(metrics["nll_loss"], abs=1e-5)
        mean = mean + nll
    torch.testing.assert_close(mean, loss.detach(), rtol=1e-5, atol=1e-5)
    mean.backward()
    same_gradients(model, names, trainer.model)
    shared = [name for name in metrics if name.startswith(("rewards/", "logps/", "log_odds"))]
    assert len(shared) == (8 if config.loss_type == "orpo" else 6)
    same_columns(result.columns, metrics, shared)


@pytest.mark.parametrize(("kind", "layout"), [("opt", "packed"), ("llama", "alone")])
def test_orpo_is_trls_but_for_the_prompts_cross_entropy(kind, layout, tmp_path):
    config = DpoConfig(loss_type="orpo", beta=0.7)
    compare_reference_free(kind, tmp_path, config, layout=layout, beta=0.7)


@pytest.mark.parametrize(("kind", "layout"), [("opt", "separate"), ("llama", "packed")])
def test_simpo_is_trls(kind, layout, tmp_path):
    config = DpoConfig(loss_type="simpo", beta=2.0, simpo_gamma=0.9, label_smoothing=0.1)
    options = {"loss_type": "simpo", "simpo_gamma": 0.9, "cpo_alpha": 0.0, "label_smoothing": 0.1}
    compare_reference_free(kind, tmp_path, config, layout=layout, beta=2.0, **options)


def test_simpo_with_the_chosen_answers_own_loss_is_trls_of_a_pair(tmp_path):
    config = DpoConfig(loss_type="simpo", beta=2.0, rpo_alpha=0.7)
    options = {"loss_type": "simpo", "cpo_alpha": 0.7}
    compare_reference_free("opt", tmp_path, config, rows=ROWS[1:2], beta=2.0, **options)


def test_published_defaults_are_trls():
    from trl.experimental.cpo import CPOConfig
    from trl.experimental.orpo import ORPOConfig

    assert DpoConfig(loss_type="orpo").beta == default_of(ORPOConfig, "beta")
    assert DpoConfig().simpo_gamma == default_of(CPOConfig, "simpo_gamma")


# ---------------------------------------------------------------------------- unpaired

LABELLED = [
    {"prompt": "Who is there?", "completion": " A friend of yours.", "label": True},
    {"prompt": "Say one", "completion": " one and two and three", "label": False},
    {"prompt": "The sea is", "completion": " wide", "label": False},
    {"prompt": "2 + 2 =", "completion": " 4", "label": True},
    {"prompt": "Sing", "completion": " la la", "label": True},
]


def unpaired_of(batch):
    """TRL's collated batch as samples."""

    def rows(prefix):
        for ids, real, answer in zip(
            *(batch[f"{prefix}{k}"] for k in ("input_ids", "attention_mask", "completion_mask")),
            strict=True,
        ):
            yield ids[real == 1].tolist(), int((real - answer).sum())

    for own, other, label in zip(rows(""), rows("KL_"), batch["label"], strict=True):
        assert own[0][: own[1]] == other[0][: other[1]]
        ids, others = np.array(own[0], np.int32), np.array(other[0][other[1] :], np.int32)
        yield UnpairedSample(ids, others, own[1], int(label))


@with_addon("kto")
@pytest.mark.parametrize(("kind", "packed"), [("opt", True), ("llama", False)])
def test_kto_is_trls(kind, packed, tmp_path):
    from dschat_lora.addons.kto.batch import UnpairedCollator
    from dschat_lora.addons.kto.loss import clamped_kl
    from dschat_lora.addons.kto.objective import kto_batch_loss, means_by_label
    from dschat_lora.addons.kto.options import KtoOptions

    weights = {"desirable_weight": 1.2, "undesirable_weight": 0.7}
    classes = trl.KTOTrainer, trl.KTOConfig
    trainer = trl_trainer(*classes, kind, tmp_path, LABELLED, beta=0.6, **weights)
    examples = [trainer.train_dataset[i] for i in range(len(LABELLED))]
    theirs = trainer.data_collator(examples)
    loss = trainer._compute_loss(trainer.model, dict(theirs), False)
    loss.backward()

    model, names = our_policy(trainer, kind, True)
    base = CausalLMLogprobs(tiny(kind))
    samples = list(unpaired_of(theirs))
    batch = UnpairedCollator(0)([samples] if packed else [[each] for each in samples])
    network = CausalLMLogprobs(model)
    with torch.no_grad():
        reference = answer_logprobs(base, batch.answers)
        far = answer_logprobs(network, batch.mismatched) - answer_logprobs(base, batch.mismatched)
    kl = clamped_kl(far.sum(), torch.tensor(len(far)))
    logprobs = answer_logprobs(network, batch.answers)
    result = kto_batch_loss(logprobs, reference, batch, kl, 0.6, KtoOptions(**weights))
    ours = result.total / batch.num_samples
    torch.testing.assert_close(ours, loss.detach(), rtol=1e-5, atol=1e-5)
    ours.backward()
    same_gradients(model, names, trainer.model)
    metrics = trainer._metrics["eval"]
    assert metrics["kl"][0] > 1e-2
    values = means_by_label({n: c.double().mean().item() for n, c in result.columns.items()})
    shared = [name for name in metrics if name.startswith(("rewards/", "logps/", "kl"))]
    assert len(shared) == 6
    for name in shared:
        assert values[name] == pytest.approx(metrics[name][0], rel=1e-5, abs=1e-5), name


@with_addon("kto")
def test_published_defaults_of_kto_are_trls():
    ours = flatten(DpoStageConfig())
    for name in ("beta", "desirable_weight", "undesirable_weight"):
        assert ours[name] == default_of(trl.KTOConfig, name)
