"""Stages that learn from preferences and rows with pictures, from rows to a saved model."""

import json
from math import log

import datasets
import pytest
import torch
from transformers import AutoModelForImageTextToText

import dschat_lora
from addons.images.training import EXACT, PICTURES, Seeing, numbered, pair_row
from helpers.step1 import metrics

ROWS = [(name, number) for number in range(3) for name in PICTURES]
OPTIONS = {"lora_dim": 4, "max_steps": 2, "max_seq_len": 256, "eval_ratio": 0.2, "dtype": "fp32"}
OPTIONS |= {"preprocessing_num_workers": 1, "quiet": True}


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


def run(stage, seeing, out, data="pairs.jsonl", **options):
    """The directory that a stage writes."""
    options = OPTIONS | {"data_output_path": str(seeing.folder / "cache")} | options
    data = str(seeing.folder / data) if isinstance(data, str) else data
    stage = getattr(dschat_lora, stage)
    return stage(str(seeing.base), data, output_dir=seeing.folder / out, **options).path


def losses(out):
    return [line["loss"] for line in metrics(out) if "loss" in line]


def test_dpo_has_one_reference_known_or_looked_up_and_writes_a_whole_model(tmp_path):
    seeing, options = with_rows("qwen3_vl", tmp_path), {"learning_rate": 1e-3}
    out = run("dpo", seeing, "known", sample_generations=2, merge_adapter=True, **options)
    again = run("dpo", seeing, "again", precompute_ref_log_probs=False, **options)
    torch.testing.assert_close(losses(out), losses(again), rtol=0, atol=EXACT)
    record = json.loads((out / "run.json").read_text("utf-8"))
    told = [answer["prompt"] for answer in record["answers"]]
    assert any("image" in prompt for prompt in told)
    pictured = [row for row in record["token_losses"] if any("image" in t for t in row["tokens"])]
    assert pictured
    assert all(None in row["loss"][1:] for row in pictured)
    merged = AutoModelForImageTextToText.from_pretrained(out / "model")
    assert merged.model.visual.patch_embed.proj.weight.isfinite().all()


def test_kto_and_reward_models_learn_from_pictures(tmp_path):
    seeing = with_rows("gemma3", tmp_path)
    kto = run("dpo", seeing, "kto", "unpaired.jsonl", loss_type="kto")
    scored = run("reward", seeing, "reward", reward_loss="per_token")
    for task, out in ("CAUSAL_LM", kto), ("SEQ_CLS", scored):
        config = out / "adapter" / "adapter_config.json"
        assert json.loads(config.read_text("utf-8"))["task_type"] == task


@pytest.fixture
def documented(tmp_path):
    """A model, and a function that makes a dataset of columns beside one of images."""
    seeing = Seeing("gemma3", tmp_path)

    def dataset(**columns):
        columns["images"] = [[str(tmp_path / f"{name}.png")] for name in ("square", "wide")]
        images = datasets.Sequence(datasets.Image())
        return datasets.Dataset.from_dict(columns).cast_column("images", images)

    return seeing, dataset


def user(text):
    return [{"role": "user", "content": text}]


def assistant(text):
    return [{"role": "assistant", "content": text}]


def first_part(row, text):
    """The messages of a row whose picture stands in front of its text, as TRL puts it."""
    content = [{"type": "image"}, {"type": "text", "text": row[0]["content"]}]
    return [{"role": "user", "content": content}, *assistant(text)]


# As DataCollatorForVisionLanguageModeling's, and trl-lib/llava-instruct-mix of SFT with images.
QUESTIONS = [user("What is this?"), user("What is the color of the car?")]
ANSWERS = ["This is a cat.", "Red."]
SFT = {
    "messages": {
        "messages": [[*q, *assistant(text)] for q, text in zip(QUESTIONS, ANSWERS, strict=True)]
    },
    "prompt-completion": {"prompt": QUESTIONS, "completion": list(map(assistant, ANSWERS))},
}


@pytest.mark.parametrize("form", SFT)
def test_trls_documented_rows_of_sft_have_the_loss_of_stock_transformers(form, documented):
    seeing, dataset = documented
    rows = dataset(**SFT[form])
    out = run("sft", seeing, "sft", rows, eval_ratio=0, per_device_train_batch_size=2)
    seeing.data([pair_row("one")], "pairs")  # for its processor
    stock = AutoModelForImageTextToText.from_pretrained(seeing.base, dtype=torch.float32).eval()
    named = zip(QUESTIONS, ANSWERS, ("square", "wide"), strict=True)
    with torch.no_grad():
        logprobs = [seeing.logprobs(stock, first_part(q, text), [n]) for q, text, n in named]
    assert losses(out)[0] == pytest.approx(-torch.cat(logprobs).mean().item(), abs=EXACT)


def test_trls_documented_rows_of_dpo_train(documented):
    seeing, dataset = documented
    # As DataCollatorForVisionPreference's.
    rows = dataset(
        prompt=[user("What is this?"), user("Describe this image.")],
        chosen=[assistant("This is a cat."), assistant("A beautiful landscape.")],
        rejected=[assistant("This is a dog."), assistant("An urban cityscape.")],
    )
    options = {"eval_ratio": 0, "lora_learning_rate": 1e-2, "num_warmup_steps": 0}
    first, *_, last = losses(run("dpo", seeing, "dpo", rows, num_train_epochs=4, **options))
    assert first == pytest.approx(log(2), abs=1e-6)
    assert last < first
