"""Mistakes in the options of a GLUE run, found before torch is imported."""

import hashlib
import json
import os
import re
import shutil
import sys
from dataclasses import replace

import pytest
import torch

from dschat_lora.addons.glue import train
from dschat_lora.addons.glue import validation as check
from dschat_lora.addons.glue.config import GlueConfig
from dschat_lora.addons.glue.validation import check_glue
from dschat_lora.checkpoint.adapter_config import accept_adapter
from dschat_lora.config.options import parse_config
from dschat_lora.runtime.directory import RunDirectory
from dschat_lora.runtime.resume import options_to_keep
from helpers.glue_toys import save_encoder, write_task


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--fp16", "--bf16"], "--fp16 and --bf16 contradict"),
        (["--lora_r", "4"], "--lora_r has no effect without --apply_lora"),
        (["--warmup_steps", "4", "--warmup_ratio", "0.1"], "contradict each other"),
        (["--apply_lora", "--lora_path", "nowhere"], "--lora_path nowhere does not exist"),
        (["--deepspeed", "none.json"], "--deepspeed none.json cannot be read"),
        (["--no-do_train", "--no-do_eval"], "leave nothing to do"),
        (["--resume_from_checkpoint", "latest"], "there is no run to go on with"),
        (["--resume_from_checkpoint", "x"], "x must be latest, auto, a checkpoint, or the"),
        (["--num_train_epochs", "0"], "--no-do_train evaluates alone"),
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
    assert latest.checkpoint == str(trained / "checkpoint-6")
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


def test_a_run_does_not_delete_the_model_it_starts_from(checked, encoder, tmp_path):
    shutil.copytree(encoder("roberta"), tmp_path / "out" / "model")
    for name in ("metrics.jsonl", "run.json"):
        (tmp_path / "out" / name).write_text("{}", encoding="utf-8")
    out = tmp_path / "out"
    with pytest.raises(ValueError, match="would delete .*/out/model, which the run starts"):
        checked("--model_name_or_path", out, "--output_dir", out, "--overwrite_output_dir")
    beside = ("--model_name_or_path", encoder("roberta"), "--output_dir", out)
    assert checked(*beside, "--overwrite_output_dir").output_dir == str(out)


def test_a_resumed_run_has_the_options_of_the_first(checked, trained):
    config = checked("--resume_from_checkpoint", trained, "--weight_decay", "0.1", task="mnli")
    assert config.checkpoint == str(trained / "checkpoint-6")
    assert (config.apply_lora, config.learning_rate, config.num_train_epochs) == (True, 1e-2, 2)
    assert config.output_dir == str(trained)
    rows = ("--per_device_train_batch_size", "4")
    config = checked("--resume_from_checkpoint", trained / "checkpoint-3", *rows, task="mnli")
    assert config.gradient_accumulation_steps == 2


def test_the_file_of_deepspeed_is_among_the_options_to_go_on_with(checked):
    config = checked("--deepspeed", "configs/ds/zero2.json", "--dry_run")
    kept = options_to_keep(config)
    assert kept["deepspeed"] == "configs/ds/zero2.json"
    assert "dry_run" not in kept


def test_another_run_is_not_resumed_and_all_that_differs_is_said(checked, trained, monkeypatch):
    options = ["--resume_from_checkpoint", trained / "checkpoint-3", "--no-apply_lora"]
    options += ["--lora_r", "4", "--target_modules", "query", "--learning_rate", "1e-2"]
    with pytest.raises(ValueError, match="the run was another one") as refused:
        checked(*options, "--max_steps", "9", "--per_device_train_batch_size", "3", task="mnli")
    assert str(refused.value).partition("another one: ")[2].split("; ") == [
        *("--apply_lora was True, now False", "--lora_r was 8, now 4"),
        *("--max_steps was -1, now 9", "--target_modules was the default, now query"),
        "a step had 8 rows, now --per_device_train_batch_size 3 x --gradient_accumulation_steps 2 "
        "x 1 processes is 6",
    ]
    with pytest.raises(ValueError, match="of the stage glue-mnli, and this is glue-rte"):
        checked("--resume_from_checkpoint", trained)
    monkeypatch.setenv("WORLD_SIZE", "2")
    config = checked("--resume_from_checkpoint", trained, task="mnli")
    assert config.per_device_train_batch_size == 4
    rows = ("--per_device_train_batch_size", "8")
    with pytest.raises(ValueError, match="a step had 8 rows, now .* x 2 processes is 16"):
        checked("--resume_from_checkpoint", trained, *rows, task="mnli")


