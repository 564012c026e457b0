"""Commands that learn from preferences with pictures, from rows to a saved model."""

import json

import pytest
import torch
from transformers import AutoModelForImageTextToText

from addons.images.training import PICTURES, Seeing, pair_row
from helpers.launcher import ROOT
from helpers.step1 import metrics

ROWS = [(name, number) for number in range(3) for name in PICTURES]


def numbered(row, number):
    """The row as another one, which asks for its number too."""
    return json.loads(json.dumps(row).replace("Which is", f"Number {number}: which is"))


def with_rows(kind, folder):
    """A tiny model beside its rows."""
    seeing = Seeing(kind, folder)
    rows = [numbered(pair_row(name), number) for name, number in ROWS]
    (seeing.folder / "pairs.jsonl").write_text("\n".join(map(json.dumps, rows)), "utf-8")
    for number, row in enumerate(rows):
        row["completion"] = row.pop("rejected")
        good = row.pop("chosen")
        row |= {"label": number % 2 == 0} | ({"completion": good} if number % 2 == 0 else {})
    (seeing.folder / "unpaired.jsonl").write_text("\n".join(map(json.dumps, rows)), "utf-8")
    return seeing


def start(launcher, seeing, stage, *options, data="pairs"):
    """A running command, and its output directory."""
    out = seeing.folder / f"out-{len(list(seeing.folder.glob('out-*')))}"
    out.mkdir()
    argv = ["--model_name_or_path", seeing.base, "--data_path", seeing.folder / f"{data}.jsonl"]
    argv += ["--data_output_path", seeing.folder / "cache", "--output_dir", out]
    argv += ["--lora_dim", 4, "--max_steps", 2, "--max_seq_len", 256, "--eval_ratio", 0.2, *options]
    argv += ["--preprocessing_num_workers", 1, "--dtype", "fp32"]
    return launcher.start(argv, seeing.folder, script=ROOT / "training" / stage / "main.py"), out


def finished(running, out):
    assert running.wait() == [0], running.err()[-2000:]
    return out


def losses(out):
    return [line["loss"] for line in metrics(out) if "loss" in line]


def test_dpo_has_one_reference_known_or_looked_up_and_writes_a_whole_model(launcher, tmp_path):
    seeing = with_rows("qwen3_vl", tmp_path)
    known, again = (
        start(launcher, seeing, "step2_dpo", "--learning_rate", 1e-3, *options)
        for options in (
            ("--sample_generations", 2, "--merge_adapter"),
            ("--no-precompute_ref_log_probs",),
        )
    )
    out = finished(*known)
    torch.testing.assert_close(losses(out), losses(finished(*again)), rtol=0, atol=1e-5)
    record = json.loads((out / "run.json").read_text("utf-8"))
    told = [answer["prompt"] for answer in record["answers"]]
    assert any("image" in prompt for prompt in told)
    pictured = [row for row in record["token_losses"] if any("image" in t for t in row["tokens"])]
    assert pictured
    assert all(None in row["loss"][1:] for row in pictured)
    merged = AutoModelForImageTextToText.from_pretrained(out / "model")
    assert merged.model.visual.patch_embed.proj.weight.isfinite().all()


@pytest.mark.thorough
def test_kto_and_reward_models_learn_from_pictures(launcher, tmp_path):
    seeing = with_rows("gemma3", tmp_path)
    options = ("--loss_type", "kto"), ("--reward_loss", "per_token")
    runs = [
        start(launcher, seeing, "step2_dpo", *options[0], data="unpaired"),
        start(launcher, seeing, "step2_reward", *options[1]),
    ]
    for task, (running, out) in zip(("CAUSAL_LM", "SEQ_CLS"), runs, strict=True):
        config = finished(running, out) / "adapter" / "adapter_config.json"
        assert json.loads(config.read_text("utf-8"))["task_type"] == task
