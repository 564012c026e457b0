"""Step 1 on a disk that is full, read-only, broken or not ours: one line, and nothing lost."""

import math
import os
import re
import shutil
import signal
import subprocess
import time
from functools import cache
from itertools import product
from types import SimpleNamespace

import pytest
from harness import (
    LONG,
    TINY,
    broken_checkpoints,
    check_same_end,
    operations,
    operations_of_second_save,
    spread,
    trained_steps,
    valid_checkpoints,
    wait_until,
)

from dschat_lora.config.addons import installed
from helpers.launcher import STEP1

pytestmark = pytest.mark.stage

STEPS = 6
RUN = f"""
    --max_steps {STEPS} --save_interval 2 --save_total_limit 1 --eval_interval 3
    --lora_dropout 0.1
""".split()
ERRORS = {
    "ENOSPC": "No space left on device",
    "EDQUOT": "Disk quota exceeded",
    "EIO": "Input/output error",
    "EROFS": "Read-only file system",
    "EACCES": "Permission denied",
}
# what to hit: (text in its paths, options, points in a short run, most in a long one)
PLACES = {
    "checkpoints": ("/out/checkpoints", [], 1, 99),
    "metrics": ("/out/metrics.jsonl", [], int(LONG), 8),
    "record": ("/out/run.json", [], int(LONG), 7),
}
if "trackers" in installed():
    PLACES["tensorboard"] = ("/out/tensorboard", ["--report_to", "tensorboard"], int(LONG), 6)
ELSEWHERE = "/nowhere"
MOST_SECONDS_UNTIL_ALL_RANKS_END = 20


@pytest.fixture(scope="module")
def whole(tiny_run):
    """``whole(place)``: a run on a good disk, and its operations there."""

    @cache
    def of(place):
        if place == "tensorboard":
            pytest.importorskip("tensorboard")
        text, options, *_ = PLACES[place]
        done = tiny_run(*RUN, *options, FAULT_PATH=text)
        assert done.codes == [0], done.running.output()
        return done

    return of


def operations_at(place, whole):
    """Those worth refusing: of the second save, with its rotation; all elsewhere."""
    log = whole(place).log
    return operations_of_second_save(log) if place == "checkpoints" else operations(log)


def check_refusal(done, error):
    """It ended with one line that says what was refused, and what there is to go on from."""
    said = done.running.output()
    assert done.codes[0] == 1, f"{done.codes} {said}"
    lines = done.running.err().splitlines()
    assert len(lines) == 1, said
    assert re.match(r"error: (\S+ )*out/", lines[0]), said
    assert error in lines[0], said
    assert not broken_checkpoints(done.out)
    valid = valid_checkpoints(done.out)
    if valid and trained_steps(done.out) < STEPS:
        named = re.search(r"The newest valid checkpoint is out/checkpoints/step-(\d+)$", lines[0])
        assert named, said
        assert int(named[1]) in valid, said


def check_goes_on(done, tiny_run, whole, *, ranks=1, options=()):
    """On a good disk the same directory ends as if nothing had been."""
    again = tiny_run(
        *(*RUN, *options, "--resume_from_checkpoint", "auto"),
        home=done.home,
        ranks=ranks,
        FAULT_PATH=ELSEWHERE,
    )
    assert not any(again.codes), again.running.output()
    check_same_end(again.out, whole.out)


def is_forgiven(operation):
    """What cannot be deleted may stay, and what is there need not be made."""
    is_made = operation.call == "mkdir" and operation.path.endswith("/checkpoints")
    return is_made or operation.concerns("/step-00000002") or operation.concerns(".deleted")


def trials(place, whole):
    """(operation, error, sticky): all in a long run, else one error after the other."""
    _, _, few, most = PLACES[place]
    points = operations_at(place, whole)
    if LONG:
        every = math.ceil(len(points) / most)
        return list(product(points[::every], ERRORS, ["1", ""]))
    names = list(ERRORS)
    return [
        (point, names[(number + len(place)) % len(names)], "1" if number % 2 else "")
        for number, point in enumerate(spread(points, few))
    ]


@pytest.mark.parametrize(
    ("place", "part"), [(place, n) for place, (_, _, few, _) in PLACES.items() for n in range(few)]
)
def test_refused_operation_is_one_line_and_the_run_goes_on_when_the_disk_does(
    place, part, whole, tiny_run
):
    text, options, few, _ = PLACES[place]
    for operation, error, sticky in trials(place, whole)[part::few]:
        done = tiny_run(
            *(*RUN, *options),
            FAULT_PATH=text,
            FAULT_AT=operation.number,
            FAULT_DO=error,
            FAULT_STICKY=sticky,
        )
        if done.codes == [0] and is_forgiven(operation):
            assert sorted(valid_checkpoints(done.out))[-1] == STEPS
        else:
            check_refusal(done, ERRORS[error])
            if place == "checkpoints":
                assert valid_checkpoints(done.out).keys() & {2, 4}
        check_goes_on(done, tiny_run, whole(place), options=options)