def test_resuming_into_the_directory_of_a_third_run_is_refused(checked, trained, tmp_path):
    (tmp_path / "metrics.jsonl").write_text("{}\n", encoding="utf-8")
    with pytest.raises(ValueError, match="holds an earlier run"):
        checked(
            *("--resume_from_checkpoint", trained / "checkpoint-6", "--output_dir", tmp_path),
            task="mnli",
        )


@pytest.mark.parametrize(
    ("name", "keep"),
    [
        ("model.safetensors", -1),
        ("trainer_state.json", 9),
        ("optimizer.pt", -9),
        ("scheduler.pt", None),
    ],
)
def test_a_damaged_checkpoint_is_passed_over(checked, trained, tmp_path, name, keep):
    run = tmp_path / "run"
    shutil.copytree(trained, run)
    for step in (6, 3):
        path = run / f"checkpoint-{step}" / name
        if keep is None:
            path.unlink()
        else:
            path.write_bytes(path.read_bytes()[:keep])
        found = "is missing" if keep is None else "has .* bytes, its manifest says"
        with pytest.raises(ValueError, match=f"checkpoint-{step}/{name} {found}"):
            checked("--resume_from_checkpoint", path.parent, task="mnli")
        if step == 6:
            options = ("--output_dir", run, "--resume_from_checkpoint", "latest")
            config = checked(*options, task="mnli")
            assert config.checkpoint == str(run / "checkpoint-3")
            assert config.rejected == (str(run / "checkpoint-6"),)
    with pytest.raises(ValueError, match="no checkpoint in .* is sound: .*-6.*; .*-3"):
        checked("--resume_from_checkpoint", run, task="mnli")


def test_rank_and_alpha_are_those_of_the_adapter_unless_typed(checked, trained, tmp_path):
    adapter = tmp_path / "adapter"
    shutil.copytree(trained / "adapter", adapter)
    path = adapter / "adapter_config.json"
    fields = json.loads(path.read_text("utf-8")) | {"r": 4, "lora_alpha": 12}
    path.write_text(json.dumps(fields), encoding="utf-8")
    accept_adapter(adapter)
    config = checked("--apply_lora", "--lora_path", adapter)
    assert (config.lora_r, config.lora_alpha) == (4, 12)
    typed = checked("--apply_lora", "--lora_path", adapter, "--lora_r", "8")
    assert (typed.lora_r, typed.lora_alpha) == (8, 12)


def test_an_earlier_run_is_cleared_when_asked(glue_run, tmp_path):
    out = glue_run(tmp_path / "out", "rte", "--max_steps", "1", "--save_steps", "1", "--do_predict")
    (out / "mine.txt").write_text("kept", encoding="utf-8")
    glue_run(out, "rte", "--apply_lora", "--no-do_train", "--overwrite_output_dir")
    left = {path.name for path in out.iterdir()}
    results = {"all_results.json", "eval_results.json"}
    assert left == {"mine.txt", "run.json", "metrics.jsonl", "report.html"} | results


def test_the_output_of_a_run_is_gone_on_with(checked, trained, encoder):
    config = checked("--apply_lora", "--model_name_or_path", trained)
    assert config.model_name_or_path == str(encoder("roberta"))
    assert config.lora_path == str(trained / "adapter")
    with pytest.raises(ValueError, match="needs --apply_lora"):
        checked("--model_name_or_path", trained)
    # transformers would load it without its factors.
    with pytest.raises(ValueError, match="make an adapter of it by dschat-lora extract"):
        checked("--apply_lora", "--model_name_or_path", trained / "checkpoint-3")


def test_hash_seed_and_workspace_are_set_before_python_starts_anew(monkeypatch):
    started = []
    monkeypatch.setattr(check.os, "execv", lambda *call: started.append(call))
    monkeypatch.setattr(sys, "orig_argv", ["python", "-X", "dev", "main.py", "--seed", "7"])
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    check.fix_environment()
    argv = [sys.executable, "-X", "dev", "main.py", "--seed", "7"]
    assert started == [(sys.executable, argv)]
    assert os.environ["PYTHONHASHSEED"] == "0"
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    check.fix_environment()
    assert (len(started), os.environ["PYTHONHASHSEED"]) == (1, "7")


def test_an_extra_that_is_not_installed_is_named_with_its_remedy(checked, monkeypatch):
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name: None if name == "sklearn" else name
    )
    with pytest.raises(ValueError, match=r"GLUE needs sklearn: pip install 'dschat_lora\[glue\]'"):
        checked()


