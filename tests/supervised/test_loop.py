"""The training loop: what a step's loss and gradient are, however its rows are dealt out."""

from dataclasses import asdict
from itertools import pairwise

import pytest
import torch
from transformers import AutoModelForCausalLM

from dschat_lora.config.groups import LoraConfig, OptimConfig, RunConfig
from dschat_lora.data.batch import SampleCollator
from dschat_lora.data.loader import Window
from dschat_lora.supervised import loop as trainer
from dschat_lora.supervised.loop import make_train_schedule
from dschat_lora.supervised.objectives import describe_perplexity
from helpers import plain
from helpers.runs import LORA, load_model, loader
from helpers.spread import ALL
from helpers.tiny import ragged_samples

SIZES = (1, 2) if ALL else (2,)
SHAPES = {1: [(8, 1), (4, 2), (1, 8)], 2: [(4, 1), (2, 2), (1, 4)]}


def relative_error(value, expected):
    """Of whole gradients: the L2 norm of the difference over that of the expected one."""
    names = expected.keys()
    assert value.keys() == names
    difference = sum((value[n].double() - expected[n].double()).square().sum() for n in names)
    return float((difference / sum(expected[n].double().square().sum() for n in names)).sqrt())


@pytest.fixture(scope="module")
def exact(model_directory):
    """(mean loss, gradient by our names) of the first step's eight samples, in fp64."""
    path = model_directory("llama")
    theirs = plain.peft_copy_of(
        load_model(path, LORA), AutoModelForCausalLM.from_pretrained(path), LoraConfig(**LORA)
    ).double()
    samples = ragged_samples(27)
    window = next(loader(samples, micro=8, accumulation=1).epoch(0))
    lengths = [int((row > 0).sum()) for batch in window for row in batch.segment_ids]
    chosen = [
        next(s for s in samples if s.input_ids.tolist() == ids[:n].tolist())
        for ids, n in zip(
            (ids for batch in window for ids in batch.input_ids), lengths, strict=True
        )
    ]
    assert len(set(lengths)) > 4
    loss = plain.accumulate(theirs, chosen)
    gradient = {
        name.removeprefix("base_model.model.").removesuffix(".default.weight"): p.grad
        for name, p in theirs.named_parameters()
        if p.requires_grad
    }
    return loss, gradient


@pytest.mark.stage
@pytest.mark.parametrize("stage", [0, 1, 2, 3] if ALL else [3])
@pytest.mark.parametrize("size", SIZES)
def test_gradient_is_that_of_the_mean_over_the_steps_targets(
    ranks, model_directory, exact, size, stage
):
    run = {"path": model_directory("llama"), "samples": 27, "steps": 1, "stage": stage}
    run |= {"want_gradient": True}
    shapes = SHAPES[size] if stage in (0, 3) else SHAPES[size][1:2]
    runs = [run | {"micro": micro, "accumulation": n} for micro, n in shapes]
    for per_rank in ranks(size).run("helpers.runs:train_many", runs=runs):
        for report in per_rank:
            assert report["losses"][0] == pytest.approx(exact[0], rel=1e-6)
            assert relative_error(report["gradient"], exact[1]) < 1e-6
            norm = torch.stack([g.norm() for g in exact[1].values()]).norm()
            assert report["norms"][0] == pytest.approx(float(norm), rel=1e-6)


@pytest.mark.stage
@pytest.mark.parametrize(
    "shape",
    [{"micro": 2, "accumulation": 2}, {"micro": 4, "accumulation": 2, "context_parallel": 2}],
    ids=["2 data-parallel", "2 context-parallel"],
)
def test_each_source_has_the_loss_of_a_plain_loop_over_its_samples(ranks, model_directory, shape):
    path, names = model_directory("llama"), ["a", "b", "c"]
    run = {"path": path, "samples": 27, "steps": 2, "packing": True, "sources": names}
    report, other = ranks(2).run("helpers.runs:train", **run, **shape)
    assert report["means"] == other["means"]
    model = AutoModelForCausalLM.from_pretrained(path)
    for number, step in enumerate(samples_of_steps(ragged_samples(27), names)):
        means, total = report["means"][number], 0.0
        counts = {name: sum(map(plain.sample_loss_count, each)) for name, each in step.items()}
        for name in names:
            loss = means[f"loss/{name}"]
            assert (loss is None) == (not step[name])
            total += (loss or 0.0) * counts[name]
            if not number and step[name]:  # of the model as it was
                assert loss == pytest.approx(plain.mean_loss(model, step[name]), rel=1e-5)
        assert total / sum(counts.values()) == pytest.approx(report["losses"][number], rel=1e-6)
    assert any(report["means"][number]["loss/a"] is None for number in range(2))


