"""Checkpoints of an attacker who knows the code: none of theirs runs, nothing else is written."""

import json
import pickle
from pathlib import Path

import pytest
import torch

from dschat_lora.addons.glue.callback import check_pickles
from dschat_lora.addons.glue.config import GlueConfig
from dschat_lora.checkpoint.manifest import write_manifest
from dschat_lora.config.options import flatten, parse_config
from dschat_lora.runtime.resume import settle
from helpers.attacks import Payload, elsewhere, message

__all__ = ["elsewhere"]
pytestmark = pytest.mark.usefixtures("elsewhere")


def glue_checkpoint(tmp_path, **options):
    directory = tmp_path / "out" / "checkpoint-1"
    (directory / "global_step1").mkdir(parents=True)
    config = parse_config(GlueConfig, ["--task_name", "mrpc", "--model_name_or_path", "m"])
    identity = {"stage": config.stage, "rows_per_step": 8}
    state = {"step": 1, "identity": identity, "options": options, "config": flatten(config)}
    (directory / "state.json").write_text(json.dumps(state))
    write_manifest(directory, kind="checkpoint")
    return directory


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"trust_remote_code": True}, "--trust_remote_code, which runs code"),
        ({"deepspeed": "zero.json"}, "DeepSpeed writes files (csv_monitor)"),
    ],
)
def test_a_glue_checkpoint_runs_no_code_and_writes_nowhere_else(tmp_path, options, words):
    Path("zero.json").write_text('{"csv_monitor": {"enabled": true, "output_path": "x"}}')
    path = glue_checkpoint(tmp_path, **options)
    resumed = ["--resume_from_checkpoint", str(path), "--model_name_or_path", "m"]
    config = parse_config(GlueConfig, [*resumed, "--task_name", "mrpc"])
    assert words in message(lambda: settle(config, stage=config.stage))


def test_pickles_of_deepspeed_are_searched_before_they_are_read(tmp_path):
    path = glue_checkpoint(tmp_path)
    torch.save({"module": Payload()}, path / "global_step1" / "mp_rank_00_model_states.pt")
    assert "would call posix.system" in message(check_pickles, path)


def test_old_pickles_of_deepspeed_are_refused(tmp_path):
    path = glue_checkpoint(tmp_path)
    (path / "global_step1" / "a.pt").write_bytes(pickle.dumps(Payload()))
    assert "not a torch file" in message(check_pickles, path)
