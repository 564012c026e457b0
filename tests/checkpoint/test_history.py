"""Checkpoints of a run: found, chosen, deleted and renamed by exact names alone."""

import os
import shutil
from pathlib import Path

import pytest

from dschat_lora.checkpoint.history import (
    Choice,
    checkpoints_of,
    clear_unfinished,
    newest_valid,
    quarantine_checkpoints,
    rotate,
    step_directory,
    step_of,
)
from dschat_lora.checkpoint.manifest import write_manifest


def add(run, *steps, kind="checkpoint"):
    for step in steps:
        directory = step_directory(run, step)
        directory.mkdir(parents=True)
        (directory / "state.json").write_text(str(step))
        (directory / "more.json").write_text("more")
        write_manifest(directory, kind=kind)


def steps_of(run):
    return [step_of(path) for path in checkpoints_of(run)]


def names(run):
    return sorted(os.listdir(run / "checkpoints"))


def damage(run, step):
    (step_directory(run, step) / "state.json").write_text("damaged")


# ---------------------------------------------------------------------------- names


@pytest.mark.parametrize(
    ("step", "name"),
    [(0, "step-00000000"), (100, "step-00000100"), (123456789, "step-123456789")],
)
def test_name_of_a_step_and_back(step, name, tmp_path):
    assert step_directory(tmp_path, step) == tmp_path / "checkpoints" / name
    assert step_of(tmp_path / name) == step


@pytest.mark.parametrize(
    "name",
    """
    step-100 step-0000010 step-000000100 step-00000100.abandoned .step-00000100.tmp
    xstep-00000100 step-0000010a step--0000100 step-+0000100 STEP-00000100 step_00000100
    step-\u0661\u0661\u0661\u0661\u0661\u0661\u0661\u0661
    """.split(),
)
def test_other_names_have_no_step(name):
    assert step_of(Path(name)) is None
    assert step_of(Path("step-00000100\n")) is None


def test_checkpoints_are_listed_newest_first_and_nothing_else_is(tmp_path):
    assert checkpoints_of(tmp_path) == []
    add(tmp_path, 9, 100, 20, 100_000_000)
    for other in (".step-00000300.tmp", "step-00000300.rejected", "other"):
        (tmp_path / "checkpoints" / other).mkdir()
    (tmp_path / "checkpoints" / "step-00000400").write_text("a file")
    assert steps_of(tmp_path) == [100_000_000, 100, 20, 9]


# ---------------------------------------------------------------------------- choice


def test_newest_valid_checkpoint_is_chosen(tmp_path):
    assert newest_valid(tmp_path) == Choice(None, {})
    add(tmp_path, 10, 20, 30)
    assert newest_valid(tmp_path) == Choice(step_directory(tmp_path, 30), {})


def test_damaged_checkpoints_are_passed_over_and_reported(tmp_path):
    add(tmp_path, 10, 20, 30)
    damage(tmp_path, 30)
    (step_directory(tmp_path, 20) / "manifest.json").unlink()
    choice = newest_valid(tmp_path)
    assert choice.path == step_directory(tmp_path, 10)
    assert [*map(step_of, choice.rejected)] == [30, 20]
    first, second = choice.rejected.values()
    assert "step-00000030/state.json has 7 bytes, its manifest says 2" in first
    assert second.endswith("step-00000020/manifest.json is missing")
    damage(tmp_path, 10)
    assert newest_valid(tmp_path).path is None
    assert len(newest_valid(tmp_path).rejected) == 3


def test_adapter_under_the_name_of_a_checkpoint_is_none(tmp_path):
    add(tmp_path, 10)
    add(tmp_path, 20, kind="adapter")
    assert newest_valid(tmp_path).path == step_directory(tmp_path, 10)


# ---------------------------------------------------------------------------- rotation


