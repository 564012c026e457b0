"""What the fault tests share. What is written to disk is judged from its format alone."""

import hashlib
import json
import os
import re
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file

from dschat_lora.assets import BUNDLED_DATA
from helpers.spread import ALL

#: every point of failure, where the default run takes a spread of them
LONG = ALL
#: a step 1 of half a second, on few rows; later options win
TINY = f"""
    --lora_dim 4 --max_steps 2 --eval_iters 1 --sample_generations 0 --output_dir out
    --per_device_train_batch_size 4 --max_seq_len 64 --data_path {BUNDLED_DATA["eval"]}
""".split()
#: a step 3 of a second; SFT and REWARD stand for runs
RLHF = f"""
    --actor_model_name_or_path SFT --critic_model_name_or_path REWARD --max_steps 2
    --data_path {BUNDLED_DATA["eval"]} --max_prompt_seq_len 64 --max_answer_seq_len 16
    --per_device_generation_batch_size 4 --per_device_training_batch_size 4 --output_dir out
""".split()
#: GLUE and GPT-2 on data in words, a second each; ENCODER, TASK and the like stand for what
#: the fixture experiments makes
GLUE = """
    --model_name_or_path ENCODER --task_name mrpc --data_dir TASK --apply_lora --do_predict
    --per_device_train_batch_size 4 --num_train_epochs 2 --save_strategy epoch
    --eval_strategy epoch --output_dir out
""".split()
NLG = """
    --model_name_or_path GPT2 --data_path TRAIN --eval_data_path HELD --max_steps 6
    --save_interval 2 --eval_interval 3 --output_dir out
""".split()
DECODE = """
    decode --model_name_or_path NLG --data_path HELD --max_new_tokens 8 --num_beams 2
    --output_path o
""".split()
MANIFEST = "manifest.json"
CHECKPOINT = re.compile(r"step-(\d{8})")
TIMING = re.compile(r"time|step_seconds|.*_per_second|(hardware_)?tflops.*|mfu|peak_memory_bytes")


@dataclass(frozen=True)
class Operation:
    """A counted call, as ``FAULT_LOG`` has it."""

    number: int
    call: str
    path: str
    other: str

    def concerns(self, text):
        """Whether one of its paths holds ``text``."""
        return text in self.path or text in self.other

    def relative_to(self, root):
        """``call path [-> path]`` below ``root``, with the random part of temporary names out."""
        paths = [re.sub(r"\.tmp\w{6}$", ".tmpXXXXXX", p) for p in (self.path, self.other) if p]
        return f"{self.call} " + " -> ".join(os.path.relpath(path, root) for path in paths)


def operations(log):
    """The calls in a file of ``FAULT_LOG``; none where nothing was counted."""
    path = Path(log)
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    parts = [line.split("\t") for line in lines]
    return [Operation(int(number), call, *paths) for number, call, *paths in parts]


def operations_of_second_save(log):
    """From its directory's making to the first's being gone."""
    counted = operations(log)
    begins = next(n for n, o in enumerate(counted) if o.path.endswith("/.step-00000004.tmp"))
    ends = next(n for n, o in enumerate(counted) if o.call == "rmdir" and "02.deleted" in o.path)
    assert begins < ends
    return counted[begins : ends + 1]


def spread(points, count):
    """All points in a long run, else ``count`` of them, as :func:`evenly`."""
    return list(points) if LONG else evenly(points, count)


