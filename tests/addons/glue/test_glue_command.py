"""GLUE as a user starts it, in one process and in two."""

import json

import pytest

from helpers.glue_toys import read_jsonl, save_encoder, write_task
from helpers.launcher import ROOT

pytestmark = pytest.mark.stage
GLUE = ROOT / "training" / "nlu_glue" / "main.py"


def test_two_processes_measure_what_one_does(launcher, tmp_path):
    """With rows that neither the batches nor the processes divide, for the evaluation."""
    save_encoder("deberta-v2", tmp_path / "model")
    write_task("mrpc", tmp_path / "data", train=16, dev=11)
    argv = [
        *("--model_name_or_path", "model", "--task_name", "mrpc", "--data_dir", "data"),
        *("--apply_lora", "--learning_rate", "1e-2", "--num_train_epochs", "2"),
        *("--logging_steps", "1", "--eval_strategy", "epoch", "--save_strategy", "epoch"),
        *("--max_grad_norm", "0", "--per_device_eval_batch_size", "4", "--seed", "3"),
    ]
    running = [
        launcher.start(
            [*argv, "--output_dir", f"out{n}", "--per_device_train_batch_size", 8 // n],
            tmp_path,
            ranks=n,
            script=GLUE,
        )
        for n in (1, 2)
    ]
    for each in running:
        assert not any(each.wait(60)), each.output()
    one, two = (tmp_path / f"out{n}" for n in (1, 2))
    for name in ("eval_results.json", "metrics.jsonl"):
        mine, theirs = (read_jsonl_or_object(run / name) for run in (one, two))
        for expected, other in zip(mine, theirs, strict=True):
            numbers = {
                n: v for n, v in expected.items() if isinstance(v, float) and "time" not in n
            }
            for timing in ("step_seconds", "samples_per_second"):
                numbers.pop(timing, None)
            assert {n: other[n] for n in numbers} == pytest.approx(numbers, abs=1e-6, rel=1e-5)
    assert running[1].output(rank=1) == ""
    assert running[0].err() == ""
    assert json.loads((two / "run.json").read_text("utf-8"))["world_size"] == 2
    assert {path.name for path in two.glob("checkpoint-*")} == {"checkpoint-2", "checkpoint-4"}


@pytest.mark.thorough
def test_two_processes_resume_two_passes_with_dropout_to_the_bit(launcher, tmp_path):
    """Each process draws dropout and cutoff of its own, and goes on with that."""
    dropout = {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}
    save_encoder("deberta-v2", tmp_path / "model", **dropout)
    write_task("mrpc", tmp_path / "data", train=32, dev=11)
    model = ("--model_name_or_path", "model", "--task_name", "mrpc", "--data_dir", "data")
    argv = [
        *(*model, "--apply_lora", "--learning_rate", "1e-2", "--num_train_epochs", "2"),
        *("--logging_steps", "1", "--eval_strategy", "epoch", "--save_strategy", "epoch"),
        *("--reg_loss_wgt", "0.5", "--masking_prob", "0.1", "--load_best_model_at_end"),
    ]
    resumed = [*model, "--resume_from_checkpoint", "one/checkpoint-2"]
    for name, given in (("one", argv), ("two", resumed)):
        running = launcher.start([*given, "--output_dir", name], tmp_path, ranks=2, script=GLUE)
        assert not any(running.wait(60)), running.output()
    for name in ("adapter", "last/adapter"):
        one, two = (tmp_path / run / name / "adapter_model.safetensors" for run in ("one", "two"))
        assert one.read_bytes() == two.read_bytes()
    one, two = (read_jsonl(tmp_path / run / "metrics.jsonl") for run in ("one", "two"))
    assert [each.get("loss") for each in one] == [each.get("loss") for each in two]


def test_a_mistake_is_one_line_before_anything_is_loaded(launcher, tmp_path):
    running = launcher.start(["--task_name", "rte", "--lora_rank", "8"], tmp_path, script=GLUE)
    assert running.wait() == [2]
    assert running.output() == "error: unknown option --lora_rank; --lora_r N is the rank\n"


def read_jsonl_or_object(path):
    if path.suffix == ".jsonl":
        return read_jsonl(path)
    return [json.loads(path.read_text(encoding="utf-8"))]
