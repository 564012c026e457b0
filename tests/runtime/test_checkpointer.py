"""When a run's state is saved, what is in it, and how a run that must end says so."""

import contextlib
import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from dschat_lora.checkpoint.history import step_directory
from dschat_lora.config.options import build_config
from dschat_lora.config.stages import SupervisedConfig
from dschat_lora.config.staging import occupied
from dschat_lora.engine import distributed
from dschat_lora.report.log import RunLog
from dschat_lora.report.record import RunRecord
from dschat_lora.runtime import checkpointer as keeper_module
from dschat_lora.runtime.caller import NOBODY, Caller
from dschat_lora.runtime.checkpointer import Checkpointer, how_to_go_on
from dschat_lora.runtime.signals import Interrupts, Stopped
from helpers.step1 import ROOT

OPTIONS = {"save_interval": 3, "save_minutes": 10.0, "lora_dim": 4, "output_dir": "out"}
IDENTITY = {
    "model": "aa", "tokenizer": "bb", "train_data": "cc", "eval_data": "dd",
    "dtype": "fp32", "packing": True, "rows": 40, "rows_per_step": 16,
}  # fmt: skip
NOTHING = [0.0, 0.0, 0.0]
STOP, DUE, FAILED = [1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]


@pytest.fixture(autouse=True)
def one_process(monkeypatch, tmp_path):
    """Collectives of a single process that has joined no group."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(distributed, "max_over_ranks", lambda value: value)
    monkeypatch.setattr(keeper_module, "max_over_ranks", lambda value: value)
    monkeypatch.setattr(keeper_module, "broadcast_string", lambda fact: fact)


@pytest.fixture
def clock(monkeypatch):
    """``clock.now``: seconds, as the keeper reads them."""
    moment = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(keeper_module.time, "monotonic", lambda: moment.now)
    return moment


class StubSaver:
    """Takes note of what is saved, and has no disk."""

    def __init__(self, run, *, keep, before_commit):
        self.keep, self.before_commit = keep, before_commit
        self.saved, self.states, self.waits, self.patience = [], [], 0, []
        self.failure = self.committed = None
        self.notes = []
        self.drains = 0

    def save(self, step, tensors, state, *, patience=0.0):
        self.saved.append(step)
        self.states.append({"tensors": {n: dict(t) for n, t in tensors.items()}, **state})
        self.patience.append(patience)
        self.committed = Path(f"step-{step}")

    def drain(self):
        self.drains += 1

    def wait(self):
        self.waits += 1
        if self.failure is not None:
            raise self.failure


class Engine:
    """Stands for an engine's state."""

    def __init__(self, value=0.0):
        self.value = torch.full((3,), value)

    def facts(self):
        return {"optimizer_steps": {"w": 2}}

    def tensors(self):
        yield "weight:w", self.value.clone()

    def load(self, facts, read):
        assert facts == {"optimizer_steps": {"w": 2}}
        self.value = read("weight:w")


class Part:
    def __init__(self, held):
        self.held = held

    def state(self):
        return {"held": self.held}

    def restore(self, state):
        self.held = state["held"]


@contextlib.contextmanager
def made(
    directory=None,
    *,
    engine=None,
    part=None,
    identity=IDENTITY,
    checkpoint="",
    on_checkpoint=None,
    **options,
):
    """A keeper of a run in ``directory``, with a real log and record."""
    directory = directory or Path("out")
    directory.mkdir(exist_ok=True)
    config = build_config(SupervisedConfig, OPTIONS | {"output_dir": str(directory)} | options)
    object.__setattr__(config, "checkpoint", str(checkpoint))
    earlier = bool(checkpoint) and Path(checkpoint).parent.parent == directory.absolute()
    with RunLog(directory, active=True, earlier=earlier) as log, contextlib.ExitStack() as closing:
        run = SimpleNamespace(
            config=config,
            directory=directory,
            log=log,
            record=RunRecord(directory, active=True, earlier=earlier),
            interrupts=Interrupts(),
            closing=closing,
            caller=NOBODY,
            stage="sft",
        )
        checkpointer = Checkpointer(
            run,
            engines={"model": engine or Engine()},
            parts={"part": part or Part(0)},
            identity=identity,
            on_checkpoint=on_checkpoint,
        )
        checkpointer.run = run
        yield checkpointer


