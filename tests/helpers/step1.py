"""Step 1 as a user starts it: its checks in this process, or the whole command in another."""

import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from dschat_lora.assets import BUNDLED_MODEL
from dschat_lora.checkpoint.history import step_directory
from dschat_lora.checkpoint.manifest import write_manifest
from dschat_lora.config.options import flatten, parse_config
from dschat_lora.config.stages import SupervisedConfig
from dschat_lora.report.rollout_file import FILE, members
from dschat_lora.runtime.resume import options_to_keep
from dschat_lora.runtime.stage_main import run_main
from dschat_lora.supervised.validation import check_supervised

ROOT = Path(__file__).resolve().parents[2]


def parsed(*argv):
    """The config of a command line, before any check between options."""
    return parse_config(SupervisedConfig, [str(each) for each in argv])


def checked(*argv):
    """The config of a command line as ``main`` receives it."""
    return check_supervised(parsed(*argv))


@pytest.fixture
def refused(capsys, monkeypatch):
    """``refused(*argv)``: the one line a wrong command line leaves on stderr."""

    def call(*argv):
        monkeypatch.setattr(sys, "argv", ["main.py", *(str(each) for each in argv)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            run_main(SupervisedConfig, check_supervised, lambda config: None)
        out, err = capsys.readouterr()
        assert ended.value.code == 2
        assert out == ""
        assert err.startswith("error: ")
        assert err.count("\n") == 1, err
        return err.removeprefix("error: ").removesuffix("\n")

    return call


@dataclass(frozen=True)
class Finished:
    """How a command ended."""

    code: int
    out: str
    err: str
    seconds: float


def run(command, cwd, *, timeout=300, **environment):
    """Run a command in ``cwd``, which sees the repository's scripts under ``training/``."""
    link = Path(cwd) / "training"
    if not link.exists():
        link.symlink_to(ROOT / "training")
    # One thread, as in the commands of Launcher.
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **environment}
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_SIZE"):
        env.pop(name, None)
    start = time.monotonic()
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=env,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    return Finished(done.returncode, done.stdout, done.stderr, time.monotonic() - start)


def python(*argv):
    """``python training/step1_sft/main.py ...``"""
    return [sys.executable, "training/step1_sft/main.py", *argv]


def deepspeed(*argv, launcher=()):
    """``deepspeed LAUNCHER... training/step1_sft/main.py ...``"""
    on_checkpoint = Path(sys.executable).with_name("deepspeed")
    program = on_checkpoint if on_checkpoint.exists() else shutil.which("deepspeed")
    return [program, *launcher, "training/step1_sft/main.py", *argv]


def rollouts(directory):
    """The responses that a run of step 3 kept."""
    texts = members((directory / FILE).read_bytes())
    return [json.loads(line) for text, _ in texts for line in text.splitlines()]


def metrics(directory, kind=None):
    """The lines of ``metrics.jsonl``, of one kind or all."""
    text = (Path(directory) / "metrics.jsonl").read_text(encoding="utf-8")
    lines = [json.loads(line) for line in text.splitlines()]
    return [line for line in lines if kind in (None, line["kind"])]


def write_jsonl(path, rows):
    """Rows, one JSON object a line; returns the path."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def write_checkpoint(run, config, identity, *, step=5):
    """The checkpoint of a run by this config, without tensors; returns its directory."""
    directory = step_directory(Path(run), step)
    directory.mkdir(parents=True)
    state = {"step": step, "identity": identity, "options": options_to_keep(config)}
    state["config"] = flatten(config)
    (directory / "state.json").write_text(json.dumps(state))
    write_manifest(directory, kind="checkpoint")
    (Path(run) / "run.json").write_text("{}")
    (Path(run) / "metrics.jsonl").write_text("{}\n")
    return directory


def write_adapter_config(directory, **changes):
    """An adapter directory on the bundled model, with weights of no use."""
    directory.mkdir(parents=True, exist_ok=True)
    fields = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(BUNDLED_MODEL),
        "r": 4,
        "lora_alpha": 32,
        "target_modules": ["q_proj"],
        **changes,
    }
    (directory / "adapter_config.json").write_text(json.dumps(fields), encoding="utf-8")
    empty = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    saved = {
        f"base_model.model.{each}.weight": empty for each in changes.get("modules_to_save", ())
    }
    header = json.dumps(saved).encode()
    weights = len(header).to_bytes(8, "little") + header
    (directory / "adapter_model.safetensors").write_bytes(weights)
    return directory