def samples_of_steps(samples, names):
    """Of each step of an epoch, the samples of each source, the first ones of which have one."""
    steps = []

    class Recording(SampleCollator):
        def __call__(self, rows):
            of_source = {name: [] for name in names}
            for sample in (each for row in rows for each in row):
                (index,) = (i for i, s in enumerate(samples) if s.input_ids is sample.input_ids)
                of_source[names[min(index, len(names) - 1)]].append(sample)
            steps.append(of_source)
            return super().__call__(rows)

    whole = loader(samples, micro=8, accumulation=1, packing=True)
    whole._collate = Recording(0)
    assert len(list(whole.epoch(0))) == len(steps) == 2
    return steps


@pytest.mark.stage
def test_runs_of_every_shape_are_the_same_run_and_end_epochs_with_a_ragged_step(
    ranks, model_directory
):
    # 27 rows in steps of 8: the fourth holds 3, so that ranks and micro-batches run empty.
    reports = []
    for size, shapes in SHAPES.items():
        run = {"path": model_directory("llama"), "samples": 27, "steps": 9, "max_grad_norm": 1.0}
        runs = [run | {"micro": micro, "accumulation": n} for micro, n in shapes]
        results = ranks(size).run("helpers.runs:train_many", runs=runs)
        for per_rank in zip(*results, strict=True):
            assert all(report["losses"] == per_rank[0]["losses"] for report in per_rank)
            assert all(report["norms"] == per_rank[0]["norms"] for report in per_rank)
        reports += results[0]
    samples = ragged_samples(27)
    each_epoch = sum(plain.sample_loss_count(sample) for sample in samples)
    first = reports[0]
    assert sum(first["targets"][:4]) == sum(first["targets"][4:8]) == each_epoch
    for report in reports[1:]:
        assert report["targets"] == first["targets"]
        assert report["losses"] == pytest.approx(first["losses"], abs=1e-5)
        for name, value in report["trained"].items():
            torch.testing.assert_close(value, first["trained"][name], rtol=1e-4, atol=1e-5)


@pytest.mark.stage
@pytest.mark.parametrize("stage", [0, 3] if ALL else [3])
@pytest.mark.parametrize("size", SIZES)
def test_evaluation_weighs_every_supervised_token_of_all_ranks_alike(
    ranks, model_directory, size, stage
):
    path, samples = model_directory("opt"), ragged_samples(11, seed=5)
    expected = plain.mean_loss(AutoModelForCausalLM.from_pretrained(path).eval(), samples)
    for batch_size, packing in ((3, False), (1, True)):
        results = ranks(size).run(
            "helpers.runs:evaluate_samples",
            path=path,
            stage=stage,
            batch_size=batch_size,
            samples=11,
            packing=packing,
        )
        for result in results:
            assert result["loss"] == pytest.approx(expected, abs=1e-5)
            assert result["targets"] == sum(map(plain.sample_loss_count, samples))
            assert len(result["own"]) == len(results[0]["own"])
        if size == 2:
            assert sum(results[0]["own"]) != sum(results[1]["own"])


@pytest.mark.thorough
@pytest.mark.stage
@pytest.mark.parametrize("size", SIZES)
def test_a_skipped_step_changes_no_weight_and_the_run_goes_on(ranks, model_directory, size):
    run = {"path": model_directory("opt"), "steps": 4, "micro": 2, "accumulation": 2}
    runs = [run | {"stage": stage, "overflow_at": 1} for stage in range(4)]
    # Without the second step's update, and with its rows: what the others would do alone.
    for reports in ranks(size).run("helpers.runs:train_many", runs=runs):
        for report in reports:
            assert report["skipped"] == [False, True, False, False]
            assert report["losses"] == pytest.approx(reports[0]["losses"], abs=1e-5)
            assert all(value.isfinite().all() for value in report["trained"].values())
    run |= {"stage": 0, "overflow_at": 0, "steps": 1}
    (report, *_) = ranks(size).run("helpers.runs:train", **run)
    untrained = load_model(model_directory("opt"), LORA)
    for name, value in report["trained"].items():
        assert torch.equal(value, untrained.get_parameter(name).detach())


