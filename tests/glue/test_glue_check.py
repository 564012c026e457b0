"""Mistakes in the options of a GLUE run, found before torch is imported."""

import json
import os
import sys

import pytest

from dschat_lora.cli.options import parse_config
from dschat_lora.glue import check
from dschat_lora.glue.check import check_glue
from dschat_lora.glue.config import GlueConfig


@pytest.fixture
def checked(encoder, task_files):
    def call(*options, task="rte"):
        argv = ["--model_name_or_path", encoder("roberta"), "--task_name", task]
        argv += ["--data_dir", task_files(task), *options]
        return check_glue(parse_config(GlueConfig, [str(each) for each in argv]))

    return call


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--fp16", "--bf16"], "--fp16 and --bf16 contradict"),
        (["--lora_r", "4"], "--lora_r has no effect without --apply_lora"),
        (["--warmup_steps", "4", "--warmup_ratio", "0.1"], "contradict each other"),
        (["--apply_lora", "--lora_path", "nowhere"], "--lora_path nowhere does not exist"),
        (["--deepspeed", "none.json"], "--deepspeed none.json cannot be read"),
        (["--no-do_train", "--no-do_eval"], "leave nothing to do"),
        (["--resume_from_checkpoint", "latest"], "needs --output_dir"),
        (["--resume_from_checkpoint", "x"], "x holds no trainer_state.json"),
        (["--seed", "4294967296"], r"--seed must be in \[0, 2\*\*32\)"),
        (["--classifier_dropout", "1"], r"--classifier_dropout must be in \[0, 1\)"),
        (["--task_name", "snli"], "task_name: must be one of cola, sst2"),
        (["--max_sequence_length", "8"], "did you mean --max_seq_length"),
    ],
)
def test_a_mistake_is_named(checked, options, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=message):
        checked(*options)


def test_the_original_spellings_are_taken(checked):
    config = checked("--evaluation_strategy", "epoch", "--cls_dropout", "0.15")
    assert (config.eval_strategy, config.classifier_dropout) == ("epoch", 0.15)


def test_zero_3_and_evaluation_by_deepspeed_are_refused(checked, tmp_path):
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"zero_optimization": {"stage": 3}}), encoding="utf-8")
    with pytest.raises(ValueError, match="ZeRO stage 3"):
        checked("--deepspeed", path)
    path.write_text("{}", encoding="utf-8")
    with pytest.raises(ValueError, match="--deepspeed is for training"):
        checked("--deepspeed", path, "--no-do_train")


def test_an_earlier_run_is_neither_overwritten_nor_mistaken(checked, trained, tmp_path):
    with pytest.raises(ValueError, match=r"holds an earlier run \(metrics.jsonl, adapter, .*run"):
        checked("--output_dir", trained)
    latest = checked("--output_dir", trained, "--resume_from_checkpoint", "latest", task="mnli")
    assert latest.resume_from_checkpoint == str(trained / "checkpoint-6")
    with pytest.raises(ValueError, match="would delete"):
        checked(
            "--output_dir",
            trained,
            "--overwrite_output_dir",
            "--apply_lora",
            "--lora_path",
            trained,
        )
    (tmp_path / "checkpoint-1").mkdir()
    with pytest.raises(ValueError, match="no run wrote that"):
        checked("--output_dir", tmp_path, "--overwrite_output_dir")


def test_an_earlier_run_is_cleared_when_asked(glue_run, tmp_path):
    out = glue_run(tmp_path / "out", "rte", "--max_steps", "1", "--save_steps", "1", "--do_predict")
    (out / "mine.txt").write_text("kept", encoding="utf-8")
    glue_run(out, "rte", "--apply_lora", "--no-do_train", "--overwrite_output_dir")
    left = {path.name for path in out.iterdir()}
    results = {"all_results.json", "eval_results.json"}
    assert left == {"mine.txt", "run.json", "metrics.jsonl"} | results


def test_the_output_of_a_run_is_gone_on_with(checked, trained, encoder):
    config = checked("--apply_lora", "--model_name_or_path", trained)
    assert config.model_name_or_path == str(encoder("roberta"))
    assert config.lora_path == str(trained / "adapter")
    with pytest.raises(ValueError, match="needs --apply_lora"):
        checked("--model_name_or_path", trained)


def test_hash_seed_and_workspace_are_set_before_python_starts_anew(monkeypatch):
    started = []
    monkeypatch.setattr(check.os, "execv", lambda *call: started.append(call))
    monkeypatch.setattr(sys, "orig_argv", ["python", "-X", "dev", "main.py", "--seed", "7"])
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    check.fix_environment(7)
    argv = [sys.executable, "-X", "dev", "main.py", "--seed", "7"]
    assert started == [(sys.executable, argv)]
    assert os.environ["PYTHONHASHSEED"] == "7"
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    check.fix_environment(8)
    assert len(started) == 1
    assert os.environ["PYTHONHASHSEED"] == "7"
