"""No thread of a process group outlives it: at the interpreter's end it would abort the process."""

from pathlib import Path

import pytest

from dschat_lora.engine.build import TrainEngine
from dschat_lora.engine.process_group import shutdown
from dschat_lora.runtime.setup import shard_model
from helpers.forkserver import group_threads
from helpers.launcher import THREADS_LEFT
from helpers.runs import engine_settings
from helpers.states import Toy, toy_groups, toy_loss

pytestmark = pytest.mark.stage


def threads_left(stages):
    """Threads of gloo after engines that took steps at these ZeRO stages, and the group, ended."""
    for stage in stages:
        _train_a_toy(stage)
    before = group_threads()
    shutdown()
    return {"before": len(before), "after": group_threads()}


def _train_a_toy(stage):
    model, settings = Toy(), engine_settings(stage=stage)
    shard_model(model, settings)
    engine = TrainEngine(model, toy_groups(model), settings)
    for step in range(3):  # from the second on ZeRO 3 knows the order of modules
        engine.backward(toy_loss(engine, step), last=True)
        engine.step()


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="threads are listed in /proc")
def test_no_thread_of_a_group_is_left_when_it_ends(fresh_ranks):
    reports = fresh_ranks(2).run("engine.test_shutdown:threads_left", stages=[0, 1, 2, 3])
    for report in reports:
        assert report["before"] > 0
        assert report["after"] == []


def test_no_thread_of_a_group_is_left_after_a_mistake_that_is_found_in_a_checkpoint(
    launcher, tmp_path
):
    (tmp_path / "rows.jsonl").write_text('{"text": "abc"}\n' * 4, encoding="utf-8")
    argv = ["--data_path", "rows.jsonl", "--eval_ratio", 0, "--per_device_train_batch_size", 1]
    argv += ["--resume_from_checkpoint", "auto", "--output_dir", "out", "--max_steps"]
    for steps, code in ((2, 0), (1, 2)):
        running = launcher.start([*argv, steps], tmp_path, script=THREADS_LEFT)
        assert running.wait() == [code], running.output()
        assert running.out().splitlines()[-1] == "[]"
    assert "end the run at step 1" in running.err()
