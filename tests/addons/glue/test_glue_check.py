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


def test_an_earlier_run_is_neither_overwritten_nor_mistaken(checked, trained, encoder, tmp_path):
    with pytest.raises(ValueError, match=r"holds an earlier run \(metrics.jsonl, adapter, .*run"):
        checked("--output_dir", trained)
    over = ("--output_dir", trained, "--overwrite_output_dir")
    with pytest.raises(ValueError, match="would delete"):
        checked(*over, "--apply_lora", "--lora_path", trained)
    (tmp_path / "checkpoint-1").mkdir()
    with pytest.raises(ValueError, match="no run wrote it"):
        checked("--output_dir", tmp_path, "--overwrite_output_dir")
    out = tmp_path / "out"
    shutil.copytree(encoder("roberta"), out / "model")
    for name in ("metrics.jsonl", "run.json"):
        (out / name).write_text("{}", encoding="utf-8")
    over = ("--output_dir", out, "--overwrite_output_dir", "--model_name_or_path")
    with pytest.raises(ValueError, match="would delete .*/out/model, which the run starts"):
        checked(*over, out)
    assert checked(*over, encoder("roberta")).output_dir == str(out)


def test_a_resumed_run_has_the_options_of_the_first(checked, trained, tmp_path):
    config = checked("--resume_from_checkpoint", trained, "--weight_decay", "0.1", task="mnli")
    assert config.checkpoint == str(trained / "checkpoint-6")
    assert (config.apply_lora, config.learning_rate, config.num_train_epochs) == (True, 1e-2, 2)
    assert config.output_dir == str(trained)
    rows = ("--per_device_train_batch_size", "4")
    config = checked("--resume_from_checkpoint", trained / "checkpoint-3", *rows, task="mnli")
    assert config.gradient_accumulation_steps == 2
    for name in ("latest", "auto"):
        options = ("--output_dir", trained, "--resume_from_checkpoint", name)
        assert checked(*options, task="mnli").checkpoint == str(trained / "checkpoint-6")
    begins = checked("--output_dir", tmp_path / "none", "--resume_from_checkpoint", "auto")
    assert begins.checkpoint == ""
    kept = options_to_keep(checked("--deepspeed", "configs/ds/zero2.json", "--dry_run"))
    assert kept["deepspeed"] == "configs/ds/zero2.json"
    assert "dry_run" not in kept


def test_another_run_is_not_resumed_and_all_that_differs_is_said(
    checked, trained, tmp_path, monkeypatch
):
    options = ["--resume_from_checkpoint", trained / "checkpoint-3", "--no-apply_lora"]
    options += ["--lora_r", "4", "--target_modules", "query", "--learning_rate", "1e-2"]
    with pytest.raises(ValueError, match="the run differs") as refused:
        checked(*options, "--max_steps", "9", "--per_device_train_batch_size", "3", task="mnli")
    assert str(refused.value).partition("the run differs: ")[2].split("; ") == [
        *("--apply_lora was True, now False", "--lora_r was 8, now 4"),
        *("--max_steps was -1, now 9", "--target_modules was the default, now query"),
        "a step had 8 rows, now --per_device_train_batch_size 3 x --gradient_accumulation_steps 2 "
        "x 1 processes is 6",
    ]
    resumed = ("--resume_from_checkpoint", trained)
    with pytest.raises(ValueError, match="of the stage glue-mnli, not glue-rte"):
        checked(*resumed)
    (tmp_path / "metrics.jsonl").write_text("{}\n", encoding="utf-8")
    with pytest.raises(ValueError, match="holds an earlier run"):
        checked(*resumed, "--output_dir", tmp_path, task="mnli")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert checked(*resumed, task="mnli").per_device_train_batch_size == 4
    with pytest.raises(ValueError, match="a step had 8 rows, now .* x 2 processes is 16"):
        checked(*resumed, "--per_device_train_batch_size", "8", task="mnli")


