"""Random damage to checkpoints and adapters is found, named, and kept out of a resumed run."""

import json
import random
import shutil
from itertools import product
from pathlib import Path

import pytest
import torch
from harness import LONG
from safetensors.torch import save_file
from torch import nn

from dschat_lora.checkpoint.adapter import read_adapter, write_adapter
from dschat_lora.checkpoint.adapter_config import verify_adapter
from dschat_lora.checkpoint.history import newest_valid, step_directory
from dschat_lora.checkpoint.manifest import write_manifest
from dschat_lora.config.groups import LoraConfig
from dschat_lora.lora.model import adapter_layout, adapter_parameters, apply_lora

STEPS = (100, 200, 300)
ONE_CHECKPOINT, TWO_CHECKPOINTS, ADAPTER = 400, 200, 400
TRIALS = 1000


def flip_bit(data, rng):
    position = rng.randrange(len(data))
    return data[:position] + bytes([data[position] ^ 1 << rng.randrange(8)]) + data[position + 1 :]


def flip_byte(data, rng):
    position = rng.randrange(len(data))
    other = (data[position] + rng.randrange(1, 256)) % 256
    return data[:position] + bytes([other]) + data[position + 1 :]


def truncate(data, rng):
    return data[: rng.randrange(len(data))]


def empty(data, rng):
    return b""


def delete(data, rng):
    return None


DAMAGES = (flip_bit, flip_byte, truncate, empty, delete)


class Damaged:
    """A file of a directory, damaged at random, while the block runs."""

    def __init__(self, directory, rng):
        files = sorted(path for path in directory.rglob("*") if path.is_file())
        self.path = rng.choice([path for path in files if path.name != "README.md"])
        self.kind = rng.choice(DAMAGES)
        self.before = self.path.read_bytes()
        self.after = self.kind(self.before, rng)
        assert self.after != self.before

    def __enter__(self):
        self.path.unlink() if self.after is None else self.path.write_bytes(self.after)
        return self

    def __exit__(self, *_):
        self.path.write_bytes(self.before)


def tensors_of(step, *names):
    generator = torch.Generator().manual_seed(step)
    return {name: torch.randn(5, 7, generator=generator) for name in names}


def save_checkpoint(directory, step):
    (directory / "ranks").mkdir(parents=True)
    save_file(tensors_of(step, "a.lora_A", "a.lora_B"), directory / "model.safetensors")
    save_file(tensors_of(step + 1, "exp_avg", "exp_avg_sq"), directory / "optimizer.safetensors")
    (directory / "state.json").write_text(json.dumps({"step": step, "epoch": 0}))
    (directory / "ranks" / "0.json").write_text(json.dumps({"rng": list(range(20))}))
    write_manifest(directory, kind="checkpoint")


