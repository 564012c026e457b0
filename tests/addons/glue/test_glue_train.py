"""Whole runs of GLUE's tasks: when they evaluate, what they keep, and that they can be repeated."""

import gc
import json
import os
import shutil
import signal
import weakref
import zipfile
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from dschat_lora.addons.glue import train
from dschat_lora.addons.glue.config import TASKS, GlueConfig
from dschat_lora.addons.glue.model import build_model, trained_tensors
from dschat_lora.addons.glue.trainer import GlueTrainer, mean_loss
from dschat_lora.checkpoint.manifest import verify, write_manifest
from dschat_lora.config.options import parse_config
from helpers.glue_toys import LORA, TSV_TASKS, read_jsonl
from helpers.spread import ALL

MEASURES = {
    "cola": {"matthews_correlation"},
    "stsb": {"pearson", "spearmanr", "combined_score"},
    "mrpc": {"accuracy", "f1", "combined_score"},
    "qqp": {"accuracy", "f1", "combined_score"},
}
KINDS = {task: ("roberta", "deberta-v2")[number % 2] for number, task in enumerate(TSV_TASKS)}


def results(directory, name="eval"):
    return json.loads((directory / f"{name}_results.json").read_text("utf-8"))


def steps_of(directory, kind):
    return [
        line["step"] for line in read_jsonl(directory / "metrics.jsonl") if line["kind"] == kind
    ]


def weights(directory):
    return load_file(directory / "adapter" / "adapter_model.safetensors")


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[n], other[n]) for n in one)


@pytest.mark.parametrize("task", [task for task in TSV_TASKS if task != "mnli"][:: 1 if ALL else 4])
def test_every_task_trains_and_is_measured(glue_run, task, tmp_path):
    out = glue_run(
        *(tmp_path / "out", task, *LORA, "--max_steps", "2", "--save_strategy", "no"),
        *("--do_predict", "--max_seq_length", "16", "--max_eval_samples", "6"),
        kind=KINDS[task],
    )
    assert {n.removeprefix("eval_") for n in results(out)} == MEASURES.get(task, {"accuracy"}) | {
        "loss"
    }
    lines = (out / f"predict_results_{task}.txt").read_text("utf-8").splitlines()
    assert lines[0] == "index\tprediction"
    assert len(lines) == 1 + 12
    labels = TASKS[task].labels
    assert not labels or {line.split("\t")[1] for line in lines[1:]} <= set(labels)
    record = json.loads((out / "run.json").read_text("utf-8"))
    assert record["status"] == "finished"
    counts = {name: record["data"][name]["rows"] for name in ("train", "validation", "test")}
    assert counts == {"train": 24, "validation": 6, "test": 12}
    assert not list(out.glob("checkpoint-*"))


def test_mnli_keeps_both_kinds_of_rows_apart(trained):
    measures = results(trained)
    assert set(measures) == {"eval_accuracy", "eval_loss", "eval_mm_accuracy", "eval_mm_loss"}
    assert measures["eval_loss"] != measures["eval_mm_loss"]
    assert results(trained, "all").items() >= measures.items()
    evals = [line for line in read_jsonl(trained / "metrics.jsonl") if line["kind"] == "eval"]
    kinds = [("mm_loss" in line, line["step"]) for line in evals]
    assert kinds == [(False, 3), (True, 3), (False, 6), (True, 6)]
    assert evals[-1]["mm_loss"] == measures["eval_mm_loss"]
    assert len((trained / "predict_results_mnli-mm.txt").read_text("utf-8").splitlines()) == 13


