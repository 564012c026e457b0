"""Ten mistakes that people make: each one line, within seconds, before torch is loaded."""

import json
import os
import shutil
import socket
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from dschat_lora.assets import BUNDLED_MODEL
from helpers.addons import has_verb
from helpers.step1 import ROOT, write_adapter_config, write_jsonl

MAX_SECONDS = 5.0
LONG = "What is a very long question? " * 400

# command line -> what its line must name: what was given, and what would do
MISTAKES = {
    "a misspelt option": ("sft --lora_dm 8", ["--lora_dm", "did you mean --lora_dim?"]),
    "a wrong column": (
        "sft --data_path columns.jsonl",
        ["columns.jsonl:1", "['question', 'reply']", "--columns prompt=COLUMN"],
    ),
    "a missing file": ("sft --data_path mien.jsonl", ["--data_path mien.jsonl", "mine.jsonl"]),
    "an empty file": ("reward --data_path empty.jsonl", ["--data_path empty.jsonl", "no rows"]),
    "prompts that are all too long": (
        "rlhf --reward_function dschat_lora.world:reward --data_path long.jsonl",
        ["--max_prompt_seq_len 256", "none of the 3 prompts", "--overlong truncate"],
    ),
    "questions that are all too long": (
        "sft --data_path chats.jsonl",
        ["--max_seq_len 512", "none of the 3 prompts", "raise it"],
    ),
    "another tokenizer's reward model": (
        "rlhf --critic_model_name_or_path judge",
        ["--critic_model_name_or_path judge", "another tokenizer", "a base of that family"],
    ),
    "another base's adapter": (
        "sft --model_name_or_path adapter",
        ["adapter", "has 96 inputs", "128 x 128", "base_model_name_or_path"],
    ),
    "parts that do not divide": (
        "sft --lora_dim 4 --num_gpus 3 --tensor_parallel_size 3",
        ["--tensor_parallel_size 3", "4 attention heads", "1, 2, 4 would"],
    ),
    "no space": (
        "sft --output_dir full/out",
        ["--output_dir full/out", "0.1 MiB free", "1.0 MiB", "another disk"],
    ),
}
if has_verb("serve"):
    MISTAKES["a port in use"] = (
        "serve base --port {port}",
        ["--port {port}", "in use", "--port 0"],
    )
# One process has them all, as each command line begins: with options, before what is heavy.
PROGRAM = """
import contextlib, io, json, shutil, sys, time
started = time.monotonic()
usage = shutil.disk_usage
full = {"free": 100_000}
shutil.disk_usage = lambda path: usage(path)._replace(**full if "full" in str(path) else {})
from dschat_lora.__main__ import main
for line in sys.stdin.read().splitlines():
    sys.argv, err, out = ["dschat-lora", *line.split()], io.StringIO(), io.StringIO()
    with contextlib.redirect_stderr(err), contextlib.redirect_stdout(out):
        try:
            code = main()
        except SystemExit as end:
            code = end.code
    seconds = time.monotonic() - started
    outcome = {"code": code, "out": out.getvalue(), "err": err.getvalue(), "seconds": seconds}
    print(json.dumps(outcome | {"loaded": "torch" in sys.modules}))
    started = time.monotonic()
"""


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    home = tmp_path_factory.mktemp("mistakes")
    write_jsonl(home / "mine.jsonl", [{"prompt": "a", "completion": " b"}])
    write_jsonl(home / "columns.jsonl", [{"question": "a", "reply": "b"}])
    write_jsonl(home / "long.jsonl", [{"prompt": LONG}] * 3)
    write_jsonl(home / "chats.jsonl", [{"question": LONG, "answer": "Yes."}] * 3)
    (home / "empty.jsonl").write_text("")
    (home / "full").mkdir()
    judge = home / "judge"
    judge.mkdir()
    config = json.loads((BUNDLED_MODEL / "config.json").read_text())
    config["architectures"] = ["OPTForSequenceClassification"]
    (judge / "config.json").write_text(json.dumps(config))
    tokens = json.loads((BUNDLED_MODEL / "tokenizer.json").read_text())
    tokens["model"]["vocab"].popitem()
    (judge / "tokenizer.json").write_text(json.dumps(tokens))
    shutil.copy(BUNDLED_MODEL / "tokenizer_config.json", judge)
    write_adapter_config(home / "adapter", r=4, target_modules=["q_proj"])
    layer = "base_model.model.model.decoder.layers.0.self_attn.q_proj"
    factors = {"A": torch.zeros(4, 96), "B": torch.zeros(96, 4)}
    save_file(
        {f"{layer}.lora_{name}.weight": each for name, each in factors.items()},
        home / "adapter" / "adapter_model.safetensors",
    )
    return home


@pytest.fixture(scope="module")
def ended(workplace):
    """How each mistake ended, by its name."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        lines = "\n".join(line.format(port=port) for line, _ in MISTAKES.values())
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM],
            input=lines,
            cwd=workplace,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
    assert done.stderr == ""
    outcomes = [SimpleNamespace(**json.loads(line), port=port) for line in done.stdout.splitlines()]
    return dict(zip(MISTAKES, outcomes, strict=True))


@pytest.mark.parametrize("name", MISTAKES)
def test_typical_mistake_is_one_line_that_names_it_before_torch_is_loaded(ended, name):
    outcome, (_, parts) = ended[name], MISTAKES[name]
    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.err.startswith("error: ")
    assert outcome.err.count("\n") == 1, outcome.err
    missing = [part for part in parts if part.format(port=outcome.port) not in outcome.err]
    assert not missing, outcome.err
    assert not outcome.loaded
    assert outcome.seconds < MAX_SECONDS
