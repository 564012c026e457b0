"""Step 1 killed again and again: at random instants, and at each operation of a save.

Whatever the instant, the same command goes on from the newest checkpoint and ends as a run that
nobody killed does, to the bit. A long run does it 200 times.
"""

import math
import random
import re
import shutil
import signal
import time
from contextlib import suppress
from functools import cache
from itertools import cycle, product
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

pytestmark = pytest.mark.stage

STEPS, INTERVAL = 15, 3
COMMAND = f"""
    --max_steps {STEPS} --save_interval {INTERVAL} --save_total_limit 2 --eval_interval 6
    --lora_dropout 0.1 --resume_from_checkpoint auto
""".split()
SETTINGS = {"1 rank": (1, 0), "2 ranks, ZeRO 0": (2, 0), "2 ranks, ZeRO 2": (2, 2)}
KILLS = {"1 rank": 150, "2 ranks, ZeRO 0": 25, "2 ranks, ZeRO 2": 25} if LONG else {"1 rank": 2}
# When to kill: at any time; at or after a file operation; while a save or the export goes on.
AIMS = ("operation", "save", "any", "export", "operation", "any", "save", "any")
STAGED = {"save": "checkpoints/.step-*.tmp", "export": ".adapter.tmp"}
LONGEST_SAVE = 0.03  # seconds on two busy cores; later is a kill during training


@pytest.fixture(scope="module")
def undisturbed(launcher, tmp_path_factory):
    """``undisturbed(setting)``: a run of it that nobody killed.

    It has ``operations`` below its checkpoints, seconds until its first step as ``start``, and
    those from then to its adapter as ``rest``.
    """

    @cache
    def of(setting):
        home = tmp_path_factory.mktemp("whole")
        out, log = home / "out", home / "log"
        faults = {"FAULT_PATH": out / "checkpoints", "FAULT_LOG": log, "FAULT_RANK": 0}
        running = launcher.start(argv_of(setting), home, ranks=SETTINGS[setting][0], env=faults)
        times = [time.monotonic()]
        for is_there in (lambda: trained_steps(out), lambda: (out / "adapter").exists()):
            wait_until(is_there, running)
            times.append(time.monotonic())
        assert not any(running.wait()), running.output()
        start, rest = times[1] - times[0], times[2] - times[1]
        return SimpleNamespace(out=out, operations=len(operations(log)), start=start, rest=rest)

    return of


def argv_of(setting):
    return [*TINY, *COMMAND, "--zero_stage", SETTINGS[setting][1]]


def kill_once(running, aim, out, whole, rng, share_left):
    """Whether all ranks were killed before the command ended by itself."""
    before = staged(out, aim)
    deadline = math.inf
    if aim == "any":
        deadline = time.monotonic() + rng.uniform(0, whole.start + whole.rest * share_left)
    while time.monotonic() < deadline:
        codes = running.codes()
        if codes[0] == -signal.SIGKILL:
            running.kill()
            return True
        if None not in codes:
            return False
        if deadline == math.inf and staged(out, aim) - before:
            deadline = time.monotonic() + rng.uniform(0, LONGEST_SAVE)
        time.sleep(0.001)
    return any(running.kill())


def staged(out, aim):
    """What is being written of what ``aim`` waits for, by inode."""
    inodes = set()
    for path in out.glob(STAGED.get(aim, "nothing")):
        with suppress(FileNotFoundError):  # it has its name, or is gone
            inodes.add(path.stat().st_ino)
    return inodes


@pytest.mark.parametrize("setting", KILLS)
def test_killed_at_random_instants_it_goes_on_and_ends_as_if_it_never_was(
    setting, undisturbed, launcher, tmp_path
):
    whole, rng, aims = undisturbed(setting), random.Random(setting), cycle(AIMS)
    ranks, out, kills, starts = SETTINGS[setting][0], tmp_path / "out", 0, 0
    aim, is_finished = next(aims), False
    while kills < KILLS[setting] or not is_finished:
        starts += 1
        assert starts < 5 * KILLS[setting] + 20, f"only {kills} kills"
        if is_finished:
            shutil.rmtree(out)
        newest = max(valid_checkpoints(out), default=0)
        faults, share_left = {}, 1 - newest / STEPS
        if kills >= KILLS[setting]:
            aim = "never"
        if aim == "operation":
            faults = {
                "FAULT_PATH": out / "checkpoints",
                "FAULT_AT": rng.randint(1, max(1, round(whole.operations * share_left))),
                "FAULT_DO": rng.choice(["kill", "kill-after"]),
                "FAULT_RANK": 0,
            }
        running = launcher.start(argv_of(setting), tmp_path, ranks=ranks, env=faults)
        is_killed = kill_once(running, aim, out, whole, rng, share_left)
        codes, said = running.wait(), running.out()
        assert not broken_checkpoints(out)
        # It went on from the newest checkpoint, if it came that far, and lost none.
        assert "rejected" not in said, said
        if begun := re.search(r"resuming from \S+/step-(\d+),|(starting from scratch)", said):
            assert int(begun[1] or 0) == newest, said
        later = max(valid_checkpoints(out), default=0)
        assert later >= newest
        is_finished = not is_killed
        if is_killed:
            kills, aim = kills + 1, next(aims)
            assert trained_steps(out) - later <= INTERVAL
        else:
            assert codes == [0] * ranks, f"{codes} {running.output()}"
            check_same_end(out, whole.out)