def test_evaluation_comes_when_it_is_asked_for(glue_run, trained, tmp_path):
    assert sorted({*steps_of(trained, "eval")}) == [3, 6]  # epochs
    options = [*LORA, "--num_train_epochs", "2", "--save_strategy", "steps", "--save_steps", "2"]
    by_steps = glue_run(
        *(tmp_path / "steps", "rte", *options, "--evaluation_strategy", "steps"),
        *("--eval_steps", "4", "--save_total_limit", "1", "--warmup_ratio", "0.3"),
    )
    assert steps_of(by_steps, "eval") == [4, 6]  # the last one at the end
    assert [path.name for path in by_steps.glob("checkpoint-*")] == ["checkpoint-6"]
    lines = [each for each in read_jsonl(by_steps / "metrics.jsonl") if each["kind"] == "train"]
    # 0.3 of 6 steps are 1.8, so 2 to warm up over; the first step has a rate of 0.
    expected = [0, 0.5e-2, 1e-2, 0.75e-2, 0.5e-2, 0.25e-2]
    assert [line["learning_rate"] for line in lines] == pytest.approx(expected)
    never = glue_run(tmp_path / "no", "rte", *options, "--no-do_eval")
    assert steps_of(never, "eval") == []
    assert steps_of(never, "train") == [1, 2, 3, 4, 5, 6]


def test_a_seed_gives_the_same_weights(glue_run, tmp_path):
    options = [*LORA, "--max_steps", "4", "--save_strategy", "no", "--classifier_dropout", "0.1"]
    options += ["--use_deterministic_algorithms", "--seed", "0"]
    try:
        one, other = (weights(glue_run(tmp_path / name, "rte", *options)) for name in "ab")
    finally:
        torch.use_deterministic_algorithms(False)
    assert same(one, other)


def test_the_seed_draws_the_head_and_the_factors(glue_run, tmp_path):
    options = [*LORA, "--max_steps", "1", "--warmup_steps", "1", "--save_strategy", "no", "--seed"]
    # The first step of a warm-up has a rate of 0: these are the values at the start.
    one, other = (weights(glue_run(tmp_path / seed, "rte", *options, seed)) for seed in "01")
    differ = {name for name in one if not torch.equal(one[name], other[name])}
    drawn = {n for n in one if n.endswith(("lora_A.weight", "dense.weight", "out_proj.weight"))}
    assert differ == drawn


def test_a_resumed_run_ends_as_one_that_was_not_stopped(glue_run, tmp_path):
    # Its end lies within the second epoch.
    options = [*LORA, "--max_steps", "5", "--eval_strategy", "steps", "--eval_steps", "2"]
    options += ["--save_steps", "2", "--classifier_dropout", "0.1"]
    options += ["--lr_scheduler_type", "constant"]
    whole = glue_run(tmp_path / "whole", "rte", *options)
    resumed = glue_run(
        tmp_path / "other", "rte", *options, "--resume_from_checkpoint", whole / "checkpoint-4"
    )
    assert same(weights(whole), weights(resumed))
    lines = [read_jsonl(run / "metrics.jsonl") for run in (whole, resumed)]
    for mine, theirs in zip(*lines, strict=True):
        for name in ("kind", "step", "loss", "learning_rate", "samples", "accuracy"):
            assert mine.get(name) == theirs.get(name)
        if mine["kind"] == "train":
            assert mine["lora_learning_rate"] == mine["learning_rate"]
            assert theirs["samples"] == 8
            speed = theirs["samples"] / theirs["step_seconds"]
            assert theirs["samples_per_second"] == pytest.approx(speed)
    before = results(resumed, "train")
    assert before["train_loss"] > 0
    (resumed / "all_results.json").write_text("")  # as a killed process leaves it
    glue_run(resumed, "rte", "--resume_from_checkpoint", "latest")
    assert results(resumed, "train") == before
    assert same(weights(whole), weights(resumed))
    again = read_jsonl(resumed / "metrics.jsonl")
    assert [(line["kind"], line["step"]) for line in again] == [
        (line["kind"], line["step"]) for line in lines[0]
    ]


def test_a_checkpoint_at_the_end_of_an_epoch_is_that_after_its_evaluation(glue_run, tmp_path):
    options = [*LORA, "--num_train_epochs", "2", "--eval_strategy", "epoch"]
    options += ["--save_steps", "3", "--classifier_dropout", "0.1"]
    whole = glue_run(tmp_path / "whole", "rte", *options)
    resumed = tmp_path / "resumed"
    glue_run(resumed, "rte", "--resume_from_checkpoint", whole / "checkpoint-3")
    assert steps_of(resumed, "eval") == steps_of(whole, "eval") == [3, 6]
    assert same(weights(whole), weights(resumed))