@pytest.fixture
def stubbed(monkeypatch):
    """``stubbed(**options)``: a keeper whose saver has no disk, and that saver."""
    monkeypatch.setattr(keeper_module, "Saver", StubSaver)
    with contextlib.ExitStack() as stack:

        def make(**options):
            checkpointer = stack.enter_context(made(**options))
            return checkpointer, checkpointer._saver

        yield make


def go(checkpointer, steps, *, skipped=(), last=None, requests=()):
    """Steps of a run; those after which something was saved."""
    return [
        step
        for step in steps
        if checkpointer.after_step(
            step, dict(requests).get(step, NOTHING), skipped=step in skipped, last=step == last
        )
    ]


# ---------------------------------------------------------------------------- when


@pytest.mark.parametrize(
    ("options", "steps", "how", "saved"),
    [
        ({}, 10, {}, [3, 6, 9]),
        ({}, 4, {"last": 4}, [3, 4]),
        ({}, 3, {"last": 3}, [3]),
        ({"save_interval": 0, "save_minutes": 0.0}, 10, {"last": 10}, []),
        ({"save_interval": 0}, 7, {"last": 7}, [7]),
        ({}, 6, {"requests": {2: DUE}}, [2, 3, 6]),
        ({}, 8, {"skipped": (3, 4)}, [5, 6]),
        ({}, 6, {"skipped": (2, 4), "requests": {2: DUE}}, [3, 6]),
        ({}, 5, {"skipped": (3, 4, 5), "last": 5}, [5]),
    ],
    ids=[
        "every interval",
        "the last step",
        "the last step at an interval, once",
        "neither by steps nor by time",
        "by time alone: the last step",
        "when time asks for it",
        "a skipped step is owed to the next good one",
        "so is one that time asks for",
        "a skipped last step",
    ],
)
def test_state_is_saved(stubbed, options, steps, how, saved):
    checkpointer, saver = stubbed(**options)
    assert go(checkpointer, range(1, steps + 1), **how) == saver.saved == saved
    told = checkpointer.run.record._content.get("checkpoints", {})
    assert told.get("saved") == (len(saved) if saved and "last" in how else None)
    # before each, and for the last
    assert saver.waits == len(saved) + bool(saved and "last" in how)


def test_what_belongs_beside_a_checkpoint_is_written_before_it(stubbed):
    there = []
    checkpointer, saver = stubbed(
        on_checkpoint=lambda step: there.append((step, list(saver.saved)))
    )
    go(checkpointer, range(1, 8))
    assert there == [(3, []), (6, [3])]


def test_save_is_due_by_the_minutes_since_the_last_one(stubbed, clock):
    checkpointer, _ = stubbed(save_minutes=0.5)
    assert checkpointer.requests() == NOTHING
    clock.now += 29.9
    assert checkpointer.requests() == NOTHING
    clock.now += 0.1
    assert checkpointer.requests() == DUE
    assert go(checkpointer, [1], requests={1: checkpointer.requests()}) == [1]
    clock.now += 29.0
    assert checkpointer.requests() == NOTHING
    clock.now += 1.0
    assert checkpointer.requests() == DUE
    checkpointer._options = replace(checkpointer._options, save_minutes=0.0)
    assert checkpointer.requests() == NOTHING


def test_saving_waits_for_one_percent_of_the_time_to_the_next_save(stubbed, clock):
    checkpointer, saver = stubbed()
    clock.now += 6.0
    checkpointer.save(3)  # two seconds a step: 500 of them are 1000 s, but 600 s come first
    clock.now += 0.6
    checkpointer.save(66)  # a tenth of a second a step
    assert saver.patience == pytest.approx([6.0, 0.5])


def test_saver_is_told_the_limit_and_to_bring_the_log_to_disk(stubbed):
    checkpointer, saver = stubbed(save_total_limit=7)
    assert saver.keep == 7
    assert saver.before_commit == checkpointer.run.log.sync