@pytest.mark.thorough
@pytest.mark.parametrize("place", ["checkpoints", "metrics"] if LONG else ["checkpoints"])
def test_other_rank_ends_soon_when_the_disk_of_the_writer_fails(place, whole, tiny_run):
    options = ["--zero_stage", "2", "--per_device_train_batch_size", "2"]
    sound = tiny_run(*RUN, *options, ranks=2, FAULT_PATH=PLACES[place][0], FAULT_RANK=0)
    assert sound.codes == [0, 0], sound.running.output()
    counted = operations(sound.log)
    (number,) = [o.number for o in counted if o.other.endswith("/step-00000004")] or [9]
    begun = time.monotonic()
    done = tiny_run(
        *(*RUN, *options),
        ranks=2,
        FAULT_PATH=PLACES[place][0],
        FAULT_RANK=0,
        FAULT_AT=number,
        FAULT_DO="EIO",
        FAULT_STICKY="1",
    )
    assert time.monotonic() - begun < MOST_SECONDS_UNTIL_ALL_RANKS_END
    check_refusal(done, ERRORS["EIO"])
    assert done.codes[1] > 0
    assert "Traceback" not in done.running.output(1)
    check_goes_on(done, tiny_run, sound, ranks=2, options=options)


# ----------------------------------------------------------------------------- real disks

KEEP_ALL = ["--save_total_limit", "0", "--max_steps", "12"]
# Root may write anywhere unless it gives that up, for good and for this process alone.
WITHOUT_PRIVILEGE = f"""
import ctypes, runpy
libc = ctypes.CDLL(None, use_errno=True)
header, data = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
assert libc.capget(header, data) == 0
for part in range(3):
    data[part] &= ~0b110  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH
assert libc.capset(header, data) == 0
runpy.run_path({str(STEP1)!r}, run_name="__main__")
"""


@pytest.fixture(scope="module")
def whole_of_all(tiny_run):
    """A longer run that keeps every checkpoint."""
    done = tiny_run(*RUN, *KEEP_ALL, FAULT_PATH=ELSEWHERE)
    assert done.codes == [0], done.running.output()
    return done


def mount(*options):
    done = subprocess.run(
        ["mount", *map(str, options)], capture_output=True, text=True, check=False
    )
    return done.stderr if done.returncode else None


@pytest.fixture
def small_disk(tmp_path):
    """A file system of two MiB."""
    if shutil.which("mount") is None or os.geteuid() != 0:
        pytest.skip("only root can mount a small disk")
    reason = mount("-t", "tmpfs", "-o", "size=2m", "none", tmp_path)
    if reason is not None:
        pytest.skip(f"a small disk cannot be mounted: {reason.strip()}")
    yield tmp_path
    subprocess.run(["umount", "--lazy", str(tmp_path)], check=True)


def test_disk_that_fills_up(small_disk, tiny_run, whole_of_all):
    done = tiny_run(*RUN, *KEEP_ALL, home=small_disk, FAULT_PATH=ELSEWHERE)
    check_refusal(done, ERRORS["ENOSPC"])
    assert valid_checkpoints(done.out)
    assert mount("-o", "remount,size=16m", small_disk) is None
    check_goes_on(done, tiny_run, whole_of_all, options=KEEP_ALL)


@pytest.mark.thorough
def test_directory_that_may_no_longer_be_written(tmp_path, launcher, tiny_run, whole_of_all):
    script = tmp_path / "script.py"
    script.write_text(WITHOUT_PRIVILEGE, encoding="utf-8")
    argv = [*TINY, *RUN, *KEEP_ALL]
    running = launcher.start(argv, tmp_path, script=script)
    out = tmp_path / "out"
    wait_until(lambda: valid_checkpoints(out), running)
    running.signal(signal.SIGSTOP)
    (out / "checkpoints").chmod(0o500)
    running.signal(signal.SIGCONT)
    done = SimpleNamespace(home=tmp_path, out=out, codes=running.wait(), running=running)
    (out / "checkpoints").chmod(0o700)
    check_refusal(done, ERRORS["EACCES"])
    check_goes_on(done, tiny_run, whole_of_all, options=KEEP_ALL)
