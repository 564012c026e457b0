"""Checkpoints written beside training: whole under their name or not there, in bounded memory."""

import json
import threading
import time
import weakref

import pytest
import torch
from safetensors.torch import load_file

from dschat_lora.checkpoint.history import checkpoints_of, step_directory
from dschat_lora.checkpoint.manifest import verify
from dschat_lora.checkpoint.tensors import TensorFiles, save_tensors
from dschat_lora.runtime import checkpointer as saver_module
from dschat_lora.runtime.checkpointer import Saver


@pytest.fixture
def saver(tmp_path):
    """``saver(keep=0, before_commit=...)`` on ``tmp_path``."""

    def of(keep=0, before_commit=lambda: None):
        return Saver(tmp_path, keep=keep, before_commit=before_commit)

    return of


@pytest.fixture
def tiny_shards(monkeypatch):
    """Shards of 32 bytes: eight fp32 numbers."""
    monkeypatch.setattr(saver_module, "SHARD_BYTES", 32)


@pytest.fixture
def may_write(monkeypatch):
    """The event that the disk waits for."""
    event = threading.Event()

    def patient(tensors, path):
        assert event.wait(10)
        save_tensors(tensors, path)

    monkeypatch.setattr(saver_module, "save_tensors", patient)
    return event


def some(count=3, size=4):
    return {f"weight:{i}": torch.arange(size) + 10.0 * i for i in range(count)}


def pairs(tensors):
    return {"model": iter(tensors.items())}


def names(run):
    """Everything under ``checkpoints``, hidden names too."""
    directory = run / "checkpoints"
    return sorted(path.name for path in directory.iterdir()) if directory.is_dir() else []


def read(directory, part="model"):
    """Every tensor of a part, without the reader under test."""
    files = sorted(directory.glob(f"{part}-*.safetensors"))
    return {key: tensor for path in files for key, tensor in load_file(path).items()}


def same(read_back, expected):
    return read_back.keys() == expected.keys() and all(
        torch.equal(read_back[key], expected[key]) for key in expected
    )


def test_checkpoint_holds_tensors_and_state_under_a_manifest(saver, tmp_path):
    writer = saver()
    actor, critic = some(3), some(2, size=5)
    parts = {"actor": iter(actor.items()), "critic": iter(critic.items())}
    writer.save(7, parts, {"step": 7, "text": "a"})
    writer.wait()
    directory = step_directory(tmp_path, 7)
    assert writer.committed == directory
    assert writer.failure is None
    verify(directory, kind="checkpoint")
    assert json.loads((directory / "state.json").read_text()) == {"step": 7, "text": "a"}
    assert same(read(directory, "actor"), actor)
    assert same(read(directory, "critic"), critic)
    assert sorted(path.name for path in directory.iterdir()) == [
        *("actor-00001.safetensors", "critic-00001.safetensors", "manifest.json", "state.json")
    ]


def test_shards_are_of_the_size_set_and_larger_tensors_are_their_own(saver, tiny_shards, tmp_path):
    writer = saver()
    sizes = {"a": 4, "b": 4, "c": 1, "d": 20, "e": 3, "f": 5}
    tensors = {name: torch.rand(size) for name, size in sizes.items()}
    writer.save(1, pairs(tensors), {})
    writer.wait()
    files = sorted(step_directory(tmp_path, 1).glob("*.safetensors"))
    assert [path.name for path in files] == [f"model-{i:05d}.safetensors" for i in (1, 2, 3, 4)]
    assert [sorted(load_file(path)) for path in files] == [["a", "b"], ["c"], ["d"], ["e", "f"]]
    read_back = TensorFiles(files)
    assert all(torch.equal(read_back.read(name), tensor) for name, tensor in tensors.items())


def test_first_tensor_that_is_larger_than_a_shard_has_no_empty_one_before_it(
    saver, tiny_shards, tmp_path
):
    writer = saver()
    writer.save(1, pairs({"a": torch.zeros(20), "b": torch.zeros(4)}), {})
    writer.wait()
    files = sorted(step_directory(tmp_path, 1).glob("*.safetensors"))
    assert [sorted(load_file(path)) for path in files] == [["a"], ["b"]]