def test_notes_of_the_saver_are_shown(stubbed, capsys):
    checkpointer, saver = stubbed()
    saver.notes.append("an old checkpoint could not be deleted")
    checkpointer.save(1)
    assert capsys.readouterr().out == ("  note         an old checkpoint could not be deleted\n")
    assert saver.notes == []


# ---------------------------------------------------------------------------- the end


def stopped(checkpointer, step):
    with pytest.raises(Stopped) as ended:
        checkpointer.stop(step)
    return ended.value.code


def test_run_that_was_told_to_stop_ends_after_the_step_it_has_saved(stubbed, capsys):
    checkpointer, saver = stubbed()
    go(checkpointer, [1])
    checkpointer.run.interrupts.received = 15
    assert checkpointer.requests() == STOP
    assert checkpointer.is_stopping(checkpointer.requests())
    with pytest.raises(Stopped) as ended:
        checkpointer.after_step(2, checkpointer.requests(), skipped=False, last=False)
    assert ended.value.code == 143
    assert saver.saved == [2]
    assert saver.waits == 2  # before, and for what was saved
    assert capsys.readouterr().out == (
        "stopped by SIGTERM after step 2; resume with: dschat-lora sft --output_dir out "
        "--resume_from_checkpoint latest\n"
    )
    assert checkpointer.run.record._content["status"] == "interrupted by SIGTERM at step 2"
    vars(checkpointer.run).update(stage="sft", caller=Caller(in_python=True, of_command=True))
    assert how_to_go_on(checkpointer.run) == (
        "resume with: dschat-lora sft --output_dir out --resume_from_checkpoint latest"
    )


def test_what_is_saved_already_is_not_saved_again(stubbed):
    checkpointer, saver = stubbed()
    go(checkpointer, [1, 2, 3])
    checkpointer.run.interrupts.received = 15
    assert stopped(checkpointer, 3) == 143
    assert saver.saved == [3]


def test_run_that_is_stopped_before_its_first_step_has_nothing_to_save(stubbed, capsys):
    checkpointer, saver = stubbed()
    checkpointer.run.interrupts.received = 2
    assert stopped(checkpointer, 0) == 130
    assert saver.saved == []
    assert capsys.readouterr().out == ("stopped by SIGINT after step 0; nothing was trained yet\n")


@pytest.mark.parametrize(("step", "skipped", "last"), [(1, True, False), (3, False, True)])
def test_step_on_the_way_out_is_saved_once_skipped_or_last(stubbed, step, skipped, last):
    checkpointer, saver = stubbed()
    checkpointer.run.interrupts.received = 2
    with pytest.raises(Stopped) as ended:
        checkpointer.after_step(step, STOP, skipped=skipped, last=last)
    assert (ended.value.code, saver.saved) == (130, [step])


@pytest.mark.parametrize(
    ("part", "failure", "words"),
    [
        ("saver", OSError(28, "No space left", "x"), "^x: No space left. There is no checkpoint"),
        ("saver", ValueError("step-4 was not written: w"), "^step-4 was not written: w. There is"),
        ("log", OSError(28, "No space left"), "No space left. There is no checkpoint yet"),
        ("record", OSError(28, "No space left", "run.json"), "run.json: No space left"),
    ],
)
def test_what_could_not_be_written_ends_the_run_before_a_signal_does(stubbed, part, failure, words):
    checkpointer, saver = stubbed()
    checkpointer.run.interrupts.received = 15
    {"saver": saver, "log": checkpointer.run.log, "record": checkpointer.run.record}[
        part
    ].failure = failure
    requests = checkpointer.requests()
    assert requests == [1.0, *FAILED[1:]]
    with pytest.raises(type(failure), match=words):
        checkpointer.after_step(4, requests, skipped=False, last=False)


