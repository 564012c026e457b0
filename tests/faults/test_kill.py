"""Step 1 killed again and again: at random instants, and at each operation of a save.

Whatever the instant, the same command goes on from the newest checkpoint and ends as a run that
nobody killed does, to the bit. A long run does it 200 times and writes a table to the file that
FAULTS_REPORT names, or to standard output.
"""

import math
import os
import random
import re
import shutil
import signal
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from functools import cache
from itertools import count, cycle, product
from pathlib import Path
from types import SimpleNamespace

import pytest
from harness import (
    LONG,
    TINY,
    broken_checkpoints,
    check_same_end,
    operations,
    spread,
    trained_steps,
    valid_checkpoints,
    wait_until,
)

pytestmark = pytest.mark.stage

STEPS, INTERVAL, KEPT = 15, 3, 2
COMMAND = f"""
    --max_steps {STEPS} --save_interval {INTERVAL} --save_total_limit {KEPT} --eval_interval 6
    --lora_dropout 0.1 --resume_from_checkpoint auto
""".split()
SETTINGS = {"1 rank": (1, 0), "2 ranks, ZeRO 0": (2, 0), "2 ranks, ZeRO 2": (2, 2)}
# in a short run and in a long one
KILLS = {"1 rank": (2, 150), "2 ranks, ZeRO 0": (0, 25), "2 ranks, ZeRO 2": (0, 25)}
# When to kill: at any time; at or after a file operation; while a save or the export goes on.
AIMS = ("operation", "save", "any", "export", "operation", "any", "save", "any")
LONGEST_SAVE = 0.03  # seconds on two busy cores; later is a kill during training


@dataclass
class Tally:
    """What became of the kills of one setting."""

    kills: int = 0
    starts: int = 0
    fresh: int = 0
    finished: int = 0
    refused: list = field(default_factory=list)
    broken: list = field(default_factory=list)
    vanished: list = field(default_factory=list)
    losses: Counter = field(default_factory=Counter)
    places: Counter = field(default_factory=Counter)

    def table(self, name):
        """For a person."""
        rows = [
            ("kills", self.kills),
            ("starts", f"{self.starts}, of which {self.fresh} before a first checkpoint"),
            ("chains that reached the end, bit for bit", self.finished),
            ("resumes refused", len(self.refused)),
            ("broken under a valid name", len(self.broken)),
            ("complete and then lost", len(self.vanished)),
            ("steps lost (save interval 3)", _counts(sorted(self.losses.items()))),
            ("killed", _counts(self.places.most_common())),
        ]
        return "\n".join([f"-- {name}", *(f"  {key:<42}{value}" for key, value in rows), ""])


def _counts(pairs):
    return ", ".join(f"{name}: {count}" for name, count in pairs)


def report(text):
    """Append to the file of FAULTS_REPORT, or show."""
    path = os.environ.get("FAULTS_REPORT")
    if path:
        with Path(path).open("a", encoding="utf-8") as file:
            file.write(text)
    else:
        sys.stdout.write("\n" + text)


@dataclass(frozen=True)
class Whole:
    """A run that nobody killed."""

    out: Path
    operations: int  # below its checkpoints
    start: float  # seconds until its first step
    rest: float  # seconds from then to its adapter


@pytest.fixture(scope="module")
def undisturbed(launcher, tmp_path_factory):
    """``undisturbed(setting)``: a run of it that nobody killed."""

    @cache
    def of(setting):
        home = tmp_path_factory.mktemp("whole")
        out, log = home / "out", home / "log"
        faults = {"FAULT_PATH": out / "checkpoints", "FAULT_LOG": log, "FAULT_RANK": 0}
        running = launcher.start(argv_of(setting), home, ranks=SETTINGS[setting][0], env=faults)
        begun = time.monotonic()
        wait_until(lambda: trained_steps(out), running)
        first = time.monotonic()
        wait_until(lambda: (out / "adapter").exists(), running)
        saved = time.monotonic()
        assert not any(running.wait()), running.output()
        return Whole(out, len(operations(log)), first - begun, saved - first)

    return of


def argv_of(setting):
    return [*TINY, *COMMAND, "--zero_stage", SETTINGS[setting][1]]