def test_a_run_that_is_told_to_stop_saves_its_state(glue_run, monkeypatch, tmp_path, capsys):
    step = GlueTrainer.training_step

    def told(trainer, *arguments):
        if trainer.state.global_step == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return step(trainer, *arguments)

    monkeypatch.setattr(GlueTrainer, "training_step", told)
    out = tmp_path / "out"
    with pytest.raises(SystemExit) as ended:
        glue_run(out, "rte", *LORA, "--max_steps", "9", "--save_strategy", "epoch")
    assert ended.value.code == 128 + signal.SIGTERM
    words = f"resume with: dschat-lora glue --output_dir {out} --resume_from_checkpoint latest"
    assert f"stopped by SIGTERM after step 2; {words}\n" in capsys.readouterr().out
    record = json.loads((out / "run.json").read_text("utf-8"))
    assert record["status"] == "interrupted by SIGTERM at step 2"
    verify(out / "checkpoint-2", kind="checkpoint")


def test_a_checkpoint_that_cannot_be_loaded_leaves_log_and_record_alone(
    trained, glue_run, tmp_path
):
    out = tmp_path / "out"
    shutil.copytree(trained, out)
    for path in (out / "checkpoint-6" / "optimizer.pt", out / "checkpoint-3" / "optimizer.pt"):
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("other", "no tensors")
        write_manifest(path.parent, kind="checkpoint")
    before = [(out / name).read_bytes() for name in ("metrics.jsonl", "run.json")]
    with pytest.raises(RuntimeError):
        glue_run(out, "mnli", "--resume_from_checkpoint", out / "checkpoint-3")
    assert [(out / name).read_bytes() for name in ("metrics.jsonl", "run.json")] == before


def test_what_was_trained_outlives_a_failed_evaluation(glue_run, monkeypatch, tmp_path, capsys):
    def fail(*arguments, **more):
        raise ValueError("no measure")

    monkeypatch.setattr(train.GlueTrainer, "evaluate", fail)
    with pytest.raises(SystemExit):
        glue_run(tmp_path / "out", "rte", *LORA, "--max_steps", "1", "--save_strategy", "no")
    assert weights(tmp_path / "out")
    assert capsys.readouterr().err.endswith("error: no measure\n")


def test_the_trainer_takes_the_cpu_where_it_is_chosen_and_no_gpu_that_torch_cannot_use(monkeypatch):
    config = GlueConfig(model_name_or_path="m", task_name="rte")
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    with pytest.raises(ValueError, match="--fp16 needs a GPU; --bf16"):
        train.training_arguments(replace(config, fp16=True))
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)  # DS_ACCELERATOR: cpu
    settings = train.training_arguments(config)
    assert (settings.use_cpu, settings.dataloader_pin_memory) == (True, False)
    monkeypatch.setattr(train.gpu, "problem", lambda device: ("an old driver", "update it"))
    with pytest.raises(ValueError, match="^an old driver; update it$"):
        train.training_arguments(config)


def test_optimizer_state_is_that_of_the_trained_parameters(trained):
    state = torch.load(trained / "checkpoint-6" / "optimizer.pt", weights_only=True)
    counts = [entry["exp_avg"].numel() for entry in state["state"].values()]
    record = json.loads((trained / "run.json").read_text("utf-8"))["parameters"]
    assert sum(counts) == record["trainable"] < record["total"]
    first = load_file(trained / "checkpoint-3" / "model.safetensors")
    last = load_file(trained / "checkpoint-6" / "model.safetensors")
    moved = {name for name in first if not torch.equal(first[name], last[name])}
    assert moved == {n for n in first if "lora_" in n or n.startswith("classifier.")}
    decayed = [group["weight_decay"] for group in state["param_groups"]]
    assert [len(group["params"]) for group in state["param_groups"]] == [8 + 2, 2]
    assert decayed == [0.1, 0.0]


