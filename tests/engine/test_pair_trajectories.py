"""Reward models and DPO at every ZeRO stage, in one and two processes, against a plain loop."""

import copy
from functools import cache

import peft
import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from dschat_lora.config.addons import installed
from dschat_lora.config.groups import LoraConfig
from dschat_lora.lora.model import adapter_parameters, lora_layers
from helpers.pair_runs import (
    Keeping,
    load_policy,
    load_reward,
    pair_loader,
    ragged_pairs,
    ragged_unpaired,
)
from helpers.plain import peft_copy_of
from helpers.runs import LORA, RATE, rate_factors
from helpers.spread import ALL, pairwise

pytestmark = pytest.mark.stage

STAGES = (0, 1, 2, 3)
# The last step of an epoch has one pair: none for the second of two ranks.
PAIRS, STEPS = 17, 3
# processes -> (micro batch, accumulation): always eight rows a step
SHAPES = {1: [(8, 1), (4, 2)], 2: [(4, 1), (2, 2)]}
SIZES = (1, 2) if ALL else (2,)
FULL = {"lora_dim": 0}
KINDS = {
    "bradley_terry": {"task": "reward", "options": {"center_rewards_coefficient": 0.02}},
    "per_token": {"task": "reward", "options": {"reward_loss": "per_token"}},
    "dpo": {"task": "dpo", "options": {"beta": 0.3, "rpo_alpha": 0.1}},
    "dpo on the fly": {"task": "dpo", "options": {"beta": 0.3}, "on_the_fly": True},
    # Its two parts are means over two counts, of unlike shares in each micro-batch.
    "orpo": {"task": "dpo", "options": {"loss_type": "orpo", "beta": 0.7}},
}
if "kto" in installed():
    kto = {"loss_type": "kto", "beta": 0.5, "undesirable_weight": 1.4}
    KINDS["kto"] = {"task": "dpo", "options": kto}
    KINDS["kto on the fly"] = {"task": "dpo", "options": kto, "on_the_fly": True}


# ---------------------------------------------------------------------------- the plain loop


def windows(pairs, steps):
    """The pairs of each optimizer step."""
    lengths = torch.zeros(len(pairs), dtype=torch.int64).numpy()
    loader = pair_loader(pairs, lengths, Keeping(0, "shared"), micro=8, accumulation=1)
    epochs = (window for epoch in range(10**6) for window in loader.epoch(epoch))
    for _, (rows,) in zip(range(steps), epochs, strict=False):
        yield [pair for row in rows for pair in row]


def stock_reward(path, lora):
    """transformers' reward model, with stock PEFT, and the names of what trains in it."""
    ours = load_reward(path, lora)
    base = AutoModelForSequenceClassification.from_pretrained(path, num_labels=1)
    base.config.pad_token_id = 0
    if not lora["lora_dim"]:
        base.load_state_dict(ours.state_dict())
        return base, str
    layers = lora_layers(ours)
    theirs = peft.get_peft_model(
        base,
        peft.LoraConfig(
            r=lora["lora_dim"],
            lora_alpha=lora["lora_alpha"],
            target_modules=list(layers),
            fan_in_fan_out=any(each.transposed for each in layers.values()),
            modules_to_save=["score"],
            task_type="SEQ_CLS",
        ),
    )
    parameters = dict(theirs.named_parameters())
    with torch.no_grad():
        for name, value in adapter_parameters(ours).items():
            parameters[in_peft(name)].copy_(value)
    return theirs, in_peft


def stock_policy(path, lora):
    """transformers' language model, with stock PEFT, and the names of what trains in it."""
    base = AutoModelForCausalLM.from_pretrained(path)
    if not lora["lora_dim"]:
        return base, str
    return peft_copy_of(load_policy(path, lora), base, LoraConfig(**lora)), in_peft