def test_failed_disk_ends_the_run_by_name_and_with_the_last_good_checkpoint(stubbed):
    checkpointer, saver = stubbed()
    go(checkpointer, [1, 2, 3])
    saver.failure = OSError(28, "No space left on device", "out/checkpoints/x")
    assert checkpointer.requests() == FAILED
    assert checkpointer.is_stopping(FAILED)
    message = "^out/checkpoints/x: No space left on device. The newest valid checkpoint is step-3$"
    with pytest.raises(OSError, match=message):
        checkpointer.after_step(4, FAILED, skipped=False, last=False)
    assert saver.saved == [3]


def test_checkpoint_being_written_is_finished_whatever_ends_the_run(stubbed):
    checkpointer, saver = stubbed()
    checkpointer.run.closing.close()
    assert saver.drains == 1


def test_other_ranks_end_quietly_where_the_first_failed(stubbed):
    checkpointer, _ = stubbed()
    with pytest.raises(SystemExit) as ended:
        checkpointer.after_step(1, FAILED, skipped=False, last=False)
    assert ended.value.code == 1


# ---------------------------------------------------------------------------- what


def test_state_says_what_a_resumed_run_needs(stubbed):
    checkpointer, saver = stubbed(engine=Engine(2.5), part=Part(math.inf), seed=7)
    checkpointer.run.log.write("train", 1, {})
    checkpointer.save(1)
    (state,) = saver.states
    assert {k: state[k] for k in ("step", "identity", "engines", "parts")} == {
        "step": 1,
        "identity": IDENTITY | {"streams": keeper_module.STREAMS},
        "engines": {"model": {"optimizer_steps": {"w": 2}}},
        "parts": {"part": {"held": "inf"}},
    }
    assert state["options"] == {
        "save_interval": 3, "save_minutes": 10.0, "lora_dim": 4, "seed": 7
    }  # fmt: skip
    # By default, but a resumed run says from which number another rate departs.
    assert state["config"]["lora_learning_rate"] == 5e-4
    assert state["config"]["learning_rate"] == 5e-5
    assert state["log"]["num_lines"] == 1
    assert torch.equal(state["tensors"]["model"]["weight:w"], torch.full((3,), 2.5))
    json.dumps({name: value for name, value in state.items() if name != "tensors"})


@pytest.fixture
def earlier(tmp_path):
    """The checkpoint of step 2 in ``out``, of a run that went on to step 4."""
    with made(engine=Engine(2.5), part=Part("then")) as checkpointer:
        checkpointer.run.record.update({"status": "running"})
        for step in (1, 2):
            checkpointer.run.log.write("train", step, {})
        checkpointer.save(2)
        for step in (3, 4):
            checkpointer.run.log.write("train", step, {})
        checkpointer.save(4)
        checkpointer._saver.wait()
    return step_directory(tmp_path / "out", 2)