def test_accumulated_batches_are_one_batch_also_where_they_are_ragged():
    """The Trainer by itself takes gradients as many times too large as there are batches."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(7, 3, generator=generator, dtype=torch.float64)
    labels = torch.tensor([0, 2, 1, 1, 0, 2, 2])

    def loss(first, last, rows):
        outputs = SimpleNamespace(logits=logits[first:last])
        return mean_loss(TASKS["mnli"], outputs, labels[first:last], rows)

    whole = torch.nn.functional.cross_entropy(logits.float(), labels)
    torch.testing.assert_close(loss(0, 3, 7) + loss(3, 6, 7) + loss(6, 7, 7), whole)
    torch.testing.assert_close(loss(0, 7, None), whole)


def test_accumulation_leaves_losses_and_gradients_as_they_are(glue_run, tmp_path):
    options = [*LORA, "--num_train_epochs", "1", "--save_strategy", "no", "--weight_decay", "0.1"]
    runs = [
        glue_run(
            *(tmp_path / name, "stsb", *options, "--per_device_train_batch_size", size),
            *("--gradient_accumulation_steps", count),
        )
        for name, size, count in (("whole", 8, 1), ("parts", 2, 4))
    ]
    for one, other in zip(*(read_jsonl(run / "metrics.jsonl") for run in runs), strict=True):
        for name in {"loss", "grad_norm", "pearson", "samples"} & one.keys():
            assert one[name] == pytest.approx(other[name], rel=1e-5)


def test_another_tasks_factors_are_taken_and_its_head_is_dropped(
    trained, glue_run, encoder, capsys, tmp_path
):
    options = [*LORA, "--lora_path", trained]
    out = glue_run(tmp_path / "out", "mrpc", *options, "--no-do_train")
    said = capsys.readouterr().out
    assert "head: starts anew; dropped classifier, which has other shapes there" in said
    assert "note: inputs are cut after 64 tokens" in said
    assert not (out / "adapter").exists()
    argv = ["--model_name_or_path", encoder("roberta"), "--task_name", "mrpc", *options]
    config = parse_config(GlueConfig, [str(each) for each in [*argv[:-1], trained / "adapter"]])
    own = trained_tensors(build_model(config, say=lambda text: None))
    theirs = weights(trained)
    for name, tensor in own.items():
        if ".lora_" in name:
            torch.testing.assert_close(theirs[f"base_model.model.{name}.weight"], tensor.detach())
    assert own["classifier.out_proj.weight"].shape == (2, 32)


def test_a_run_evaluated_again_gives_its_last_measures(trained, glue_run, tmp_path):
    """Guards against weights saved merged: they would count the update twice."""
    out = glue_run(tmp_path / "out", "mnli", *LORA, "--no-do_train", "--lora_path", trained)
    assert results(out) == pytest.approx(results(trained), abs=1e-6)


def test_full_fine_tuning_leaves_a_model_and_no_trainer(glue_run, monkeypatch, tmp_path):
    """A Trainer that outlives the process group, or ends with it, may hang two processes."""
    made, alive, evaluate = [], [], train.GlueTrainer.evaluate

    def remember(trainer, *arguments, **more):
        made.append(weakref.ref(trainer))
        return evaluate(trainer, *arguments, **more)

    monkeypatch.setattr(train.GlueTrainer, "evaluate", remember)
    monkeypatch.setattr(
        "dschat_lora.runtime.run.shutdown", lambda: (gc.collect(), alive.append(made[0]()))
    )
    out = glue_run(tmp_path / "out", "wnli", "--max_steps", "1", "--save_strategy", "no")
    assert (out / "model" / "model.safetensors").is_file()
    assert not (out / "adapter").exists()
    assert results(out).keys() == {"eval_accuracy", "eval_loss"}
    assert alive == [None]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["--lora_r", "4"], "trained with --lora_r 8 --lora_alpha 16; this run has --lora_r 4"),
        (["--lora_alpha", "8"], "this run has --lora_r 8 --lora_alpha 8"),
        (["--target_modules", "query", "key", "value"], "lacks roberta.encoder.layer.0.attention"),
        (["--target_modules", "query"], "which the model does not have"),
    ],
)
def test_an_adapter_that_does_not_fit_is_refused(
    trained, glue_run, change, message, tmp_path, capsys
):
    with pytest.raises(SystemExit) as ended:
        glue_run(tmp_path / "out", "mnli", *LORA, "--lora_path", trained, *change)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out" / "run.json").exists()