def test_saving_waits_for_the_disk_as_long_as_it_is_patient(saver, may_write, tmp_path):
    writer = saver()
    writer.save(1, pairs(some()), {}, patience=0.01)
    assert writer.committed is None
    may_write.set()
    writer.save(2, pairs(some()), {}, patience=10.0)
    assert writer.committed == step_directory(tmp_path, 2)


def test_part_without_tensors_has_no_file(saver, tmp_path):
    writer = saver()
    writer.save(1, pairs({}), {"step": 1})
    writer.wait()
    verify(step_directory(tmp_path, 1), kind="checkpoint")
    assert read(step_directory(tmp_path, 1)) == {}


def test_save_returns_while_the_disk_works_and_the_next_save_waits(saver, may_write, tmp_path):
    writer = saver()
    writer.save(1, pairs(some()), {})
    assert writer.committed is None
    assert writer.failure is None
    threading.Timer(0.1, may_write.set).start()
    writer.save(2, pairs(some()), {})
    assert step_directory(tmp_path, 1).is_dir()
    writer.wait()
    assert writer.committed == step_directory(tmp_path, 2)


def test_what_the_caller_changes_later_is_not_in_the_checkpoint(saver, may_write, tmp_path):
    writer, state = saver(), {"step": 1}
    writer.save(1, pairs(some()), state)
    state["step"] = 2
    may_write.set()
    writer.wait()
    assert json.loads((step_directory(tmp_path, 1) / "state.json").read_text()) == {"step": 1}


def test_one_shard_is_written_and_two_wait_however_slow_the_disk(
    saver, tiny_shards, monkeypatch, tmp_path
):
    alive, counts, lock = set(), [], threading.Lock()

    def drop(index):
        with lock:
            alive.discard(index)

    def generated():
        for index in range(40):
            tensor = torch.full((8,), float(index))
            weakref.finalize(tensor, drop, index)
            with lock:
                alive.add(index)
                counts.append(len(alive))
            yield f"weight:{index}", tensor

    def slow(tensors, path):
        time.sleep(0.005)
        save_tensors(tensors, path)

    monkeypatch.setattr(saver_module, "save_tensors", slow)
    writer = saver()
    writer.save(1, {"model": generated()}, {})
    writer.wait()
    # And the tensor that did not fit. The writer may be slow to forget one it has written.
    assert sorted(counts)[20] == 4
    assert max(counts) <= 5
    assert len(read(step_directory(tmp_path, 1))) == 40
    assert not alive


def test_commit_comes_after_everything_it_relies_on(saver, tmp_path):
    seen = []

    def look():
        staging = tmp_path / "checkpoints" / ".step-00000001.tmp"
        verify(staging, kind="checkpoint")
        seen.append(names(tmp_path))

    writer = saver(before_commit=look)
    writer.save(1, pairs(some()), {})
    writer.wait()
    assert seen == [[".step-00000001.tmp"]]
    assert names(tmp_path) == ["step-00000001"]


# ---------------------------------------------------------------------------- failures


@pytest.fixture
def one_is_there(saver, tmp_path):
    """A checkpoint of step 1, whose bytes a later failure must not touch."""
    writer = saver()
    writer.save(1, pairs(some()), {"step": 1})
    writer.wait()
    return writer


def assert_only_the_first(tmp_path):
    assert names(tmp_path) == ["step-00000001"]
    verify(step_directory(tmp_path, 1), kind="checkpoint")
    assert same(read(step_directory(tmp_path, 1)), some())


