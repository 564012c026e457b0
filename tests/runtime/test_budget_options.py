"""``--tokens_per_device``: what goes with it, and what a resumed run keeps of it."""

import json
from types import SimpleNamespace

import pytest

from dschat_lora.config.options import parse_config
from dschat_lora.config.stages import DpoStageConfig, RewardStageConfig, SupervisedConfig
from dschat_lora.runtime import memory, roles
from dschat_lora.runtime.resume import check_identity, settle
from dschat_lora.runtime.roles import OneRole, trained_models
from dschat_lora.supervised.validation import check_supervised
from helpers.step1 import checked, parsed, write_checkpoint

pytestmark = pytest.mark.usefixtures("own_directory", "first_rows")


def error_of(*argv, check=checked):
    with pytest.raises(ValueError) as error:  # noqa: PT011
        check(*argv)
    return str(error.value)


def test_deepspeed_is_told_of_one_row_a_micro_batch():
    batch = checked("--tokens_per_device", 1024, "--gradient_accumulation_steps", 3).batch
    assert (batch.tokens_per_device, batch.per_device_train_batch_size) == (1024, 1)
    assert batch.gradient_accumulation_steps == 3
    assert checked().batch.per_device_train_batch_size == 16


@pytest.mark.parametrize(
    ("config", "longest"),
    [(SupervisedConfig, 128), (RewardStageConfig, 256), (DpoStageConfig, 256)],
)
def test_a_micro_batch_that_holds_the_longest_row_is_taken(config, longest):
    argv = ["--tokens_per_device", str(longest), "--max_seq_len", "128"]
    assert check_supervised(parse_config(config, argv))


@pytest.mark.parametrize("field", ["train_micro_batch_size_per_gpu", "train_batch_size"])
def test_a_deepspeed_json_leaves_the_number_of_rows_open(tmp_path, field):
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({field: "auto", "gradient_accumulation_steps": 2}))
    batch = checked("--tokens_per_device", 1024, "--deepspeed_config", path).batch
    assert batch.gradient_accumulation_steps == 2


def save(tmp_path, *argv):
    """A checkpoint as a run of one process left it."""
    config = checked(*argv)
    batch = config.batch
    rows = batch.per_device_train_batch_size * batch.gradient_accumulation_steps
    identity = {"rows_per_step": rows, "tokens_per_device": batch.tokens_per_device or None}
    return write_checkpoint(tmp_path / "out", config, identity)


def resumed(*argv):
    config = settle(parsed("--resume_from_checkpoint", "out", *argv), stage="sft")
    return check_supervised(config)


TWO_OF_1024 = ("--tokens_per_device", 1024, "--gradient_accumulation_steps", 2)


def test_a_resumed_step_keeps_its_micro_batches(tmp_path, monkeypatch, capsys):
    save(tmp_path, *TWO_OF_1024)
    assert resumed().batch == checked(*TWO_OF_1024).batch
    monkeypatch.setenv("WORLD_SIZE", "2")
    batch = resumed().batch
    assert (batch.tokens_per_device, batch.gradient_accumulation_steps) == (1024, 1)
    said = capsys.readouterr().out
    assert "--gradient_accumulation_steps 1: a step keeps 2 micro-batches" in said
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert error_of(check=resumed).endswith(
        "a step had 2 micro-batches, now --gradient_accumulation_steps 1 x 3 processes is 3"
    )


@pytest.mark.parametrize(
    ("then", "now", "message"),
    [
        (
            TWO_OF_1024,
            ("--tokens_per_device", 512),
            "the run differs: --tokens_per_device was 1024, now 512",
        ),
        (
            (),
            ("--tokens_per_device", 512, "--gradient_accumulation_steps", 2),
            "the run differs: --tokens_per_device was 0, now 512",
        ),
        (
            TWO_OF_1024,
            ("--per_device_train_batch_size", 2),
            "both set the size of a micro-batch; give one",
        ),
    ],
    ids=["another number", "rows before", "rows now"],
)
def test_a_resumed_run_counts_as_before(tmp_path, then, now, message):
    save(tmp_path, *then)
    # Nothing else is said to differ, in rows or in micro-batches.
    assert error_of(*now, check=resumed).endswith(message)


def test_tokens_are_part_of_what_a_run_is(tmp_path):
    checkpoint = save(tmp_path, *TWO_OF_1024)
    check_identity(checkpoint, {"rows_per_step": 2, "tokens_per_device": 1024})
    with pytest.raises(ValueError, match=r"--tokens_per_device \(was 1024, now None\)"):
        check_identity(checkpoint, {"rows_per_step": 2})


def test_the_memory_estimate_is_that_of_the_budget(monkeypatch):
    asked = []
    monkeypatch.setattr(memory, "estimate_memory", lambda model, **options: asked.append(options))
    monkeypatch.setattr(
        memory, "Backbone", lambda model: SimpleNamespace(mask_bytes=lambda *_, **__: 3)
    )
    config = checked("--tokens_per_device", 1300, "--max_seq_len", 512)
    said = {"reuse_distance": 7, "bucket_size": 5}
    settings = SimpleNamespace(
        torch_dtype=None, offload=False, accumulation_steps=1, zero_stage=0, gathering=lambda: said
    )
    monkeypatch.setattr(roles, "engine_settings", lambda *_, **__: settings)
    one = OneRole(SimpleNamespace(model=None))
    trained_models(config, one)["model"].estimated()
    assert (asked[0]["rows"], asked[0]["length"]) == (3, 433)
    assert (said | {"mask_bytes": 3}).items() <= asked[0].items()
    rows = checked("--per_device_train_batch_size", 16, "--max_seq_len", 128)
    trained_models(rows, one)["model"].estimated()
    assert (asked[1]["rows"], asked[1]["length"]) == (16, 128)