def contents(directory):
    return {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def steps_in(directory):
    text = (directory / "metrics.jsonl").read_text()
    return [json.loads(line)["step"] for line in text.splitlines()]


def test_restored_run_is_what_was_saved_and_its_directory_is_as_it_was_then(earlier, capsys):
    engine, part = Engine(), Part("now")
    with made(engine=engine, part=part, checkpoint=earlier) as checkpointer:
        checkpointer.restore()
        assert torch.equal(engine.value, torch.full((3,), 2.5))
        assert part.held == "then"
        assert steps_in(Path("out")) == [1, 2]
        assert sorted(path.name for path in earlier.parent.iterdir()) == [
            "step-00000002", "step-00000004.abandoned"
        ]  # fmt: skip
        assert "set aside: " in capsys.readouterr().out
        record = json.loads(Path("out/run.json").read_text())
        assert record["resumed"] == [{"step": 2, "checkpoint": str(earlier)}]
        assert record["status"] == "running"
        assert checkpointer.last_good() == f"The newest valid checkpoint is {earlier}"
        # It is saved: a signal before the next step leaves the checkpoint alone.
        before = earlier.stat().st_ino
        checkpointer.run.interrupts.received = 15
        assert stopped(checkpointer, 2) == 143
        assert earlier.stat().st_ino == before


def test_directory_stays_locked_while_a_run_goes_on_in_it(earlier):
    code = (
        "from pathlib import Path; from dschat_lora.report.directory import check_idle\n"
        "check_idle(Path('out'))"
    )
    process = {"env": {**os.environ, "PYTHONPATH": str(ROOT)}, "capture_output": True, "text": True}
    with made(checkpoint=earlier) as checkpointer:
        checkpointer.restore()
        other = subprocess.run([sys.executable, "-c", code], check=False, **process)
    assert "another run is writing to out" in other.stderr


def test_plan_that_ends_before_the_checkpoint_changes_nothing(earlier, tmp_path):
    files = contents(tmp_path / "out")
    with made(checkpoint=earlier) as checkpointer, pytest.raises(ValueError, match="after step 2"):
        checkpointer.restore(num_steps=1)
    assert contents(tmp_path / "out") == files


def test_file_that_the_manifest_does_not_list_is_not_read(earlier):
    (earlier / "model-00000.safetensors").write_bytes(b"something else")
    engine = Engine()
    with made(engine=engine, checkpoint=earlier) as checkpointer:
        checkpointer.restore()
    assert torch.equal(engine.value, torch.full((3,), 2.5))


def test_clock_of_a_restored_run_starts_when_it_is_restored(earlier, clock):
    with made(checkpoint=earlier) as checkpointer:
        clock.now += 1000.0  # a large model takes long to load
        checkpointer.restore()
        assert checkpointer.requests() == NOTHING
        clock.now += 2.0
        # Two seconds a step since then.
        assert checkpointer._patience(3) == pytest.approx(6.0)
        assert checkpointer._patience(4) == pytest.approx(5.0)


def test_run_restored_elsewhere_leaves_the_first_directory_alone(earlier, tmp_path):
    files = contents(tmp_path / "out")
    with made(tmp_path / "fork", checkpoint=earlier) as checkpointer:
        checkpointer.restore()
        assert steps_in(tmp_path / "fork") == [1, 2]
    assert contents(tmp_path / "out") == files


def test_other_identity_is_refused_before_anything_changes(earlier, tmp_path):
    files = contents(tmp_path / "out")
    engine, part = Engine(), Part("now")
    with made(
        engine=engine, part=part, checkpoint=earlier, identity=IDENTITY | {"model": "other"}
    ) as checkpointer:
        with pytest.raises(ValueError, match="the base model's weights"):
            checkpointer.restore()
        assert torch.equal(engine.value, torch.zeros(3))
        assert part.held == "now"
    assert contents(tmp_path / "out") == files


def test_fresh_run_has_nothing_to_restore(stubbed):
    checkpointer, _ = stubbed(part=(part := Part("now")))
    checkpointer.restore()
    assert part.held == "now"
    assert checkpointer.last_good() == "There is no checkpoint yet"
    checkpointer.save(1)
    assert checkpointer.last_good() == "The newest valid checkpoint is step-1"
    Path("home").mkdir()
    with occupied(Path("home")):
        checkpointer._saver.committed = Path("home/checkpoints/step-1")
        Path("home").rename("moved")
        Path("moved/checkpoints/step-1").mkdir(parents=True)
        assert checkpointer.last_good() == "The last checkpoint, step-1, was lost with it"


def test_state_of_several_shards_is_read_back(earlier, monkeypatch):

    class Large(Engine):
        def facts(self):
            return {"many": 9}

        def tensors(self):
            for index in range(9):
                yield f"weight:{index}", torch.full((4,), float(index))

        def load(self, facts, read):
            assert facts == {"many": 9}
            self.read = [float(read(f"weight:{index}")[0]) for index in range(9)]

    monkeypatch.setattr(keeper_module, "SHARD_BYTES", 32)
    with made(engine=Large()) as checkpointer:
        checkpointer.save(8)
        checkpointer._saver.wait()
    checkpoint = step_directory(earlier.parent.parent, 8)
    assert len(list(checkpoint.glob("*.safetensors"))) == 5
    engine = Large()
    with made(engine=engine, checkpoint=checkpoint) as checkpointer:
        checkpointer.restore()
    assert engine.read == [float(index) for index in range(9)]
