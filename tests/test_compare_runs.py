"""What the comparison of two runs finds and leaves out, and which runs of a base it makes."""

import importlib
import json
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
import torch
from safetensors.torch import save_file

from helpers.launcher import ROOT

TENSORS = {"a": torch.zeros(3), "b": torch.tensor([1.0, float("nan")])}
LINES = [{"kind": "train", "loss": 0.25, "step_seconds": 1.0, "parts": {"reward": 2.0}}] * 2


@pytest.fixture
def differences(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "scripts")
    return importlib.import_module("run_differences")


def write(directory, lines=LINES, tensors=TENSORS):
    directory.mkdir()
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (directory / "metrics.jsonl").write_text(text.replace("HOME", str(directory)))
    save_file(tensors, directory / "adapter_model.safetensors")
    return directory


def with_change(**fields):
    return [LINES[0], LINES[1] | fields]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, ""),
        ({"lines": with_change(step_seconds=2.0)}, ""),
        ({"lines": with_change(loss=0.25000000000000006)}, "metrics.jsonl: line 2: loss: 0.25 "),
        ({"lines": with_change(loss=True)}, "metrics.jsonl: line 2: loss: 0.25 against True"),
        ({"lines": with_change(parts={"reward": 1})}, "metrics.jsonl: line 2: parts.reward: 2.0 "),
        ({"lines": with_change(more=1)}, "metrics.jsonl: line 2: more: only in this tree"),
        ({"lines": LINES[:1]}, "metrics.jsonl: line 2: kind: only in the base"),
        (
            {"tensors": TENSORS | {"a": torch.tensor([0.0, 0.0, -0.0])}},
            "adapter_model.safetensors: a: 1 of 3 numbers, number 2 0.0 against -0.0",
        ),
        (
            {"tensors": TENSORS | {"a": torch.zeros(3, dtype=torch.float16)}},
            "adapter_model.safetensors: a: torch.float32 (3,) against torch.float16 (3,)",
        ),
        ({"tensors": {"a": TENSORS["a"]}}, "adapter_model.safetensors: b: only in the base"),
    ],
)
def test_first_difference_says_file_place_and_values(tmp_path, differences, changes, expected):
    base, tree = write(tmp_path / "base"), write(tmp_path / "tree", **changes)
    difference = differences.first_difference(base, tree)
    assert difference.startswith(expected)
    assert bool(difference) == bool(expected)


def test_additional_files_differ_but_not_a_report_nor_directories_of_runs(tmp_path, differences):
    base, tree = (write(tmp_path / name, with_change(path="HOME/x")) for name in ("base", "tree"))
    (base / "report.html").write_text("made at noon")
    assert "path" in differences.first_difference(base, tree)
    changes = [lambda text, home=str(home): text.replace(home, "HOME") for home in (base, tree)]
    assert differences.first_difference(base, tree, normalise=changes) == ""
    (tree / "more.json").write_text("{}")
    for pair, where in (((base, tree), "this tree"), ((tree, base), "the base")):
        difference = differences.first_difference(*pair, normalise=changes)
        assert difference == f"more.json: only in {where}"
        changes.reverse()


def test_a_kept_run_is_made_once_and_anew_after_one_that_failed(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "scripts")
    compare_runs = importlib.import_module("compare_runs")
    made, together = [], Barrier(2)

    class Base:
        def run(self, stage, options, home, processes):
            home.mkdir()  # not there, whatever the run before left
            made.append((stage, processes))
            (home / "half").touch()
            if len(made) == 1:
                raise compare_runs.RunError("the disk is full")

        def paths(self, home):
            return {str(home): "HOME"}

    def kept(_):
        together.wait(60)
        return compare_runs.kept_run(Base(), tmp_path, "grpo", 1)

    with pytest.raises(compare_runs.RunError):
        compare_runs.kept_run(Base(), tmp_path, "grpo", 1)
    with ThreadPoolExecutor() as pool:
        (home, again) = pool.map(kept, range(2))
    assert home == again
    assert made == [("step3_rlhf", 1)] * 2
    assert json.loads((home / "done.json").read_text()) == {str(home): "HOME"}
