"""A wheel, unpacked outside of the checkout, has every verb, recipe and stage."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import zipfile
from pathlib import Path
from urllib.request import urlopen

import pytest
import torch

from dschat_lora.assets import BUNDLED_MODEL
from dschat_lora.checkpoint.adapter import read_adapter
from dschat_lora.models.source import find_model
from helpers.addons import of_the_whole
from helpers.launcher import ROOT

pytestmark = pytest.mark.stage

STEPS = ["--max_steps", "2", "--eval_iters", "1", "--sample_generations", "1", "--lora_dim", "4"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """A wheel of the checkout, built from a copy, so that nothing is left in it."""
    home = tmp_path_factory.mktemp("build")
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, home / name)
    for name in ("dschat_lora", "configs"):
        unwanted = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, home / name, symlinks=True, ignore=unwanted)
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--quiet"]
    command = [sys.executable, "-m", "pip", "wheel", *options, "--wheel-dir", home / "out", "."]
    subprocess.run(command, cwd=home, check=True, capture_output=True)
    (path,) = (home / "out").glob("*.whl")
    return path


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """``run(*argv)``: ``dschat-lora`` of the wheel alone, in a directory of its own."""
    home, target = tmp_path_factory.mktemp("elsewhere"), tmp_path_factory.mktemp("site")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(target)

    # Without the last two the accelerator is looked for, and said on the standard output.
    left_out = ("RANK", "WORLD_SIZE", "DS_ACCELERATOR", "CUDA_VISIBLE_DEVICES")
    environment = {k: v for k, v in os.environ.items() if k not in left_out}
    environment["PYTHONPATH"] = str(target)

    def start(*argv):
        command = [sys.executable, "-m", "dschat_lora", *map(str, argv)]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        return subprocess.Popen(command, cwd=home, env=environment, **pipes)

    def run(*argv):
        with start(*argv) as running:
            out, err = running.communicate(timeout=300)
        assert running.returncode == 0, out + err
        return out

    run.home, run.target, run.start = home, target, start
    return run


@pytest.fixture(scope="module")
def trained(installed):
    """(directory, output) of two steps of SFT."""
    return installed.home / "sft", installed("sft", *STEPS, "--output_dir", "sft")


def test_wheel_holds_the_configs_of_the_checkout_and_no_tests(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        for path in (ROOT / "configs").rglob("*"):
            if path.is_file():
                inside = f"dschat_lora/configs/{path.relative_to(ROOT / 'configs')}"
                assert archive.read(inside) == path.read_bytes()
    assert not [name for name in names if name.startswith(("tests/", "training/", "configs/"))]


@of_the_whole
@pytest.mark.thorough
def test_wheel_lists_its_recipes_and_checks_a_pipeline_of_every_stage(installed):
    listed = json.loads(installed("recipes", "--json"))
    assert all(each["path"].startswith(str(installed.target)) for each in listed)
    said = installed("pipeline", "bundled", "--dry_run")
    for stage in ("sft", "reward", "rlhf"):
        assert f"$ dschat-lora {stage} --num_gpus 1 " in said
    assert [path.name for path in installed.home.iterdir() if path.name != "sft"] == []


@pytest.mark.thorough
def test_wheel_trains(trained):
    home, said = trained
    assert said.startswith("model: the bundled tiny model; data: the bundled data\n")
    assert "Setting accelerator" not in said
    assert json.loads((home / "run.json").read_text())["status"] == "finished"


@of_the_whole
def test_wheel_makes_a_page_of_a_run(installed, trained):
    home, _ = trained
    page = home / "report.html"
    page.unlink()
    installed("report", "sft")
    assert "uPlot" in page.read_text("utf-8")


@of_the_whole
@pytest.mark.thorough
@pytest.mark.parametrize(
    ("words", "path"),
    [
        ("serve sft --port 0", "/"),
        ("serve sft --port 0", "/v1/models"),
        ("tinker base --port 0", "/api/v1/healthz"),
    ],
)
def test_wheel_serves(words, path, installed, trained):
    """The page, a request of OpenAI's interface, and the Tinker API, until they are stopped."""
    for package in ("uvicorn", "starlette", *["tinker"] * words.startswith("tinker")):
        pytest.importorskip(package)
    with installed.start(*words.split()) as running:
        line = ""
        while not (found := re.search(r"http://127\.0\.0\.1:\d+", line)):
            line = running.stdout.readline()
            assert line, running.stderr.read()
        with urlopen(found[0] + path) as answer:
            assert answer.status == 200
            assert answer.read()
        running.send_signal(signal.SIGINT)


@of_the_whole
def test_run_ends_with_commands_and_a_page_that_name_its_output(trained):
    _, said = trained
    assert said.splitlines()[-5:-1] == [
        "next:",
        "  dschat-lora chat sft",
        "  dschat-lora reward --model_name_or_path sft",
        "report: sft/report.html (open it in a browser)",
    ]


def test_checkpoint_is_read_as_the_adapter_that_the_run_wrote(trained, monkeypatch):
    home, _ = trained
    monkeypatch.chdir(home.parent)
    checkpoint = home / "checkpoints" / "step-00000002"
    ours, theirs = read_adapter(checkpoint), read_adapter(home / "adapter")
    assert ours.tensors.keys() == theirs.tensors.keys()
    for name, tensor in theirs.tensors.items():
        assert torch.equal(ours.tensors[name], tensor)
    for field in ("r", "lora_alpha", "use_rslora", "bias", "task_type", "modules_to_save"):
        assert getattr(ours.config, field) == getattr(theirs.config, field)
    source = find_model("sft/checkpoints/step-00000002")
    assert (source.base, source.adapter) == (str(BUNDLED_MODEL), checkpoint.resolve())
    assert source.tokenizer == str(home / "adapter")


def test_run_without_an_adapter_is_its_newest_sound_checkpoint(trained, tmp_path):
    home, _ = trained
    shutil.copytree(home / "checkpoints", tmp_path / "run" / "checkpoints")
    source = find_model(str(tmp_path / "run"))
    assert source.adapter == tmp_path / "run" / "checkpoints" / "step-00000002"
    state = tmp_path / "run" / "checkpoints" / "step-00000002" / "state.json"
    state.write_text(state.read_text() + " ")
    with pytest.raises(ValueError, match="holds neither config.json nor adapter_config.json"):
        find_model(str(tmp_path / "run"))
    with pytest.raises(ValueError, match="is damaged|differs|state.json"):
        read_adapter(state.parent)


def test_model_card_states_rates_lengths_and_a_chat_and_no_absolute_path(trained):
    home, _ = trained
    card = (home / "adapter" / "README.md").read_text()
    for row in ("| lora learning rate | 0.0005 |", "| max steps | 2 |", "| max seq len | 128 |"):
        assert row in card
    assert "tokenizer.apply_chat_template(" in card
    assert str(Path(home.anchor) / home.parts[1]) not in card
    assert 'base_model: "model"' in card