def test_failing_disk_is_found_later_and_leaves_the_checkpoint_before(
    one_is_there, tiny_shards, monkeypatch, tmp_path
):
    calls = []

    def failing(tensors, path):
        calls.append(path.name)
        if len(calls) == 2:
            raise OSError(28, "No space left on device", str(path))
        save_tensors(tensors, path)

    monkeypatch.setattr(saver_module, "save_tensors", failing)
    produced = []

    def generated():
        for index in range(50):
            produced.append(index)
            yield f"weight:{index}", torch.zeros(8)

    one_is_there.save(2, {"model": generated()}, {})  # does not hang, does not raise
    with pytest.raises(OSError, match="No space left"):
        one_is_there.wait()
    assert isinstance(one_is_there.failure, OSError)
    assert one_is_there.committed == step_directory(tmp_path, 1)
    assert len(calls) == 2
    # Every rank takes part in gathering tensors: it goes on to the end.
    assert len(produced) == 50
    assert_only_the_first(tmp_path)
    with pytest.raises(OSError, match="No space left"):
        one_is_there.save(3, pairs(some()), {})
    assert_only_the_first(tmp_path)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_tensor_that_is_not_finite_is_named_and_nothing_is_written(
    one_is_there, tiny_shards, tmp_path, bad
):
    tensors = some(4, size=8)
    tensors["weight:2"][3] = bad
    one_is_there.save(2, pairs(tensors), {})
    message = "step-00000002 was not written: weight:2 holds values that are not finite"
    with pytest.raises(ValueError, match=f"^{message}$"):
        one_is_there.wait()
    assert str(one_is_there.failure) == message
    assert_only_the_first(tmp_path)


@pytest.mark.parametrize(("tensors", "error"), [(5, RuntimeError), (0, KeyboardInterrupt)])
def test_producer_that_fails_leaves_nothing(one_is_there, tiny_shards, tmp_path, tensors, error):
    def generated():
        yield from some(tensors, size=8).items()
        raise error

    with pytest.raises(error):
        one_is_there.save(2, {"model": generated()}, {})
    with pytest.raises(
        InterruptedError, match="step-00000002 was abandoned: some of its tensors are missing"
    ):
        one_is_there.wait()
    assert_only_the_first(tmp_path)


def test_log_that_cannot_reach_the_disk_leaves_no_checkpoint(one_is_there, saver, tmp_path):
    def refuse():
        raise OSError(5, "Input/output error", "metrics.jsonl")

    broken = saver(before_commit=refuse)
    broken.save(2, pairs(some()), {})
    with pytest.raises(OSError, match="Input/output error"):
        broken.wait()
    assert broken.committed is None
    assert_only_the_first(tmp_path)


def test_checkpoint_of_the_same_step_is_replaced(one_is_there, tmp_path):
    other = some(2, size=6)
    one_is_there.save(1, pairs(other), {"step": 1, "again": True})
    one_is_there.wait()
    assert names(tmp_path) == ["step-00000001"]
    assert same(read(step_directory(tmp_path, 1)), other)


# ---------------------------------------------------------------------------- rotation


@pytest.mark.parametrize(("keep", "left"), [(0, [4, 3, 2, 1]), (1, [4]), (3, [4, 3, 2])])
def test_newest_checkpoints_stay(saver, tmp_path, keep, left):
    writer = saver(keep=keep)
    for step in (1, 2, 3, 4):
        writer.save(step, pairs(some()), {})
    writer.wait()
    assert checkpoints_of(tmp_path) == [step_directory(tmp_path, step) for step in left]


def test_old_checkpoint_that_cannot_be_deleted_is_a_note(saver, monkeypatch, tmp_path):
    def refuse(run, *, keep, newest):
        assert (run, keep, newest) == (tmp_path, 1, 2)
        raise PermissionError(13, "Permission denied", "step-00000001")

    writer = saver(keep=1)
    writer.save(1, pairs(some()), {})
    writer.wait()
    monkeypatch.setattr(saver_module, "rotate", refuse)
    writer.save(2, pairs(some()), {})
    writer.wait()
    assert writer.failure is None
    assert writer.committed == step_directory(tmp_path, 2)
    (note,) = writer.notes
    assert note.startswith("an old checkpoint could not be deleted: ")
    assert "step-00000001" in note


def test_nothing_is_deleted_while_the_new_one_may_still_fail(saver, monkeypatch, tmp_path):
    writer = saver(keep=1)
    writer.save(1, pairs(some()), {})
    writer.save(2, pairs({"weight:0": torch.tensor([float("nan")])}), {})
    with pytest.raises(ValueError, match="not finite"):
        writer.wait()
    assert checkpoints_of(tmp_path) == [step_directory(tmp_path, 1)]


def test_safetensors_own_error_is_one_of_the_disk(tmp_path):
    with pytest.raises(OSError, match="cannot be written"):
        save_tensors({"a": torch.zeros(1)}, tmp_path / "absent" / "x.safetensors")
