"""A run gets a directory of its own; what it replaces is the earlier run and nothing else."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from dschat_lora.config.addons import written_by_addons
from dschat_lora.config.stages import SupervisedConfig
from dschat_lora.report.directory import leftovers, open_alone
from dschat_lora.runtime.directory import RunDirectory
from dschat_lora.runtime.roles import record_models

ROOT = Path(__file__).resolve().parents[2]


def test_default_directory_is_the_first_free_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = [str(RunDirectory.claim(None, name="sft").path) for _ in range(3)]
    assert names == ["output/sft", "output/sft-2", "output/sft-3"]


def test_only_what_an_earlier_run_wrote_is_removed(tmp_path):
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "weights").write_text("w")
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    (tmp_path / "run.json").write_text("{}")
    (tmp_path / "notes.txt").write_text("mine")
    own = {"adapter", "metrics.jsonl", "run.json", *written_by_addons()}
    for name in written_by_addons():
        (tmp_path / name).write_text("")
    assert {path.name for path in leftovers(tmp_path)} == own
    RunDirectory.claim(str(tmp_path), name="sft")
    # A killed run must still be known for one, and its log is emptied under its lock.
    kept = {"notes.txt", "metrics.jsonl", "run.json"}
    assert {path.name for path in tmp_path.iterdir()} == kept


def test_linked_adapter_is_unlinked_and_what_it_points_to_stays(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "adapter").symlink_to(tmp_path / "elsewhere")
    RunDirectory.claim(str(tmp_path / "out"), name="sft")
    assert (tmp_path / "elsewhere").is_dir()
    assert not (tmp_path / "out" / "adapter").is_symlink()


def test_run_that_failed_before_its_first_result_leaves_the_directory_free(tmp_path):
    path = RunDirectory.claim(str(tmp_path / "out"), name="sft").path
    (path / "run.json").write_text("{}")
    (path / "metrics.jsonl").write_text("")
    assert leftovers(path) == []
    RunDirectory(path).abandon()
    assert not path.exists()


def test_directory_with_a_result_or_other_files_is_not_taken_back(tmp_path):
    path = RunDirectory.claim(str(tmp_path / "out"), name="sft").path
    (path / "notes.txt").write_text("mine")
    RunDirectory(path).abandon()
    assert (path / "notes.txt").exists()
    (path / "metrics.jsonl").write_text("{}\n")
    RunDirectory(path).abandon()
    assert (path / "metrics.jsonl").exists()


def other_process(code, *arguments):
    """What Python code prints in a process of its own."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()


TRY = """
import sys, pathlib
from dschat_lora.report.directory import check_idle, open_alone
from dschat_lora.runtime.directory import RunDirectory
path = pathlib.Path(sys.argv[1])
for attempt in (
    lambda: check_idle(path),
    lambda: open_alone(path / "metrics.jsonl"),
    lambda: RunDirectory.claim(str(path), name="sft"),
):
    try:
        attempt()
    except ValueError as error:
        print("refused:", error)
    else:
        print("let in")
"""


def test_directory_of_a_living_run_is_left_alone_until_it_ends(tmp_path):
    (tmp_path / "adapter").mkdir()
    file = open_alone(tmp_path / "metrics.jsonl")
    file.write("{}\n")
    file.flush()
    said = other_process(TRY, tmp_path).splitlines()
    advice = "wait for it, stop it, or choose another --output_dir"
    assert said == [f"refused: another run is writing to {tmp_path}; {advice}"] * 3
    assert (tmp_path / "adapter").exists()
    file.close()
    assert other_process(TRY, tmp_path).splitlines() == ["let in"] * 3
    assert not (tmp_path / "adapter").exists()


def test_names_that_are_spared_stay(tmp_path):
    for name in ("checkpoints", "adapter"):
        (tmp_path / name).mkdir()
    RunDirectory.claim(str(tmp_path), name="sft", spared=frozenset({"checkpoints"}))
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoints"]


def test_checkpoints_are_results_and_go_with_their_run(tmp_path):
    (tmp_path / "checkpoints" / "step-00000001").mkdir(parents=True)
    assert leftovers(tmp_path) == [tmp_path / "checkpoints"]
    RunDirectory(tmp_path).abandon()
    assert (tmp_path / "checkpoints").is_dir()
    RunDirectory.claim(str(tmp_path), name="sft")
    assert list(tmp_path.iterdir()) == []


def test_disk_without_room_for_what_trains_is_refused(tmp_path, one_rank, monkeypatch):
    """A million elements: 12 MB of a checkpoint and 2 MB of a result."""
    config, written = SupervisedConfig(), []

    def check(free, run_config=config.run, total=10**9):
        disk = SimpleNamespace(free=free, total=total)
        monkeypatch.setattr("shutil.disk_usage", lambda path: disk)
        options, record = replace(config, run=run_config), SimpleNamespace(update=written.append)
        run = SimpleNamespace(directory=tmp_path, config=options, record=record)
        settings, parameters = SimpleNamespace(dtype="fp32"), {"trainable": 1_000_000}
        record_models(run, settings, parameters=parameters, layers=[])

    text = r"has 13\.4 MiB free, .* at least 13\.4 MiB; free space"
    with pytest.raises(ValueError, match=text):
        check(13_999_999)
    check(14_000_000)
    check(0, total=0)  # a file system that tells no sizes
    result_alone = replace(config.run, save_interval=0, save_minutes=0)
    check(2_000_000, result_alone)
    with pytest.raises(ValueError, match="free space"):
        check(1_999_999, result_alone)
    assert len(written) == 3