@pytest.mark.parametrize(
    ("keep", "left"),
    [(0, [40, 30, 20, 10]), (1, [40]), (2, [40, 30]), (4, [40, 30, 20, 10]), (9, [40, 30, 20, 10])],
)
def test_rotation_keeps_so_many_and_the_newest(keep, left, tmp_path):
    add(tmp_path, 10, 20, 30, 40)
    rotate(tmp_path, keep=keep, newest=40)
    assert steps_of(tmp_path) == left
    assert names(tmp_path) == sorted(f"step-{step:08d}" for step in left)


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_rotation_never_deletes_the_newest_nor_later_ones(keep, tmp_path):
    add(tmp_path, 10, 20, 30, 40, 50)
    rotate(tmp_path, keep=keep, newest=30)
    assert steps_of(tmp_path) == [50, 40, *[30, 20, 10][:keep]]


@pytest.mark.parametrize(
    ("keep", "best", "left"),
    [(1, 20, [20, 40]), (2, 20, [20, 40]), (3, 20, [20, 30, 40]), (2, 40, [30, 40]), (0, 10, None)],
)
def test_rotation_keeps_the_best_of_the_trainers_checkpoints(keep, best, left, tmp_path):
    for step in (10, 20, 30, 40):
        (tmp_path / f"checkpoint-{step}").mkdir()
    rotate(tmp_path, keep=keep, newest=40, best=best)
    kept = [step_of(path) for path in reversed(checkpoints_of(tmp_path))]
    assert kept == (left or [10, 20, 30, 40])


def test_rotation_leaves_links_and_other_names_alone(tmp_path):
    add(tmp_path, 10, 20, 30)
    elsewhere = tmp_path / "elsewhere"
    step_directory(tmp_path, 10).rename(elsewhere)
    step_directory(tmp_path, 10).symlink_to(elsewhere, target_is_directory=True)
    for name in ("step-5", "step-00000005.abandoned", "mine"):
        (tmp_path / "checkpoints" / name).mkdir()
    (tmp_path / "checkpoints" / "step-00000006").write_text("a file")
    rotate(tmp_path, keep=1, newest=30)
    assert steps_of(tmp_path) == [30, 10]
    assert {"step-5", "step-00000005.abandoned", "mine", "step-00000006"} < set(names(tmp_path))
    assert newest_valid(tmp_path).path == step_directory(tmp_path, 30)
    assert (elsewhere / "state.json").read_text() == "10"


def test_killed_rotation_leaves_no_part_of_a_checkpoint_under_its_name(tmp_path, monkeypatch):
    add(tmp_path, 10, 20, 30)

    def die_halfway(path):
        (path / "state.json").unlink()
        raise OSError("killed")

    with monkeypatch.context() as patched:
        patched.setattr(shutil, "rmtree", die_halfway)
        with pytest.raises(OSError, match="killed"):
            rotate(tmp_path, keep=1, newest=30)
    assert names(tmp_path) == [".step-00000020.deleted", "step-00000010", "step-00000030"]
    assert all(each.name != "step-00000020" for each in checkpoints_of(tmp_path))
    # The same step comes again after a resume from an earlier one, and is rotated again.
    add(tmp_path, 20)
    rotate(tmp_path, keep=1, newest=30)
    assert names(tmp_path) == ["step-00000030"]


# ---------------------------------------------------------------------------- setting aside


def test_later_checkpoints_are_abandoned_and_damaged_ones_rejected(tmp_path):
    add(tmp_path, 10, 20, 30, 40)
    damage(tmp_path, 40)
    damage(tmp_path, 10)
    rejected = [step_directory(tmp_path, 40), step_directory(tmp_path, 10)]
    moved = quarantine_checkpoints(tmp_path, after=20, rejected=rejected)
    expected = ["step-00000040.rejected", "step-00000030.abandoned", "step-00000010.rejected"]
    assert [path.name for path in moved] == expected
    assert all(path.is_dir() for path in moved)
    assert steps_of(tmp_path) == [20]
    assert (moved[1] / "state.json").read_text() == "30"


def test_earlier_and_chosen_checkpoints_stay(tmp_path):
    add(tmp_path, 10, 20)
    assert quarantine_checkpoints(tmp_path, after=20) == []
    assert steps_of(tmp_path) == [20, 10]


