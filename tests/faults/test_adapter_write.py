"""Step 1 that dies or is refused at each of the operations by which it writes its adapter."""

import json
import os
import re
import signal

import pytest
from harness import LONG, comparable_metrics, operations, same_bits, spread

from dschat_lora.checkpoint.adapter import read_adapter
from dschat_lora.checkpoint.adapter_config import WEIGHTS_FILE

pytestmark = pytest.mark.stage

TRIALS = 4 if LONG else 2
ERRORS = ["ENOSPC", "EIO", "EROFS", "EACCES"]


@pytest.fixture(scope="module")
def sound(tiny_run):
    """A run that nothing happened to, and its operations from the adapter's first on."""
    done = tiny_run()
    assert done.codes == [0], done.running.output()
    counted = operations(done.log)
    first = next(o.number for o in counted if o.call == "mkdir" and o.concerns("adapter"))
    done.saving = counted[first - 1 :]
    return done


def files_of(directory):
    return {path.name: path.read_bytes() for path in sorted(directory.iterdir())}


def renaming(counted):
    """The operation that gives the adapter its name."""
    (only,) = [o for o in counted if o.call == "rename" and o.other.endswith("/out/adapter")]
    return only


def check_whole_or_absent(done, sound):
    """An adapter under its name is the undisturbed run's, byte for byte."""
    adapter = done.out / "adapter"
    if adapter.exists():
        same_bits(adapter / WEIGHTS_FILE, sound.out / "adapter" / WEIGHTS_FILE)
        assert files_of(adapter) == files_of(sound.out / "adapter")
        read_adapter(adapter)
    assert comparable_metrics(done.out) == comparable_metrics(sound.out)
    json.loads((done.out / "run.json").read_text(encoding="utf-8"))


def chosen(sound, part, parts, calls=r".*"):
    """Every ``parts``-th of the operations to try, from ``part``."""
    fitting = [each for each in sound.saving if re.fullmatch(calls, each.call)]
    return fitting[part::parts] if LONG else spread(fitting, parts)[part : part + 1]


@pytest.mark.thorough
def test_operations_are_the_same_in_each_run(sound, tiny_run):
    again = tiny_run()
    names = sorted(each.relative_to(sound.home) for each in operations(sound.log))
    # Sorted, since a directory lists its files in any order.
    assert sorted(each.relative_to(again.home) for each in operations(again.log)) == names
    assert files_of(again.out / "adapter") == files_of(sound.out / "adapter")
    assert "rename out/.adapter.tmp -> out/adapter" in names
    assert {path.name for path in again.home.iterdir()} == {"out", "log"}


def test_files_reach_the_disk_before_the_rename_and_the_rename_before_the_end(sound):
    names = [each.relative_to(sound.out) for each in sound.saving]
    rename = names.index("rename .adapter.tmp -> adapter")
    synced = {name.removeprefix("fsync ") for name in names[:rename] if name.startswith("fsync ")}
    files = {f".adapter.tmp/{path.name}" for path in (sound.out / "adapter").iterdir()}
    assert synced == files | {".adapter.tmp", ".adapter.tmp/.manifest.json.tmp"}
    assert names.index("fsync .") == rename + 1
    written = [n for n, name in enumerate(names) if re.match(r"(write|open) \.adapter", name)]
    assert max(written) < min(n for n, name in enumerate(names) if name.startswith("fsync "))


@pytest.mark.parametrize("part", range(TRIALS))
def test_killed_at_any_operation_leaves_a_whole_adapter_or_none(part, sound, tiny_run):
    for operation in chosen(sound, part, TRIALS):
        done = tiny_run(FAULT_AT=operation.number, FAULT_DO="kill")
        assert done.codes == [-signal.SIGKILL], operation
        check_whole_or_absent(done, sound)
        renamed = operation.number > renaming(sound.saving).number
        assert (done.out / "adapter").exists() == renamed, operation


@pytest.mark.parametrize("error", ERRORS if LONG else ERRORS[:2])
def test_refused_operation_ends_the_run_without_half_an_adapter(error, sound, tiny_run):
    until = next(n for n, each in enumerate(sound.saving) if each.concerns("run.json"))
    points = sound.saving[:until]
    for operation in points if LONG else spread(points, 4)[ERRORS.index(error) :: len(ERRORS)]:
        for sticky in ("1", ""):
            done = tiny_run(FAULT_AT=operation.number, FAULT_DO=error, FAULT_STICKY=sticky)
            # A directory that is there already needs no making.
            ended_well = operation.call == "mkdir" and done.codes == [0]
            assert ended_well or done.codes[0] > 0, f"{operation}: {done.running.output()}"
            check_whole_or_absent(done, sound)
            assert (done.out / "adapter").exists() or not ended_well
            assert len(done.running.err().splitlines()) <= 1, done.running.err()
            if not LONG:
                break


@pytest.mark.parametrize("part", range(2 if LONG else 1))
def test_short_writes_are_completed(part, sound, tiny_run):
    for operation in chosen(sound, part, 2, r"p?writev?|sendfile"):
        done = tiny_run(FAULT_AT=operation.number, FAULT_DO="short")
        assert done.codes == [0], f"{operation}: {done.running.output()}"
        check_whole_or_absent(done, sound)


def test_next_run_clears_what_a_killed_one_left(sound, tiny_run):
    middle = sound.saving[len(sound.saving) // 2]
    killed = tiny_run(FAULT_AT=middle.number, FAULT_DO="kill")
    assert (killed.out / ".adapter.tmp").is_dir()
    done = tiny_run("--overwrite_output_dir", home=killed.home)
    assert done.codes == [0], done.running.output()
    assert sorted(os.listdir(done.out)) == sorted(os.listdir(sound.out))
    check_whole_or_absent(done, sound)


@pytest.fixture(scope="module")
def renaming_of_two(tiny_run):
    """The number of the operation by which two ranks' adapter gets its name."""
    undisturbed = tiny_run(ranks=2, FAULT_RANK=0)
    assert undisturbed.codes == [0, 0], undisturbed.running.output()
    return renaming(operations(undisturbed.log)).number


@pytest.mark.parametrize("action", ["kill", "EIO"] if LONG else ["EIO"])
def test_other_rank_ends_when_the_writer_does(action, tiny_run, renaming_of_two):
    done = tiny_run(ranks=2, FAULT_RANK=0, FAULT_AT=renaming_of_two, FAULT_DO=action)
    assert done.codes[0] == -signal.SIGKILL if action == "kill" else done.codes[0] > 0
    assert done.codes[1] > 0
    assert not (done.out / "adapter").exists()