def test_a_checkpoint_that_was_being_written_is_passed_over_and_set_aside(
    trained, glue_run, tmp_path, capsys
):
    out = tmp_path / "out"
    shutil.copytree(trained, out)
    (out / "checkpoint-6" / "manifest.json").unlink()  # which comes last
    (out / ".checkpoint-1.deleted").mkdir()
    glue_run(out, "mnli", "--resume_from_checkpoint", "auto")
    assert f"going on from {out}/checkpoint-3, after step 3" in capsys.readouterr().out
    kept = {path.name for path in out.glob("*checkpoint-*")}
    assert kept == {"checkpoint-3", "checkpoint-6", "checkpoint-6.rejected"}
    assert (out / "checkpoint-6" / "manifest.json").is_file()
    files = [run / "adapter" / "adapter_model.safetensors" for run in (out, trained)]
    assert files[0].read_bytes() == files[1].read_bytes()


@pytest.mark.parametrize("same_base", [True, False])
def test_a_run_on_other_rows_is_not_gone_on_with(
    trained, glue_run, tmp_path, capsys, monkeypatch, same_base
):
    options = ("--resume_from_checkpoint", trained / "checkpoint-3", "--max_train_samples", "16")
    with pytest.raises(ValueError, match="--max_train_samples was the default, now 16"):
        glue_run(tmp_path, "mnli", *options)
    (tmp_path / "run").mkdir()
    rows = write_task("mnli", tmp_path / "data", seed=1)
    argv = [*options[:2], "--data_dir", rows, "--output_dir", tmp_path / "run"]
    # The same weights as the run's, in another place.
    base = save_encoder("roberta", tmp_path / "base", initializer_range=0.3 if same_base else 0.2)
    argv += ["--model_name_or_path", base, "--task_name", "mnli"]
    config = check_glue(parse_config(GlueConfig, [str(each) for each in argv]))
    monkeypatch.setattr(train, "world_size", lambda: 2)
    with pytest.raises(ValueError, match="the run was another one") as refused:
        train.run_glue(config)
    said = str(refused.value)
    assert ("the base model's weights" in said) is not same_base
    assert re.search(r"the training data \(was .* they differ from samples 1 to 64 on\)", said)
    split = train.read_splits(config)["train"]  # a checkpoint of 0.3.0 has the digest of its text
    text = hashlib.blake2b(repr(split.examples).encode(), digest_size=16).hexdigest()
    assert train._data_identity(split).difference(text) is None
    assert said.endswith("the rows of a step (was 8, now 16)")


def test_the_trainer_too_does_without_cudnns_attention(glue_run, tmp_path, monkeypatch):
    def stop(seed):
        raise RuntimeError("seen enough")

    monkeypatch.setattr(train, "set_seed", stop)
    before = torch.backends.cuda.cudnn_sdp_enabled()
    try:
        torch.backends.cuda.enable_cudnn_sdp(True)
        with pytest.raises(RuntimeError, match="seen enough"):
            glue_run(tmp_path, "mnli")
        assert not torch.backends.cuda.cudnn_sdp_enabled()
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


def test_auto_begins_where_there_is_nothing_to_go_on_with(checked, trained, tmp_path):
    options = ("--resume_from_checkpoint", "auto", "--output_dir")
    assert checked(*options, tmp_path / "none").checkpoint == ""
    assert checked(*options, trained, task="mnli").checkpoint == str(trained / "checkpoint-6")


def test_a_fresh_start_keeps_unsound_checkpoints(trained, tmp_path):
    shutil.copytree(trained / "checkpoint-3", tmp_path / "checkpoint-3")
    (tmp_path / "checkpoint-3" / "manifest.json").unlink()
    (tmp_path / "checkpoint-9.abandoned").mkdir()
    (tmp_path / "run.json").write_text("{}")
    RunDirectory.restart(str(tmp_path), name="glue")
    left = {path.name for path in tmp_path.iterdir()}
    assert left >= {"checkpoint-3.rejected", "checkpoint-9.abandoned"}


def test_other_ranks_take_the_first_ones_checkpoint(checked, trained, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    waiting = checked("--resume_from_checkpoint", trained, "--lora_path", trained, task="mnli")
    assert (waiting.checkpoint, waiting.apply_lora) == (None, False)
    told = replace(waiting, checkpoint=str(trained / "checkpoint-3"), apply_lora=True)
    assert check_glue(told).checkpoint == told.checkpoint