def evenly(points, count):
    """``count`` of the points at most, evenly with both ends; one: the middle."""
    points = list(points)
    if count == 1:
        return points[len(points) // 2 :][:1]
    count = min(count, len(points))
    return [points[round(i * (len(points) - 1) / max(1, count - 1))] for i in range(count)]


def wait_until(condition, running, timeout=60):
    """Return once ``condition()`` holds, which must be before the command ends."""
    deadline = time.monotonic() + timeout
    while not condition():
        ended = None not in running.codes()
        assert condition() or not ended, f"ended before\n{running.output()}"
        assert time.monotonic() < deadline, f"not within {timeout} s\n{running.output()}"
        time.sleep(0.005)


def read_manifested(directory):
    """The manifest of a directory that holds exactly what it lists, byte for byte.

    Raises:
        AssertionError: naming the first file that is missing, too many or not as listed.
    """
    directory = Path(directory)
    assert (directory / MANIFEST).is_file(), f"{directory} has no {MANIFEST}"
    try:
        manifest = json.loads((directory / MANIFEST).read_text(encoding="utf-8"))
    except ValueError as error:
        raise AssertionError(f"{directory / MANIFEST} is not JSON: {error}") from None
    there = {str(p.relative_to(directory)) for p in directory.rglob("*") if not p.is_dir()}
    listed = manifest["files"]
    assert there - {MANIFEST} <= listed.keys(), f"{directory} holds {sorted(there - listed.keys())}"
    assert listed, f"{directory / MANIFEST} lists nothing"
    for name, facts in sorted(listed.items()):
        assert name in there, f"{directory} lacks {name}"
        content = (directory / name).read_bytes()
        assert len(content) == facts["bytes"], f"{directory / name} has {len(content)} bytes"
        digest = hashlib.sha256(content).hexdigest()
        assert digest == facts["sha256"], f"{directory / name} has sha256 {digest}"
    return manifest


def checkpoints(run_dir):
    """``{step: directory}`` of every checkpoint under its final name, sound or not."""
    by_step = {}
    for path in sorted((Path(run_dir) / "checkpoints").glob("*")):
        if match := CHECKPOINT.fullmatch(path.name):
            by_step[int(match[1])] = path
    return by_step


def broken_checkpoints(run_dir):
    """``{step: what is wrong}``; empty however a run ended."""
    return {
        step: reason
        for step, path in checkpoints(run_dir).items()
        if (reason := _broken(path)) is not None
    }


def valid_checkpoints(run_dir):
    """``{step: directory}`` of the checkpoints that are whole, by their manifest."""
    broken = broken_checkpoints(run_dir)
    return {step: path for step, path in checkpoints(run_dir).items() if step not in broken}


def _broken(checkpoint):
    try:
        read_manifested(checkpoint)
    except (AssertionError, OSError, KeyError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def trained_tensors(checkpoint):
    """``{name: tensor}`` of every ``model-*.safetensors`` of a checkpoint."""
    tensors = {}
    files = sorted(Path(checkpoint).glob("model-*.safetensors"))
    assert files, f"{checkpoint} has no model-*.safetensors"
    for path in files:
        held = load_file(path)
        assert not held.keys() & tensors.keys(), f"{path} holds a tensor twice"
        tensors |= held
    return tensors


def comparable_metrics(run_dir, kinds=("train", "eval")):
    """The lines of ``metrics.jsonl`` without what depends on time.

    Raises:
        AssertionError: unless its train lines are those of steps 1 to n, each once, in order.
    """
    text = (Path(run_dir) / "metrics.jsonl").read_text(encoding="utf-8")
    assert not text or text.endswith("\n"), f"metrics.jsonl ends in {text[-40:]!r}"
    lines = [json.loads(line) for line in text.splitlines()]
    steps = [line["step"] for line in lines if line["kind"] == "train"]
    assert steps == list(range(1, len(steps) + 1)), f"steps of metrics.jsonl: {steps}"
    return [
        {name: value for name, value in line.items() if not TIMING.fullmatch(name)}
        for line in lines
        if line["kind"] in kinds
    ]


def same_bits(a, b):
    """Compare two safetensors files tensor by tensor, to the bit.

    Raises:
        AssertionError: naming the first difference.
    """
    same_tensors(load_file(a), load_file(b))


def same_tensors(a, b):
    """Compare two dicts of tensors to the bit; raises as :func:`same_bits`."""
    assert a.keys() == b.keys(), f"only in one: {sorted(a.keys() ^ b.keys())}"
    for name in sorted(a):
        ours, theirs = (f"{t.dtype} {tuple(t.shape)}" for t in (a[name], b[name]))
        assert ours == theirs, f"{name}: {ours} and {theirs}"
        bits = [t.contiguous().reshape(-1).view(torch.uint8) for t in (a[name], b[name])]
        differ = (bits[0] != bits[1]).nonzero()
        if len(differ):
            index = int(differ[0]) // a[name].element_size()
            values = [float(t.reshape(-1)[index]) for t in (a[name], b[name])]
            raise AssertionError(f"{name}, element {index}: {values[0]!r} and {values[1]!r}")


def trained_steps(run_dir):
    """The last step with a whole train line in ``metrics.jsonl``; 0 without any."""
    path = Path(run_dir) / "metrics.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
    whole = [json.loads(line) for line in lines if line.endswith("\n")]
    return max((line["step"] for line in whole if line["kind"] == "train"), default=0)


def check_same_end(run_dir, whole):
    """A run that was disturbed ended as ``whole`` did, to the bit.

    Compared are every file of the adapter and the model, the last checkpoint's tensors and
    state, the metrics but for times, and the results.
    """
    run_dir, whole = Path(run_dir), Path(whole)
    assert comparable_metrics(run_dir) == comparable_metrics(whole)
    assert not broken_checkpoints(run_dir)
    ours, theirs = (max(valid_checkpoints(path).items()) for path in (run_dir, whole))
    assert ours[0] == theirs[0]
    same_tensors(trained_tensors(ours[1]), trained_tensors(theirs[1]))
    assert _lasting_state(ours[1]) == _lasting_state(theirs[1])
    for name in ("adapter", "model"):
        assert _files(run_dir / name) == _files(whole / name), name
    records = [json.loads((path / "run.json").read_text()) for path in (run_dir, whole)]
    for name in ("status", "results", "answers", "parameters"):
        assert records[0].get(name) == records[1].get(name), name
    assert records[0]["status"] == "finished"
    left = [path for path in run_dir.rglob("*") if re.search(r"\.(tmp|old|deleted)", path.name)]
    assert not left, left


def _lasting_state(checkpoint):
    """What ``state.json`` says but for options and the seconds of the log."""
    state = json.loads((checkpoint / "state.json").read_text(encoding="utf-8"))
    names = ("step", "identity", "engines", "parts")
    return {name: state[name] for name in names} | {"lines": state["log"]["num_lines"]}


def _files(directory):
    """Every file's bytes by name; none where there is not a directory."""
    paths = sorted(path for path in directory.rglob("*") if path.is_file())
    return {path.relative_to(directory).as_posix(): path.read_bytes() for path in paths}
