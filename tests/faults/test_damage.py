"""Random damage to checkpoints and adapters is found, named, and kept out of a resumed run."""

import json
import random
import shutil
from contextlib import ExitStack, contextmanager
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
TRIALS = 16 if LONG else 2  # of each kind of damage to each file


def flip_byte(data, rng, most=256):
    position = rng.randrange(len(data))
    other = (data[position] + rng.randrange(1, most)) % 256
    return data[:position] + bytes([other]) + data[position + 1 :]


DAMAGES = {
    "bit": lambda data, rng: flip_byte(data, rng, most=2),
    "byte": flip_byte,
    "cut": lambda data, rng: data[: rng.randrange(len(data))],
    "empty": lambda data, rng: b"",
    "gone": lambda data, rng: None,
}


@contextmanager
def damaged(path, kind, rng):
    """A block in which the file is damaged at a random place; gives its path."""
    before = path.read_bytes()
    after = DAMAGES[kind](before, rng)
    assert after != before
    path.unlink() if after is None else path.write_bytes(after)
    yield path
    path.write_bytes(before)


def save_checkpoint(directory, step):
    (directory / "ranks").mkdir(parents=True)
    generator = torch.Generator().manual_seed(step)
    for name, keys in {"model": ("lora_A", "lora_B"), "optimizer": ("exp_avg", "step")}.items():
        tensors = {key: torch.randn(5, 7, generator=generator) for key in keys}
        save_file(tensors, directory / f"{name}.safetensors")
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


CHECKPOINT_FILES = (
    *("manifest.json", "model.safetensors", "optimizer.safetensors", "state.json"),
    "ranks/0.json",
)
ADAPTER_FILES = (
    *("adapter_config.json", "adapter_model.safetensors", "manifest.json"),
    "tokenizer.json",
)


@pytest.mark.parametrize("number", [1, 2])
def test_damaged_checkpoints_are_named_and_the_one_before_taken(run, number):
    rng = random.Random(number)
    hurt = [step_directory(run, step) for step in STEPS[: -1 - number : -1]]
    every = list(product(CHECKPOINT_FILES, DAMAGES)) * TRIALS
    for points in zip(*(rng.sample(every, len(every)) for _ in hurt), strict=True):
        with ExitStack() as stack:
            paths = [
                stack.enter_context(damaged(directory / name, kind, rng))
                for directory, (name, kind) in zip(hurt, points, strict=True)
            ]
            choice = newest_valid(run)
        assert choice.path == step_directory(run, STEPS[-1 - number])
        assert list(choice.rejected) == hurt
        for path, reason in zip(paths, choice.rejected.values(), strict=True):
            assert reason.startswith(f"{path} "), reason
    assert newest_valid(run).rejected == {}


def test_damaged_adapter_is_refused_by_name_of_the_file(run):
    rng, directory = random.Random(3), run / "adapter"
    for name, kind in [*product(ADAPTER_FILES, DAMAGES)] * TRIALS:
        with damaged(directory / name, kind, rng) as path:
            for read in (read_adapter, verify_adapter):
                with pytest.raises(ValueError, match="; ") as refused:
                    read(directory)
                assert str(refused.value).startswith(f"{path} ")
    assert read_adapter(directory).config.r == 2


# ------------------------------------------------------------------------- real checkpoints

BYTES = 30  # of each run
RESUME = ("--output_dir", "out", "--resume_from_checkpoint", "latest")
VERBS = {"SFT": "sft", "PPO": "rlhf"}
ADAPTERS = {"SFT": 1, "PPO": 2}


def damaged_bytes(trained, name):
    """(file, position, change): as many in each file of the newest checkpoint, drawn at random."""
    newest = max((Path(trained[name]) / "checkpoints").glob("step-*"))
    rng, files = random.Random(name), sorted(path for path in newest.rglob("*") if path.is_file())
    for number in range(BYTES):
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
    assert len(points) == BYTES
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
    for path, kind in product(notes, ("byte", "cut", "empty", "gone")):
        home = tmp_path / f"{path.name} {kind}"
        shutil.copytree(trained[name], home / "out")
        after = DAMAGES[kind](path.read_bytes(), rng)
        own = home / "out" / path.name
        own.unlink() if after is None else own.write_bytes(after)
        done = verb_run(VERBS[name], *RESUME, "--max_steps", "3", home=home)
        assert done.code == 0, (path.name, kind, done.err)
        assert "Traceback" not in done.err
        adapters = [each for each in (home / "out").rglob("adapter") if each.is_dir()]
        for each in adapters:
            verify_adapter(each)
        assert len(adapters) == ADAPTERS[name]
