"""The page of extensions runs as it stands: five files of a user's, named and handed over."""

import json
import os
import re
import runpy
import subprocess
import sys
from importlib import import_module

import pytest

import dschat_lora as dl
from helpers.addons import of_the_whole
from helpers.launcher import ROOT
from helpers.step1 import write_jsonl

pytestmark = pytest.mark.stage

PAGE = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
ADDON = dict(re.findall(r"^```python\n# (brevity/\w+\.py)\n(.*?)^```$", PAGE, re.M | re.S))
FILES = dict(re.findall(r"^```python\n# (\w+\.py)\n(.*?)^```$", PAGE, re.M | re.S))
NAMED = re.findall(r"^dschat-lora rlhf .*(--\w+) (my_\w+:\w+)", PAGE, re.M)
SHORT = {
    "max_answer_seq_len": 32,
    "num_generations": 4,
    "per_device_generation_batch_size": 8,
    "per_device_training_batch_size": 8,
    "eval_prompts": 0,
    "eval_ratio": 0.0,
}


@pytest.fixture
def home(tmp_path, monkeypatch):
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def test_each_seam_has_an_example_of_25_lines_at_most_and_a_command():
    lines = {name: text.count("\n") for name, text in FILES.items()}
    assert lines.pop("all_together.py") <= 50
    assert max(lines.values()) <= 25
    options = ["rollout_engine", "environment", "reward_function", "algorithm", "parts"]
    assert [option.removeprefix("--") for option, _ in NAMED] == options
    assert [f"{name.partition(':')[0]}.py" for _, name in NAMED] == [*lines]


@of_the_whole
def test_five_named_on_the_command_line_are_five_objects_of_a_run_that_resumes(home, launcher):
    sums = [{"prompt": f"What is {n} plus 3?", "sum": n + 3} for n in range(8)]
    write_jsonl(home / "sums.jsonl", sums)
    argv = [word for pair in NAMED for word in pair]
    for name, value in {**SHORT, "max_steps": 2, "reward_weights": "1 0.2"}.items():
        argv += [f"--{name}", *str(value).split()]
    argv += ["--data_path", "sums.jsonl", "--output_dir", "named"]
    main = ROOT / "dschat_lora" / "__main__.py"
    running = launcher.start(["rlhf", *argv], home, script=main)
    assert running.wait() == [0], running.output()

    def own(name):
        module, _, attribute = name.partition(":")
        thing = getattr(import_module(module), attribute)
        return thing() if isinstance(thing, type) else thing

    options = ("rollout_engine", "environment", "rewards", "algorithm", "parts")
    objects = {option: own(name) for option, (_, name) in zip(options, NAMED, strict=True)}
    short = {**SHORT, "max_steps": 2, "reward_weights": [1, 0.2], "output_dir": "handed"}
    stop = lambda event, step, metrics: "stop"  # noqa: E731
    cut = dl.rlhf(data=sums, callbacks=[stop], quiet=True, **objects, **short)
    assert cut.status == "stopped"
    with (home / "handed" / "progress.csv").open("a") as file:
        file.write("what the checkpoint does not know\n")
    run = dl.rlhf(data=sums, output_dir="handed", resume="latest", quiet=True, **objects)

    table = (home / "named" / "progress.csv").read_text()
    assert (home / "handed" / "progress.csv").read_text() == table
    head, *rows = table.splitlines()
    assert (head, [row[:2] for row in rows]) == ("iteration,reward,best", ["1,", "2,"])
    lines = (home / "named" / "metrics.jsonl").read_text().splitlines()
    named = [line for line in map(json.loads, lines) if line["kind"] == "train"]
    handed = [line for line in run.metrics if line["kind"] == "train"]
    for name in ("loss", "reward/right", "reward/brief", "kl", "grad_norm", "best_reward"):
        assert [line[name] for line in handed] == [line[name] for line in named]
    assert all(line["turns"] == 2 for line in named)


def test_the_add_on_of_the_page_adds_a_verb_an_option_and_a_reward(tmp_path):
    about = tmp_path / "brevity-1.0.dist-info"
    for folder in (tmp_path / "brevity", about):
        folder.mkdir()
    for name, text in ADDON.items():
        (tmp_path / name).write_text(text)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: brevity\nVersion: 1.0\n")
    group = re.search(r'"dschat_lora.addons"\]\n(.*)', PAGE)[1].replace('"', "")
    (about / "entry_points.txt").write_text(f"[dschat_lora.addons]\n{group}\n")
    (tmp_path / "notes.txt").write_text("one two\nthree\n")
    code = (
        "import dschat_lora.__main__ as program, sys\n"
        "sys.argv = ['dschat-lora', 'lengths', 'notes.txt']\nprogram.main()\n"
        "from dschat_lora.config.addons import provided\n"
        "from dschat_lora.config.stages import SupervisedConfig\n"
        "print(SupervisedConfig().addons.brevity.words, 'brief' in provided('reward_function'))\n"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    ended = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True
    )
    assert (ended.stdout, ended.stderr) == ("2 1\n10 True\n", "")


@of_the_whole
def test_the_script_runs(home, monkeypatch, capsys):
    train = dl.rlhf
    monkeypatch.setattr(dl, "rlhf", lambda **options: train(**{**options, **SHORT, "max_steps": 2}))
    runpy.run_path("all_together.py")
    # Of two iterations: the token of " The" and eight at random.
    assert capsys.readouterr().out.splitlines()[-1] == "[9.0, 9.0]"