def save_adapter(directory):
    config = LoraConfig(lora_dim=2, target_modules=("q",))
    model = nn.ModuleDict({"q": nn.Linear(6, 5)})
    apply_lora(model, config, seed=0)

    def write_more(staging):
        (staging / "tokenizer.json").write_text('{"vocab": {"a": 0}}')
        (staging / "README.md").write_text("card")

    write_adapter(
        directory,
        {name: p.detach() for name, p in adapter_parameters(model).items()},
        config,
        layout=adapter_layout(model),
        base_model_name_or_path="base",
        write_more=write_more,
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    run = tmp_path_factory.mktemp("run")
    for step in STEPS:
        save_checkpoint(step_directory(run, step), step)
    save_adapter(run / "adapter")
    return run


def check_choice(run, damaged):
    """The choice skips the newest checkpoints, in each of which one file is damaged."""
    choice = newest_valid(run)
    assert choice.path == step_directory(run, STEPS[-1 - len(damaged)])
    assert len(choice.rejected) == len(damaged)
    rejected = choice.rejected.items()
    for each, (path, reason), step in zip(damaged, rejected, reversed(STEPS), strict=False):
        assert path == step_directory(run, step)
        assert reason.startswith(f"{each.path} "), (each.kind.__name__, reason)


def check_all_hit(seen, files):
    """Each file met each kind of damage."""
    assert {(name, kind) for name in files for kind in DAMAGES} == seen


CHECKPOINT_FILES = (
    *("manifest.json", "model.safetensors", "optimizer.safetensors", "state.json"),
    "ranks/0.json",
)
ADAPTER_FILES = (
    *("adapter_config.json", "adapter_model.safetensors", "manifest.json"),
    "tokenizer.json",
)


def test_one_damaged_checkpoint_is_named_and_the_one_before_taken(run):
    rng, seen = random.Random(1), set()
    newest = step_directory(run, STEPS[-1])
    for _ in range(ONE_CHECKPOINT):
        with Damaged(newest, rng) as damaged:
            check_choice(run, [damaged])
        seen.add((damaged.path.relative_to(newest).as_posix(), damaged.kind))
    check_all_hit(seen, CHECKPOINT_FILES)
    assert newest_valid(run).path == newest


def test_two_damaged_checkpoints_are_named_and_the_third_taken(run):
    rng = random.Random(2)
    first, second = (step_directory(run, step) for step in (STEPS[-1], STEPS[-2]))
    for _ in range(TWO_CHECKPOINTS):
        with Damaged(first, rng) as one, Damaged(second, rng) as two:
            check_choice(run, [one, two])
    assert newest_valid(run).rejected == {}


def test_damaged_adapter_is_refused_by_name_of_the_file(run):
    rng, seen, directory = random.Random(3), set(), run / "adapter"
    for _ in range(ADAPTER):
        with Damaged(directory, rng) as damaged:
            for read in (read_adapter, verify_adapter):
                with pytest.raises(ValueError, match="; ") as refused:
                    read(directory)
                assert str(refused.value).startswith(f"{damaged.path} "), damaged.kind.__name__
        seen.add((damaged.path.name, damaged.kind))
    check_all_hit(seen, ADAPTER_FILES)
    assert read_adapter(directory).config.r == 2


# ------------------------------------------------------------------------- real checkpoints

BYTES = 60
RESUME = ("--output_dir", "out", "--resume_from_checkpoint", "latest")
VERBS = {"SFT": "sft", "PPO": "rlhf"}
ADAPTERS = {"SFT": 1, "PPO": 2}


def damaged_bytes(trained, name):
    """(file, position, change): as many in each file of the newest checkpoint, drawn at random."""
    newest = max((Path(trained[name]) / "checkpoints").glob("step-*"))
    rng, files = random.Random(name), sorted(path for path in newest.rglob("*") if path.is_file())
    for number in range(BYTES // 2):
        path = files[number % len(files)]
        yield path, rng.randrange(path.stat().st_size), rng.randrange(1, 256)


def change_byte(path, position, change):
    data = bytearray(path.read_bytes())
    data[position] = (data[position] + change) % 256
    path.write_bytes(data)


@pytest.mark.stage
@pytest.mark.parametrize("name", VERBS)
def test_a_byte_of_a_real_checkpoint_is_found_and_its_file_named(name, trained):
    points = list(damaged_bytes(trained, name))
    for path, position, change in points:
        before = path.read_bytes()
        change_byte(path, position, change)
        choice = newest_valid(Path(trained[name]))
        path.write_bytes(before)
        assert choice.path == path.parent.with_name("step-00000001"), (path, position)
        (reason, *_) = choice.rejected.values()
        assert reason.startswith(f"{path} "), (path, position)
    assert len(points) == BYTES // 2
    assert newest_valid(Path(trained[name])).rejected == {}


@pytest.mark.stage
@pytest.mark.parametrize("name", VERBS if LONG else ["SFT"])
def test_run_goes_on_from_before_a_damaged_byte_and_ends_as_if_it_were_whole(
    name, trained, verb_run, tmp_path
):
    points = list(damaged_bytes(trained, name))
    for number, (path, position, change) in enumerate(points if LONG else points[1:2]):
        home = tmp_path / str(number)
        shutil.copytree(trained[name], home / "out")
        own = home / "out" / path.relative_to(trained[name])
        change_byte(own, position, change)
        done = verb_run(VERBS[name], *RESUME, home=home)
        assert done.code == 0, done.err
        assert f"checkpoint rejected: {own.relative_to(home)} " in done.out
        for directory in {"SFT": ["."], "PPO": ["actor", "critic"]}[name]:
            ours, whole = (
                run / directory / "adapter" / "adapter_model.safetensors"
                for run in (home / "out", Path(trained[name]))
            )
            assert ours.read_bytes() == whole.read_bytes(), (path, position)


@pytest.mark.stage
@pytest.mark.skipif(not LONG, reason="every kind of damage to every file of two runs")
@pytest.mark.parametrize("name", VERBS)
def test_damaged_notes_of_a_run_do_not_keep_it_from_going_on(name, trained, verb_run, tmp_path):
    rng = random.Random(name)
    notes = [path for path in sorted(Path(trained[name]).iterdir()) if path.is_file()]
    assert {path.name for path in notes} >= {"metrics.jsonl", "run.json"}
    for path, kind in product(notes, (flip_byte, truncate, empty, delete)):
        home = tmp_path / f"{path.name} {kind.__name__}"
        shutil.copytree(trained[name], home / "out")
        after = kind(path.read_bytes(), rng)
        own = home / "out" / path.name
        own.unlink() if after is None else own.write_bytes(after)
        done = verb_run(VERBS[name], *RESUME, "--max_steps", "3", home=home)
        assert done.code == 0, (path.name, kind.__name__, done.err)
        assert "Traceback" not in done.err
        adapters = [each for each in (home / "out").rglob("adapter") if each.is_dir()]
        for each in adapters:
            verify_adapter(each)
        assert len(adapters) == ADAPTERS[name]


def test_number_of_trials():
    assert ONE_CHECKPOINT + TWO_CHECKPOINTS + ADAPTER == TRIALS >= 500
