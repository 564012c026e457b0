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
    ("step", "name"), [(0, "step-00000000"), (100, "step-00000100"), (123456789, "step-123456789")]
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


def test_newest_valid_checkpoint_is_chosen_and_damaged_ones_are_reported(tmp_path):
    assert newest_valid(tmp_path) == Choice(None, {})
    add(tmp_path, 10, 20, 30)
    assert newest_valid(tmp_path) == Choice(step_directory(tmp_path, 30), {})
    damage(tmp_path, 30)
    (step_directory(tmp_path, 20) / "manifest.json").unlink()
    add(tmp_path, 40, kind="adapter")
    choice = newest_valid(tmp_path)
    assert choice.path == step_directory(tmp_path, 10)
    assert [*map(step_of, choice.rejected)] == [40, 30, 20]
    _, first, second = choice.rejected.values()
    assert "step-00000030/state.json has 7 bytes, its manifest says 2" in first
    assert second.endswith("step-00000020/manifest.json is missing")
    damage(tmp_path, 10)
    assert newest_valid(tmp_path).path is None
    assert len(newest_valid(tmp_path).rejected) == 4


# ---------------------------------------------------------------------------- rotation


@pytest.mark.parametrize(
    ("keep", "newest", "best", "left"),
    [
        *((keep, 40, None, [40, 30, 20, 10][: keep or 4]) for keep in (0, 1, 2, 4, 9)),
        *((keep, 20, None, [40, 30, *[20, 10][:keep]]) for keep in (1, 2, 3)),  # not later ones
        *((1, 40, 20, [40, 20]), (2, 40, 20, [40, 20]), (3, 40, 20, [40, 30, 20])),
        *((2, 40, 40, [40, 30]), (0, 40, 10, [40, 30, 20, 10])),
    ],
)
@pytest.mark.parametrize("of_trainer", [False, True])
def test_rotation_keeps_so_many_the_newest_and_the_best(
    of_trainer, keep, newest, best, left, tmp_path
):
    if of_trainer:
        for step in (10, 20, 30, 40):
            (tmp_path / f"checkpoint-{step}").mkdir()
    else:
        add(tmp_path, 10, 20, 30, 40)
    rotate(tmp_path, keep=keep, newest=newest, best=best)
    assert steps_of(tmp_path) == left
    names = [f"checkpoint-{n}" if of_trainer else f"checkpoints/step-{n:08d}" for n in left]
    kept = tmp_path.glob("*") if of_trainer else tmp_path.glob("checkpoints/*")
    assert sorted(str(path.relative_to(tmp_path)) for path in kept) == sorted(names)


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
    assert quarantine_checkpoints(tmp_path, after=40) == []
    rejected = [step_directory(tmp_path, 40), step_directory(tmp_path, 10)]
    moved = quarantine_checkpoints(tmp_path, after=20, rejected=rejected)
    expected = ["step-00000040.rejected", "step-00000030.abandoned", "step-00000010.rejected"]
    assert [path.name for path in moved] == expected
    assert steps_of(tmp_path) == [20]
    assert (moved[1] / "state.json").read_text() == "30"


def test_checkpoints_set_aside_before_are_kept(tmp_path):
    for _ in range(2):
        add(tmp_path, 30)
        quarantine_checkpoints(tmp_path, after=20)
    # A broken link is a taken name too.
    (tmp_path / "checkpoints" / "step-00000030.abandoned.3").symlink_to("nowhere")
    add(tmp_path, 30)
    quarantine_checkpoints(tmp_path, after=20)
    add(tmp_path, 30)
    quarantine_checkpoints(tmp_path, after=20, rejected=[step_directory(tmp_path, 30)])
    endings = ("abandoned", "abandoned.2", "abandoned.3", "abandoned.4", "rejected")
    assert names(tmp_path) == [f"step-00000030.{each}" for each in endings]
    assert newest_valid(tmp_path).path is None


# ---------------------------------------------------------------------------- clearing


def fill(path, text="x"):
    path.mkdir(parents=True)
    (path / "file").write_text(text)
    return path


@pytest.mark.parametrize("between", [False, True])
def test_what_a_killed_process_left_is_removed_or_takes_its_name_back(between, tmp_path):
    """The latter where the process was ``between`` the two renames of a replacement."""
    add(tmp_path, 10, 20)
    if between:
        step_directory(tmp_path, 20).rename(tmp_path / "checkpoints" / ".step-00000020.old")
    else:
        fill(tmp_path / "checkpoints" / ".step-00000020.old")
    for name in (".step-00000030.tmp", ".step-00000010.deleted", ".step-00000020.tmp"):
        fill(tmp_path / "checkpoints" / name)
    ours = [*([] if between else ["adapter", "model"]), ".adapter.old", ".model.old"]
    for name in (*ours, ".adapter.tmp", ".model.tmp"):
        fill(tmp_path / name, name)
    clear_unfinished(tmp_path)
    assert names(tmp_path) == ["step-00000010", "step-00000020"]
    assert sorted(os.listdir(tmp_path)) == ["adapter", "checkpoints", "model"]
    for kept, name in zip(("adapter", "model"), ours, strict=False):
        assert (tmp_path / kept / "file").read_text() == name
    assert newest_valid(tmp_path) == Choice(step_directory(tmp_path, 20), {})


def test_clearing_touches_nothing_else_and_finishes_after_a_failure(tmp_path, monkeypatch):
    clear_unfinished(tmp_path)
    assert os.listdir(tmp_path) == []
    add(tmp_path, 10)
    kept = ["step-00000020.abandoned", ".step-x.tmp", ".step-00000030.tmp.bak", "mine.tmp"]
    for name in (*kept, ".step-00000010.deleted"):
        fill(tmp_path / "checkpoints" / name)
    for name in (".other.tmp", "target"):
        fill(tmp_path / name)
    # Of a link what it points to stays.
    for name in ("checkpoints/.step-00000040.tmp", ".adapter.tmp"):
        (tmp_path / name).symlink_to(tmp_path / "target", target_is_directory=True)
    (tmp_path / ".model.tmp").write_text("a file")

    def fail(path):
        raise OSError("busy")

    with monkeypatch.context() as patched:
        patched.setattr(shutil, "rmtree", fail)
        with pytest.raises(OSError, match="busy"):
            clear_unfinished(tmp_path)
    clear_unfinished(tmp_path)
    assert names(tmp_path) == sorted([*kept, "step-00000010"])
    assert sorted(os.listdir(tmp_path)) == [".other.tmp", "checkpoints", "target"]
    assert (tmp_path / "target" / "file").read_text() == "x"