@pytest.mark.parametrize(
    ("name", "keep"), [("model.safetensors", -1), ("trainer_state.json", 9), ("scheduler.pt", None)]
)
def test_a_damaged_checkpoint_is_passed_over(checked, trained, tmp_path, name, keep):
    run = tmp_path / "run"
    shutil.copytree(trained, run)
    reason = "is missing" if keep is None else "has .* bytes, its manifest says"
    for step in (6, 3):
        path = run / f"checkpoint-{step}" / name
        content = path.read_bytes()
        path.unlink()
        if keep is not None:
            path.write_bytes(content[:keep])
        with pytest.raises(ValueError, match=f"checkpoint-{step}/{name} {reason}"):
            checked("--resume_from_checkpoint", path.parent, task="mnli")
        if step == 6:
            options = ("--output_dir", run, "--resume_from_checkpoint", "latest")
            config = checked(*options, task="mnli")
            assert config.checkpoint == str(run / "checkpoint-3")
            assert config.rejected == (str(run / "checkpoint-6"),)
    with pytest.raises(ValueError, match="no checkpoint in .* is valid: .*-6.*; .*-3"):
        checked("--resume_from_checkpoint", run, task="mnli")


def test_the_output_of_a_run_is_gone_on_with_at_its_rank_and_alpha(
    checked, trained, encoder, tmp_path
):
    config = checked("--apply_lora", "--model_name_or_path", trained)
    assert config.model_name_or_path == str(encoder("roberta"))
    assert config.lora_path == str(trained / "adapter")
    with pytest.raises(ValueError, match="needs --apply_lora"):
        checked("--model_name_or_path", trained)
    # transformers would load it without its factors.
    with pytest.raises(ValueError, match="with dschat-lora extract"):
        checked("--apply_lora", "--model_name_or_path", trained / "checkpoint-3")
    adapter = tmp_path / "adapter"
    shutil.copytree(trained / "adapter", adapter)
    path = adapter / "adapter_config.json"
    fields = json.loads(path.read_text("utf-8")) | {"r": 4, "lora_alpha": 12}
    path.write_text(json.dumps(fields), encoding="utf-8")
    accept_adapter(adapter)
    for typed, r in (((), 4), (("--lora_r", "8"), 8)):
        config = checked("--apply_lora", "--lora_path", adapter, *typed)
        assert (config.lora_r, config.lora_alpha) == (r, 12)


def test_an_earlier_run_is_cleared_when_asked(glue_run, tmp_path):
    out = glue_run(tmp_path / "out", "rte", "--max_steps", "1", "--save_steps", "1", "--do_predict")
    (out / "mine.txt").write_text("kept", encoding="utf-8")
    glue_run(out, "rte", "--apply_lora", "--no-do_train", "--overwrite_output_dir")
    left = {path.name for path in out.iterdir()}
    results = {"all_results.json", "eval_results.json"}
    assert left == {"mine.txt", "run.json", "metrics.jsonl", "report.html"} | results


def test_hash_seed_and_workspace_are_set_before_python_starts_anew(monkeypatch):
    started = []
    monkeypatch.setattr(check.os, "execv", lambda *call: started.append(call))
    monkeypatch.setattr(sys, "orig_argv", ["python", "-X", "dev", "main.py", "--seed", "7"])
    for name in ("PYTHONHASHSEED", "CUBLAS_WORKSPACE_CONFIG"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    check.fix_environment()
    assert started == [(sys.executable, [sys.executable, "-X", "dev", "main.py", "--seed", "7"])]
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
    assert f"resuming from {out}/checkpoint-3, after step 3" in capsys.readouterr().out
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
    with pytest.raises(ValueError, match="the run differs") as refused:
        train.run_glue(config)
    said = str(refused.value)
    assert ("the base model's weights" in said) is not same_base
    assert re.search(r"the training data \(was .* difference is in samples 1 to \d+\)", said)
    split = train.read_splits(config)["train"]  # a checkpoint of 0.3.0 has the digest of its text
    text = hashlib.blake2b(repr(split.examples).encode(), digest_size=16).hexdigest()
    assert train._data_identity(split).difference(text) is None
    assert said.endswith("the rows of a step (was 8, now 16)")


def test_the_trainer_too_does_without_cudnns_attention(glue_run, tmp_path, monkeypatch):
    monkeypatch.setattr(train, "set_seed", lambda seed: 1 / 0)  # just behind that
    before = torch.backends.cuda.cudnn_sdp_enabled()
    try:
        torch.backends.cuda.enable_cudnn_sdp(True)
        with pytest.raises(ZeroDivisionError):
            glue_run(tmp_path, "mnli")
        assert not torch.backends.cuda.cudnn_sdp_enabled()
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


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
