"""All stages by one command: stopped inside a stage, continued to the end, and skipped."""

import json
import signal
import subprocess
import sys
import time

import pytest

from dschat_lora.addons.pipeline import run as course
from helpers.launcher import ROOT

pytestmark = pytest.mark.stage

RECIPE = ROOT / "configs" / "recipes" / "bundled.yaml"
STAGES = ("sft", "reward", "rlhf")


@pytest.fixture(autouse=True)
def _with_this_package(own_directory, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


@pytest.fixture
def forked_stages(launcher, tmp_path, monkeypatch):
    """Stages start without the seconds that DeepSpeed's launcher and they take to import."""

    def run(relay, command):
        words = command[command.index("dschat_lora") + 1 :]
        running = launcher.start(words, tmp_path, script=ROOT / "dschat_lora" / "__main__.py")
        (code,) = running.wait()
        sys.stdout.write(running.output())
        return code

    monkeypatch.setattr(course.Relay, "run", run)


def steps_of(out, stage):
    path = out / stage / "metrics.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return [line["step"] for line in map(json.loads, lines) if line["kind"] == "train"]


def record(out, stage):
    return json.loads((out / stage / "run.json").read_text(encoding="utf-8"))


def times(out):
    return {path: path.stat().st_mtime_ns for path in out.glob("*/*")}


def test_stopped_in_a_stage_it_goes_on_to_the_end_and_then_has_nothing_to_do(
    tmp_path, forked_stages, capsys
):
    out = tmp_path / "out"
    words = ["pipeline", str(RECIPE), "--output_dir", "out", "--set", "sft.max_steps=400"]
    running = subprocess.Popen(
        [sys.executable, "-m", "dschat_lora", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    while len(steps_of(out, "sft")) < 2:
        assert running.poll() is None, running.communicate()
        time.sleep(0.02)
    running.send_signal(signal.SIGTERM)
    said, error = (text.decode() for text in running.communicate(timeout=60))
    done = len(steps_of(out, "sft"))
    assert running.returncode == 143, error
    how = "resume with: dschat-lora sft --output_dir out/sft"
    assert f"stopped by SIGTERM after step {done}; {how}" in said
    assert error.splitlines()[-1] == (
        f"error: stopped by SIGTERM in the stage sft; resume with: dschat-lora {' '.join(words)}"
    )
    assert record(out, "sft")["status"] == f"interrupted by SIGTERM at step {done}"

    again = {"output_dir": "out", "overrides": [f"sft.max_steps={done + 1}", "rlhf.max_steps=2"]}
    course.run_pipeline(str(RECIPE), **again)
    said = capsys.readouterr().out
    assert f"resuming from out/sft/checkpoints/step-{done:08d}" in said
    assert steps_of(out, "sft") == list(range(1, done + 2))
    assert [len(steps_of(out, stage)) for stage in ("reward", "rlhf")] == [3, 2]
    assert all(record(out, stage)["status"] == "finished" for stage in STAGES)
    assert record(out, "reward")["config"]["model_name_or_path"] == "out/sft"
    assert record(out, "rlhf")["config"]["critic_model_name_or_path"] == "out/reward"
    for line in ("sft: out/sft/adapter", "rlhf: out/rlhf/actor/adapter", "report: out/report.html"):
        assert line in said.splitlines()
    page = (out / "report.html").read_text(encoding="utf-8")
    assert all(f'id="stage-{number}"' in page for number in range(len(STAGES)))

    before = times(out)
    course.run_pipeline(str(RECIPE), **again)
    skipped = [f"stage {stage}: finished, skipped" for stage in STAGES]
    assert capsys.readouterr().out.splitlines()[:3] == skipped
    assert times(out) == before