@pytest.mark.stage
@pytest.mark.parametrize("stage", [0, 1, 3] if ALL else [0])
def test_a_run_whose_gradient_stays_infinite_ends_after_three_skips(ranks, model_directory, stage):
    for size in (1, 2):
        results = ranks(size).run(
            "helpers.runs:fit_with_infinite_gradients", path=model_directory("opt"), stage=stage
        )
        for result in results:
            assert "not finite 3 times in a row" in result["error"]
            assert result["evaluated"] == [0]
        events = [line for line in results[0]["lines"] if line["kind"] == "event"]
        assert [event["step"] for event in events] == [1, 2, 3]
        assert all(event["event"] == "skipped_step" for event in events)


@pytest.mark.thorough
@pytest.mark.stage
@pytest.mark.parametrize("size", SIZES)
def test_infinite_loss_of_finite_gradient_on_one_rank_skips_the_step_on_all(
    ranks, model_directory, size
):
    # In the first micro-batch of the second step, and in the last of the fourth.
    infinite = [[1, 0, size - 1], [3, 1, 0]]
    results = ranks(size).run(
        "helpers.runs:fit_with_infinite_losses",
        path=model_directory("opt"),
        stages=[0, 1, 2, 3],
        infinite=infinite,
    )
    for per_rank in zip(*results, strict=True):
        seen, lines = per_rank[0]["seen"], per_rank[0]["lines"]
        changes = []
        for before, after in pairwise(seen):
            same = before.keys() == after.keys() and all(
                torch.equal(before[key].view(torch.int32), after[key].view(torch.int32))
                for key in before
            )
            assert same or not any(
                torch.equal(before[key], after[key]) for key in before if "lora_B" in key
            )
            changes.append(not same)
        assert changes == [True, False, True, False, True]
        train = [line for line in lines if line["kind"] == "train"]
        assert [line["skipped"] for line in train] == [False, True, False, True, False]
        assert [line["loss"] for line in train if line["skipped"]] == ["inf", "inf"]
        events = [(line["step"], line["event"]) for line in lines if line["kind"] == "event"]
        assert events == [(2, "skipped_step"), (4, "skipped_step")]
        for report in per_rank:
            assert (report["progress"]["skipped"], report["progress"]["step"]) == (2, 5)
            assert report["progress"]["skipped_in_a_row"] == 0


def test_what_a_loader_knows_of_a_step_is_not_asked_of_the_ranks(monkeypatch):
    batches = [SampleCollator(0)([[sample]]) for sample in ragged_samples(3)]
    known = {"num_samples": 30, "num_tokens": 200, "num_targets": 150, "num_attended": 900}
    known |= {"num_positions": 256, "num_scored_pairs": 4096, "num_chosen_targets": 0}
    monkeypatch.setattr(trainer, "sum_over_ranks", lambda values: [10 * v for v in values])
    assert trainer.count(batches).num_samples == 30
    monkeypatch.setattr(trainer, "sum_over_ranks", None)
    assert asdict(trainer.count(Window(batches, known))) == known


@pytest.mark.parametrize(
    ("optim", "steps"),
    [
        ({}, 7),
        ({"num_train_epochs": 3}, 21),
        ({"num_train_epochs": 3, "max_steps": 10}, 10),
        ({"max_steps": 99}, 99),
        ({"num_train_epochs": 0, "max_steps": 5}, 0),
    ],
)
def test_plan_counts_epochs_unless_steps_are_given(optim, steps):
    assert make_train_schedule(OptimConfig(**optim), RunConfig(), 7).num_steps == steps


def test_perplexity_of_a_huge_loss_is_infinite():
    assert describe_perplexity(0.0, {}) == {"perplexity": 1.0}
    assert describe_perplexity(1000.0, {}) == {"perplexity": float("inf")}