class Chain:
    """An output directory in which one command is started and killed until it finishes."""

    def __init__(self, setting, home, *, launcher, whole, tally, rng):
        self.setting, self.home, self.out = setting, home, home / "out"
        self._launcher, self._whole, self._tally, self._rng = launcher, whole, tally, rng

    def link(self, aim):
        """Start once; whether the kill came before the end, and whether the run is finished."""
        tally, before = self._tally, self._look()
        tally.starts += 1
        tally.fresh += not before["valid"]
        running = self._start(aim, before)
        killed = self._kill(running, aim, before)
        codes = running.wait()
        after = self._look()
        tally.broken += [f"{self.home} {each}" for each in broken_checkpoints(self.out).items()]
        if max(after["valid"], default=0) < max([*before["valid"], *before["seen"]], default=0):
            tally.vanished.append(f"{self.home}: {before} then {after}")
        self._check_beginning(running, before)
        if not killed:
            if codes != [0] * len(codes):
                tally.refused.append(f"{self.home}: {codes} {running.output()[-1500:]}")
                return False, True
            check_same_end(self.out, self._whole.out)
            tally.finished += 1
            return False, True
        tally.kills += 1
        tally.losses[trained_steps(self.out) - max(after["valid"], default=0)] += 1
        tally.places[self._place(running, before, after)] += 1
        return True, False

    def _start(self, aim, before):
        faults = {}
        if aim == "operation":
            to_come = max(1, round(self._whole.operations * _share_left(before)))
            faults = {
                "FAULT_PATH": self.out / "checkpoints",
                "FAULT_AT": self._rng.randint(1, to_come),
                "FAULT_DO": self._rng.choice(["kill", "kill-after"]),
                "FAULT_RANK": 0,
            }
        ranks = SETTINGS[self.setting][0]
        return self._launcher.start(argv_of(self.setting), self.home, ranks=ranks, env=faults)

    def _kill(self, running, aim, before):
        """Whether all ranks were killed before the command ended by itself."""
        deadline = math.inf
        if aim == "any":
            longest = self._whole.start + self._whole.rest * _share_left(before)
            deadline = time.monotonic() + self._rng.uniform(0, longest)
        while time.monotonic() < deadline:
            codes = running.codes()
            if codes[0] == -signal.SIGKILL:
                running.kill()
                return True
            if None not in codes:
                return False
            if deadline == math.inf and self._is_near(aim, before):
                deadline = time.monotonic() + self._rng.uniform(0, LONGEST_SAVE)
            time.sleep(0.001)
        before["seen"] = [step for step, _ in _named(self.out)]
        return any(running.kill())

    def _is_near(self, aim, before):
        endings = {"save": r"\.step-\d+\.tmp", "export": r"\.adapter\.tmp"}
        if aim not in endings:
            return False
        new = _unfinished(self.out).items() - before["unfinished"].items()
        return any(re.fullmatch(endings[aim], name) for name, _ in new)

    def _look(self):
        return {
            "valid": sorted(valid_checkpoints(self.out)),
            "seen": [],
            "unfinished": _unfinished(self.out),
        }

    def _check_beginning(self, running, before):
        """It went on from the newest checkpoint, if it came that far."""
        said = running.out()
        assert "rejected" not in said, said
        begun = re.search(r"going on from \S+/step-(\d+),|(a fresh start)", said)
        if begun:
            newest = max(before["valid"], default=0)
            assert (int(begun[1]) if begun[1] else 0) == newest, said

    def _place(self, running, before, after):
        """Where in the run the kill came, from what it said and left."""
        new = dict(after["unfinished"].items() - before["unfinished"].items())
        staged = next((name for name in new if re.fullmatch(r"\.step-\d+\.tmp", name)), None)
        newest = max(after["valid"], default=0)
        if ".adapter.tmp" in new:
            return "export"
        if any(name.endswith(".deleted") for name in new):
            return "rotation"
        if staged is not None:
            complete = self.out / "checkpoints" / staged / "manifest.json"
            return "between staging and name" if complete.exists() else "writing a checkpoint"
        if newest > max(before["valid"], default=0) and len(after["valid"]) > KEPT:
            return "between name and rotation"
        if newest == STEPS:
            return "after the last step"
        has_trained = re.search(r"^step +\d+/", running.out(), re.MULTILINE)
        return "training" if has_trained else "start-up"


def _named(out):
    directory = out / "checkpoints"
    names = os.listdir(directory) if directory.is_dir() else []
    return [(int(name[5:]), name) for name in names if re.fullmatch(r"step-\d{8}", name)]


def _unfinished(out):
    """``{name: identity}`` of what is being written or deleted."""
    found = {}
    for directory in (out, out / "checkpoints"):
        for name in os.listdir(directory) if directory.is_dir() else []:
            if re.fullmatch(r"\.[^.]+\.(tmp|old|deleted)", name):
                try:
                    status = (directory / name).stat()
                except FileNotFoundError:
                    continue  # it has its name, or is gone
                found[name] = (status.st_ino, status.st_mtime_ns)
    return found


def _share_left(before):
    return 1 - max(before["valid"], default=0) / STEPS


def kill_again_and_again(setting, number, *, launcher, whole, home):
    """The tally after so many kills, the last chain finished."""
    tally, rng = Tally(), random.Random(f"{setting} {number}")
    aims, chain = cycle(AIMS), None
    aim = next(aims)
    for attempt in count():
        if tally.kills >= number and chain is None:
            return tally
        assert attempt < 5 * number + 20, f"only {tally.kills} kills in {attempt} starts"
        if chain is None:
            directory = home / f"chain-{attempt}"
            directory.mkdir()
            chain = Chain(setting, directory, launcher=launcher, whole=whole, tally=tally, rng=rng)
        killed, ended = chain.link(aim if tally.kills < number else "never")
        if killed:
            aim = next(aims)
        if ended:
            shutil.rmtree(chain.home)
            chain = None


@pytest.mark.parametrize("setting", [name for name in SETTINGS if KILLS[name][LONG]])
def test_killed_at_random_instants_it_goes_on_and_ends_as_if_it_never_was(
    setting, undisturbed, launcher, tmp_path
):
    number = KILLS[setting][LONG]
    tally = kill_again_and_again(
        setting, number, launcher=launcher, whole=undisturbed(setting), home=tmp_path
    )
    report(tally.table(setting))
    assert not tally.refused
    assert not tally.broken
    assert not tally.vanished
    assert tally.kills == number
    assert max(tally.losses) <= INTERVAL, tally.losses


def test_numbers_of_kills_in_a_long_run():
    assert sum(long for _, long in KILLS.values()) == 200


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


def operations_of_second_save(log):
    """From its directory's making to the first's being gone."""
    counted = operations(log)
    begins = next(n for n, o in enumerate(counted) if o.path.endswith("/.step-00000004.tmp"))
    ends = next(n for n, o in enumerate(counted) if o.call == "rmdir" and "02.deleted" in o.path)
    assert begins < ends
    return counted[begins : ends + 1]


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