def in_peft(name):
    if name == "score.trained.weight":
        return "base_model.model.score.modules_to_save.default.weight"
    return f"base_model.model.{name}.default.weight"


def token_scores(model, ids):
    """(T,) what the head says at each token."""
    said = []
    hooks = [
        module.register_forward_hook(lambda _, __, run: said.append(run))
        for name, module in model.named_modules()
        if name.endswith(("score", "score.modules_to_save.default"))
    ]
    logits = model(input_ids=torch.as_tensor(ids, dtype=torch.long)[None]).logits
    for hook in hooks:
        hook.remove()
    scores = said[-1][0, :, 0]
    torch.testing.assert_close(scores[-1], logits[0, 0])
    return scores


def answer_logprob(model, ids, prompt_length):
    """(summed log-probability of the answer, its tokens)."""
    ids = torch.as_tensor(ids, dtype=torch.long)
    logprobs = F.log_softmax(model(input_ids=ids[None]).logits[0, :-1].float(), dim=-1)
    picked = logprobs.gather(1, ids[1:, None])[prompt_length - 1 :, 0]
    return picked.sum(), len(picked)


def plain_bradley_terry(model, pair, reference):
    chosen, rejected = (token_scores(model, ids)[-1] for ids in (pair.chosen, pair.rejected))
    centred = 0.02 * (chosen + rejected) ** 2
    return -F.logsigmoid(chosen - rejected - pair.margin) + centred, (chosen, rejected)


def plain_per_token(model, pair, reference):
    chosen, rejected = (token_scores(model, ids) for ids in (pair.chosen, pair.rejected))
    losses = [
        -F.logsigmoid(chosen[t] - rejected[t])
        for t in range(pair.shared_length, min(len(chosen), len(rejected)))
    ]
    # one answer may be the beginning of the other: then there is nothing to compare
    loss = torch.stack(losses).mean() if losses else 0.0 * chosen.sum()
    return loss, (chosen[-1], rejected[-1])


def plain_dpo(model, pair, reference, *, rpo_alpha=0.1):
    ratios, per_token = [], []
    for ids in (pair.chosen, pair.rejected):
        ours, count = answer_logprob(model, ids, pair.prompt_length)
        with torch.no_grad():
            theirs, _ = answer_logprob(reference, ids, pair.prompt_length)
        ratios.append(ours - theirs)
        per_token.append(ours / max(1, count))
    loss = -F.logsigmoid(0.3 * (ratios[0] - ratios[1])) - rpo_alpha * per_token[0]
    return loss, tuple(0.3 * ratio for ratio in ratios)


def plain_dpo_alone(model, pair, reference):
    return plain_dpo(model, pair, reference, rpo_alpha=0.0)


def plain_orpo(model, pair, reference):
    answers = [
        answer_logprob(model, ids, pair.prompt_length) for ids in (pair.chosen, pair.rejected)
    ]
    better, worse = (total / max(1, count) for total, count in answers)
    # an answer without a token is certain: odds without end
    odds = [mean.exp() / (1 - mean.exp().clamp(max=1 - 1e-7)) for mean in (better, worse)]
    return 0.7 * torch.log1p(odds[1] / odds[0]), (0.7 * better, 0.7 * worse), answers[0]


def plain_kto(model, window, reference):
    """What :func:`plain_step` gives; mismatched answers say how far the policy has gone."""

    def logratio(ids, prompt_length):
        ours = answer_logprob(model, ids, prompt_length)[0]
        with torch.no_grad():
            theirs = answer_logprob(reference, ids, prompt_length)[0]
        return ours - theirs

    far = [logratio(each.mismatched, each.prompt_length).item() for each in window]
    kl = max(0.0, sum(far) / len(far))
    losses, rewards, right = [], {0: [], 1: []}, []
    for each in window:
        ratio = logratio(each.input_ids, each.prompt_length)
        lead = ratio - kl if each.label else kl - ratio
        losses.append((1.0 if each.label else 1.4) * (1 - torch.sigmoid(0.5 * lead)))
        rewards[each.label].append(0.5 * ratio.item())
        right.append(lead.item() > 0)
    good, bad = (sum(each) / len(each) if each else None for each in (rewards[1], rewards[0]))
    margin = None if good is None or bad is None else good - bad
    metrics = {"accuracy": sum(right) / len(right), "margin": margin, "kl": kl}
    return sum(losses) / len(losses), metrics