def test_checkpoints_set_aside_before_are_kept(tmp_path):
    for _ in range(3):
        add(tmp_path, 30)
        quarantine_checkpoints(tmp_path, after=20)
    add(tmp_path, 30)
    quarantine_checkpoints(tmp_path, after=20, rejected=[step_directory(tmp_path, 30)])
    assert names(tmp_path) == [
        "step-00000030.abandoned",
        "step-00000030.abandoned.2",
        "step-00000030.abandoned.3",
        "step-00000030.rejected",
    ]
    assert newest_valid(tmp_path).path is None


def test_broken_link_counts_as_a_taken_name(tmp_path):
    add(tmp_path, 30)
    (tmp_path / "checkpoints" / "step-00000030.abandoned").symlink_to("nowhere")
    assert quarantine_checkpoints(tmp_path, after=0)[0].name == "step-00000030.abandoned.2"


# ---------------------------------------------------------------------------- clearing


def fill(path, text="x"):
    path.mkdir(parents=True)
    (path / "file").write_text(text)
    return path


def test_what_a_killed_process_left_is_removed(tmp_path):
    add(tmp_path, 10, 20)
    for name in (".step-00000030.tmp", ".step-00000010.deleted", ".step-00000020.old"):
        fill(tmp_path / "checkpoints" / name)
    for name in ("adapter", "model", ".adapter.tmp", ".model.tmp", ".adapter.old", ".model.old"):
        fill(tmp_path / name, name)
    clear_unfinished(tmp_path)
    assert names(tmp_path) == ["step-00000010", "step-00000020"]
    assert sorted(os.listdir(tmp_path)) == ["adapter", "checkpoints", "model"]
    assert (tmp_path / "adapter" / "file").read_text() == "adapter"
    assert newest_valid(tmp_path) == Choice(step_directory(tmp_path, 20), {})


def test_directory_caught_between_two_renames_takes_its_name_back(tmp_path):
    add(tmp_path, 10, 20)
    step_directory(tmp_path, 20).rename(tmp_path / "checkpoints" / ".step-00000020.old")
    fill(tmp_path / "checkpoints" / ".step-00000020.tmp")
    for name in ("adapter", "model"):
        fill(tmp_path / f".{name}.old", name)
        fill(tmp_path / f".{name}.tmp")
    clear_unfinished(tmp_path)
    assert newest_valid(tmp_path) == Choice(step_directory(tmp_path, 20), {})
    assert sorted(os.listdir(tmp_path)) == ["adapter", "checkpoints", "model"]
    assert (tmp_path / "adapter" / "file").read_text() == "adapter"
    assert (tmp_path / "model" / "file").read_text() == "model"


def test_clearing_touches_nothing_else(tmp_path):
    clear_unfinished(tmp_path)
    assert os.listdir(tmp_path) == []
    add(tmp_path, 10)
    others = ["step-00000020.abandoned", ".step-x.tmp", ".step-00000030.tmp.bak", "mine.tmp"]
    for name in others:
        fill(tmp_path / "checkpoints" / name)
    fill(tmp_path / ".other.tmp")
    clear_unfinished(tmp_path)
    assert names(tmp_path) == sorted([*others, "step-00000010"])
    assert (tmp_path / ".other.tmp").is_dir()


def test_clearing_removes_a_link_and_not_what_it_points_to(tmp_path):
    target = fill(tmp_path / "target")
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / ".step-00000010.tmp").symlink_to(target, target_is_directory=True)
    (tmp_path / ".adapter.tmp").symlink_to(target, target_is_directory=True)
    (tmp_path / ".model.tmp").write_text("a file")
    clear_unfinished(tmp_path)
    assert sorted(os.listdir(tmp_path)) == ["checkpoints", "target"]
    assert names(tmp_path) == []
    assert (target / "file").read_text() == "x"


def test_clearing_again_after_a_failure_finishes(tmp_path, monkeypatch):
    fill(tmp_path / "checkpoints" / ".step-00000010.deleted")

    def fail(path):
        raise OSError("busy")

    with monkeypatch.context() as patched:
        patched.setattr(shutil, "rmtree", fail)
        with pytest.raises(OSError, match="busy"):
            clear_unfinished(tmp_path)
    clear_unfinished(tmp_path)
    assert names(tmp_path) == []