# ------------------------------------------------------------------------- every operation

SHORT = """
    --max_steps 6 --save_interval 2 --save_total_limit 1 --eval_interval 3 --lora_dropout 0.1
""".split()
BELOW = "/out/checkpoints"
RESUME = ["--output_dir", "out", "--resume_from_checkpoint", "latest"]
AUTO = ["--resume_from_checkpoint", "auto"]
TRIALS = 4 if LONG else 1


@pytest.fixture(scope="module")
def whole(tiny_run):
    """A run that nobody killed, and the operations of its second save, with the rotation."""
    done = tiny_run(*SHORT, FAULT_PATH=BELOW)
    assert done.codes == [0], done.running.output()
    done.saving = operations_of_second_save(done.log)
    return done


def test_second_save_is_written_then_named_then_the_first_is_deleted(whole):
    calls = [each.relative_to(whole.out / "checkpoints") for each in whole.saving]
    named = calls.index("rename .step-00000004.tmp -> step-00000004")
    rotated = calls.index("rename step-00000002 -> .step-00000002.deleted")
    assert named < rotated
    assert all(".step-00000004.tmp" in call for call in calls[:named])
    assert len(calls) > 20


# In a long run each operation, before and after it; else some before and others after.
@pytest.mark.parametrize("part", range(TRIALS))
def test_killed_at_any_operation_of_a_save_it_ends_as_if_it_never_was(part, whole, tiny_run):
    points = spread(product(whole.saving, ["kill", "kill-after"]), TRIALS)
    renaming = next(o.number for o in whole.saving if o.other.endswith("/step-00000004"))
    for operation, action in points[part::TRIALS]:
        killed = tiny_run(*SHORT, FAULT_PATH=BELOW, FAULT_AT=operation.number, FAULT_DO=action)
        assert killed.codes == [-signal.SIGKILL], operation
        assert not broken_checkpoints(killed.out), operation
        is_named = operation.number + (action == "kill-after") > renaming
        assert max(valid_checkpoints(killed.out)) == (4 if is_named else 2), operation
        done = tiny_run(base=RESUME, home=killed.home)
        assert done.codes == [0], f"{operation}: {done.running.output()}"
        check_same_end(done.out, whole.out)


# ------------------------------------------------------------------------- every start


@pytest.fixture(scope="module")
def left_behind(whole, tiny_run):
    """``left_behind(step)``: where a run was killed in a save, and what its next start does."""

    @cache
    def of(step):
        number = next(o.number for o in operations(whole.log) if o.concerns(f"{step}.tmp/state"))
        killed = tiny_run(*SHORT, FAULT_PATH=BELOW, FAULT_AT=number, FAULT_DO="kill")
        assert max(valid_checkpoints(killed.out), default=0) == step - 2
        home = killed.home.with_name(f"{killed.home.name}-next")
        shutil.copytree(killed.home, home)
        counted = operations(tiny_run(*SHORT, *AUTO, home=home).log)
        begun = next(
            n for n, o in enumerate(counted) if o.call == "write" and o.concerns("metrics.jsonl")
        )
        return SimpleNamespace(home=killed.home, starting=counted[:begun])

    return of


STARTS = [(4, 0), (2, 0), (2, 1)]


@pytest.mark.parametrize(("step", "part"), STARTS if LONG else STARTS[:1], ids="{}".format)
def test_killed_at_any_operation_of_a_start_it_can_start_again(
    step, part, left_behind, whole, tiny_run, tmp_path
):
    parts = {2: 2, 4: 1}[step]
    left = left_behind(step)
    for operation in spread(left.starting, parts)[part::parts]:
        home = tmp_path / str(operation.number)
        shutil.copytree(left.home, home)
        killed = tiny_run(
            *SHORT, *AUTO, home=home, FAULT_AT=operation.number, FAULT_DO="kill-after"
        )
        assert killed.codes == [-signal.SIGKILL], operation
        done = tiny_run(*SHORT, *AUTO, home=home)
        assert done.codes == [0], f"{operation}: {done.running.output()}"
        check_same_end(done.out, whole.out)