def plain_step(kind, model, window, reference):
    """(loss, metrics) of a step."""
    if kind.startswith("kto"):
        return plain_kto(model, window, reference)
    results = [PLAIN[kind](model, pair, reference) for pair in window]
    mean = torch.stack([loss for loss, *_ in results]).mean()
    if kind == "orpo":
        chosen = [answer for *_, answer in results]
        mean = mean - sum(total for total, _ in chosen) / sum(count for _, count in chosen)
    scores = torch.stack([torch.stack(each).detach() for _, each, *_ in results])
    difference = scores[:, 0] - scores[:, 1]
    right = ((difference.sign() + 1) / 2).mean().item()
    return mean, {"accuracy": right, "margin": difference.mean().item()}


PLAIN = {
    "orpo": plain_orpo,
    "bradley_terry": plain_bradley_terry,
    "per_token": plain_per_token,
    "dpo": plain_dpo,
    "dpo on the fly": plain_dpo_alone,
}


@cache
def plain_run(kind, path, full):
    """The run of this kind by torch's AdamW, two forward passes a pair."""
    lora = FULL if full else LORA
    stock = stock_reward if KINDS[kind]["task"] == "reward" else stock_policy
    model, name_of = stock(path, lora)
    model.eval()  # there is no dropout to turn on
    reference = copy.deepcopy(model)
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    optimizer = torch.optim.AdamW(trained.values(), betas=(0.9, 0.95), eps=1e-8, weight_decay=0)
    report = {"losses": [], "norms": [], "accuracy": [], "margin": [], "kl": [], "name_of": name_of}
    pairs = ragged_pairs(PAIRS)
    unpaired = dict(zip(map(id, pairs), ragged_unpaired(PAIRS), strict=True))
    for window, factor in zip(windows(pairs, STEPS), rate_factors(STEPS), strict=True):
        if kind.startswith("kto"):
            window = [unpaired[id(pair)] for pair in window]
        mean, metrics = plain_step(kind, model, window, reference)
        mean.backward()
        if "gradient" not in report:
            report["gradient"] = {n: p.grad.clone() for n, p in trained.items()}
        report["losses"].append(mean.item())
        for name, value in metrics.items():
            report[name].append(value)
        report["norms"].append(float(torch.nn.utils.clip_grad_norm_(trained.values(), 1.0)))
        optimizer.param_groups[0]["lr"] = RATE * factor
        optimizer.step()
        optimizer.zero_grad()
    return report | {"trained": {n: p.detach() for n, p in trained.items()}}


# ---------------------------------------------------------------------------- trajectories


@pytest.fixture(scope="module")
def runs(ranks, model_directory):
    """``runs(kind, full)``: {(processes, micro, accumulation, stage): report}."""

    @cache
    def of(kind, full):
        path = model_directory(architecture(kind, full))
        run = {"path": path, "steps": STEPS, "pairs": PAIRS, **KINDS[kind]}
        run |= {"lora": FULL if full else LORA}
        reports = {}
        for size, shapes in SHAPES.items():
            rows = [r for r in ROWS if (r["case"], r["size"]) == ((kind, full), size)]
            keys = [(*shapes[row["shape"]], row["stage"]) for row in rows]
            results = ranks(size).run(
                "helpers.pair_runs:train_pairs_many",
                runs=[run | {"micro": m, "accumulation": a, "stage": s} for m, a, s in keys],
            )
            for key, first, last in zip(keys, results[0], results[-1], strict=True):
                reports[(size, *key)] = first | {"own of the last rank": last["own"]}
        return reports

    return of


def architecture(kind, full=False):
    # OPT's biases of keys have no gradient but rounding, of which Adam makes whole steps.
    return "opt" if kind in ("per_token", "dpo", "orpo", "kto") and not full else "llama"


SOME = KINDS if ALL else [n for n in KINDS if n in ("bradley_terry", "dpo on the fly", "kto")]
CASES = [(kind, False) for kind in SOME] + [("bradley_terry", True), ("dpo", True)] * ALL
# Of two processes the last has no pair in an epoch's last step, in no micro-batch.
WITHOUT_PAIRS = {"case": ("bradley_terry", False), "size": 2, "shape": 1, "stage": 3}
FACTORS = {"case": tuple(CASES), "size": (1, 2), "shape": (0, 1), "stage": STAGES}
ROWS = pairwise(FACTORS, rows=[WITHOUT_PAIRS])
IDS = [f"{kind}, {'every weight' if full else 'LoRA'}" for kind, full in CASES]


@pytest.mark.parametrize(("kind", "full"), CASES, ids=IDS)
def test_losses_norms_gradient_and_tensors_are_a_plain_loops_at_every_stage_and_shape(
    runs, model_directory, kind, full
):
    expected = plain_run(kind, model_directory(architecture(kind, full)), full)
    reports = runs(kind, full)
    for report in reports.values():
        assert report["losses"] == pytest.approx(expected["losses"], abs=1e-5)
        assert report["norms"] == pytest.approx(expected["norms"], rel=1e-4)
        assert report["pairs"] == [8, 8, 1] * (STEPS // 3)
        assert full or report["base_changed"] == []
    # The agreement says something only where training moves the loss much further.
    assert max(expected["losses"]) - min(expected["losses"]) > 1e-3
    name_of = expected["name_of"]
    for report in reports.values():
        for name, value in report["gradient"].items():
            wanted = expected["gradient"][name_of(name)]
            torch.testing.assert_close(value.view(wanted.shape), wanted, rtol=1e-4, atol=1e-6)
        assert {name_of(name) for name in report["trained"]} == expected["trained"].keys()
        for name, value in report["trained"].items():
            wanted = expected["trained"][name_of(name)]
            torch.testing.assert_close(value, wanted, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("kind", SOME)
def test_metrics_of_a_step_are_those_over_all_its_pairs(runs, model_directory, kind):
    expected = plain_run(kind, model_directory(architecture(kind)), False)
    # An estimate below 0 would say nothing of how it is made.
    assert max(expected["kl"], default=1.0) > 1e-3
    for report in runs(kind, False).values():
        for name in ("accuracy", "margin", *(["kl"] if "kto" in kind else [])):
            measured = [means[name] for means in report["means"]]
            # before its first step DPO compares the policy with itself
            start = 1 if name == "accuracy" and ("dpo" in kind or "kto" in kind) else 0
            assert measured[start:] == pytest.approx(expected[name][start:], abs=1e-5)


def test_a_rank_without_pairs_takes_part(runs):
    report = runs("bradley_terry", False)[2, 2, 2, 3]
    assert report["own of the last rank"] == [[2, 2], [2, 2], [0]] * (STEPS // 3)


@pytest.mark.parametrize("task", ["reward", "dpo"])
def test_layout_and_packing_of_pairs_change_no_loss(ranks, model_directory, task):
    run = {"path": model_directory("llama"), "task": task, "steps": 3, "pairs": 8, "micro": 8}
    changes = [{"layout": "separate"}, {"layout": "alone"}, {"packing": True}]
    plain, *others = ranks(1).run(
        "helpers.pair_runs:train_pairs_many", runs=[run, *(run | change for change in changes)]
    )[0]
    for other in others:
        assert other["pairs"] == plain["pairs"] == [8, 8, 8]
        assert other["losses"] == pytest.approx(plain["losses"], abs=1e-5)
        assert other["norms"] == pytest.approx(plain["norms"], rel=1e-4)


@pytest.mark.thorough
@pytest.mark.parametrize("task", ["reward", "dpo"])
def test_bf16_agrees_over_zero_stages_and_processes(ranks, model_directory, task):
    run = {"path": model_directory("llama"), "task": task, "steps": STEPS, "pairs": 24}
    run |= {"dtype": "bf16", "on_the_fly": task == "dpo"}
    losses = [
        report["losses"]
        for size, stages in {1: (0,), 2: (1, 3)}.items()
        for report in ranks(size).run(
            "helpers.pair_runs:train_pairs_many",
            runs=[run | {"micro": 8 // size, "stage": stage} for stage in stages],
        )[0]
    ]
    losses = torch.tensor(losses)
    assert (losses.max(0).values - losses.min(0).values).max() <= 1e-2


# ---------------------------------------------------------------------------- snapshots

HOLDERS = {
    **{f"ZeRO {stage}": {"stage": stage} for stage in STAGES},
    "ZeRO 3, small parameters whole": {"stage": 3, "persistent": True},
    "ZeRO 3, offloaded": {"stage": 3, "offload": True},
}


@pytest.fixture(scope="module")
def looks(ranks, model_directory):
    """``looks(size, when, **holder)``: each rank's report of a look back."""

    @cache
    def of(size, when, **holder):
        path = model_directory("opt")
        return ranks(size).run("helpers.pair_runs:look_back", path=path, when=when, **holder)

    return of


def same_bits(found, expected):
    assert found.keys() == expected.keys()
    assert [name for name in found if not torch.equal(found[name], expected[name])] == []


# Before training, after it, and after a checkpoint was read.
LOOKS = [
    (when, name)
    for when, some in (
        ("first", ["ZeRO 3"]),
        ("trained", ["ZeRO 0", "ZeRO 3"]),
        ("restored", ["ZeRO 3, offloaded"]),
    )
    for name in (HOLDERS if ALL else some)
]


@pytest.mark.parametrize(("when", "name"), LOOKS)
@pytest.mark.parametrize("size", SIZES)
def test_snapshot_shows_the_start_and_leaves_what_was_learnt(looks, size, name, when):
    holder = HOLDERS[name]
    reports = looks(size, when, **holder)
    report = reports[0]
    same_bits(report["inside"], report["start"])
    same_bits(report["after"], report["before"])
    moved = max(float((report["after"][n] - v).abs().max()) for n, v in report["start"].items())
    assert moved > 1e-3 or when == "first"
    for each in reports:
        assert each["mode_kept"]
        for seen in each["seen"]:
            torch.testing.assert_close(seen, each["expected"], rtol=0.0, atol=1e-4)
        if when != "first":
            assert (each["now"] - each["expected"]).abs().max() > 1e-3
    assert (report["persistent"] > 0) == holder.get("persistent", False)


@pytest.mark.parametrize("name", HOLDERS if ALL else ["ZeRO 3"])
@pytest.mark.parametrize("size", SIZES)
def test_training_after_a_look_back_is_as_if_nobody_had_looked(
    ranks, model_directory, looks, size, name
):
    path, holder = model_directory("opt"), HOLDERS[name]
    plain = ranks(size).run("helpers.pair_runs:undisturbed_steps", path=path, **holder)[0]
    looked = looks(size, "trained", **holder)[0]
    assert torch.equal(looked["now"], plain["now"])
    assert looked["further"] == plain["further"]


# ---------------------------------------------------------------------------- the reference


def plain_reference(path, pairs):
    model = stock_policy(path, LORA)[0].eval()
    with torch.no_grad():
        values = [
            float(answer_logprob(model, ids, pair.prompt_length)[0])
            for pair in pairs
            for ids in (pair.chosen, pair.rejected)
        ]
    return torch.tensor(values).view(-1, 2)


@pytest.mark.parametrize(("size", "stage"), [(1, 0), (2, 3)])
def test_reference_is_the_start_whatever_the_processes_packing_and_layout(
    ranks, model_directory, tmp_path, size, stage
):
    path = model_directory("opt")
    calls = [
        {"identity": "plain"},
        {"identity": "packed", "packing": True},
        {"identity": "apart", "layout": "separate", "batch_size": 1},
        {"identity": "rows", "layout": "alone", "batch_size": 5},
    ]
    run = {"path": path, "cache": str(tmp_path), "calls": calls, "stage": stage}
    expected = plain_reference(path, ragged_pairs(19, seed=7))
    for reports in ranks(size).run("helpers.pair_runs:reference_values", **run):
        for values, passes in reports:
            torch.testing.assert_close(values, expected, rtol=0.0, atol=2e-5)
            assert passes > 0


@pytest.mark.parametrize("size", [1, 2])
def test_reference_is_read_again_unless_its_file_was_damaged(
    ranks, model_directory, tmp_path, size
):
    calls = [
        {},
        {"batch_size": 1, "packing": True},
        *({"damage": kind} for kind in ("flipped", "cut", "gone")),
        {},
        {"pairs": 18},
        {"identity": "another"},
        {},
    ]
    run = {"path": model_directory("opt"), "cache": str(tmp_path), "calls": calls}
    for reports in ranks(size).run("helpers.pair_runs:reference_values", **run):
        assert [passes > 0 for _, passes in reports] == [
            *(True, False, True, True, True, False, True, True, False)
        ]
        first = reports[0][0]
        for number in (1, 2, 3, 4, 5, 7, 8):
            assert torch.equal(reports[number][0], first)
        assert reports[6][0].shape == (18, 2)
    assert len(list(tmp_path.glob("reference-*"))) == 3
    assert not list(tmp_path.glob(".building*"))


# ---------------------------------------------------------------------------- evaluation


@pytest.mark.parametrize(("size", "stage", "count"), [(1, 0, 7), (2, 0, 11), (2, 3, 1)])
def test_evaluation_has_every_pair_once_however_they_fall_on_ranks(
    ranks, model_directory, size, stage, count
):
    path = model_directory("llama")
    model = stock_reward(path, LORA)[0].eval()
    pairs = ragged_pairs(count, seed=5)
    with torch.no_grad():
        scores = torch.tensor(
            [[float(token_scores(model, ids)[-1]) for ids in (p.chosen, p.rejected)] for p in pairs]
        )
    difference = scores[:, 0] - scores[:, 1]
    margins = torch.tensor([pair.margin for pair in pairs])
    loss = float(-F.logsigmoid(difference - margins).mean())
    reports = ranks(size).run(
        "helpers.pair_runs:evaluate_pairs", path=path, stage=stage, pairs=count
    )
    owned = [sum(report["own"]) for report in reports]
    assert sum(owned) == count
    assert len(set(owned)) == size or (size == 1)
    for report in reports:
        columns = report["columns"]
        assert report["loss"] == pytest.approx(loss, abs=1e-5)
        assert float(columns["accuracy"].mean()) == float((difference > 0).float().mean())
        scored = torch.stack([columns["chosen_score"], columns["rejected_score"]], dim=1)
        order, wanted = scored[:, 0].argsort(), scores[:, 0].argsort()
        torch.testing.assert_close(scored[order], scores[wanted], rtol=0.0, atol=1e-5)
        longer = [len(p.chosen) > len(p.rejected) for p in pairs]
        equal = [len(p.chosen) == len(p.rejected) for p in pairs]
        share = (sum(longer) + 0.5 * sum(equal)) / count
        assert report["described"]["chosen_is_longer"] == pytest.approx(share)
