"""The judges of the fault tests, on damage made by hand."""

import hashlib
import json

import pytest
import torch
from harness import (
    broken_checkpoints,
    comparable_metrics,
    read_manifested,
    same_bits,
    spread,
    valid_checkpoints,
    wait_until,
)
from safetensors.torch import save_file


def checkpoint(directory):
    """A small directory with a manifest."""
    directory.mkdir(parents=True)
    save_file({"w": torch.arange(3.0)}, directory / "model-00001.safetensors")
    (directory / "state.json").write_text('{"step": 4}')
    files = {
        path.name: {"sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data)}
        for path in directory.iterdir()
        for data in [path.read_bytes()]
    }
    (directory / "manifest.json").write_text(json.dumps({"files": files}))
    return directory


def flip_a_bit(path):
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


DAMAGE = {
    "bit flipped": (lambda d: flip_a_bit(d / "model-00001.safetensors"), "has sha256"),
    "cut short": (lambda d: (d / "state.json").write_text("{"), "has 1 bytes"),
    "file gone": (lambda d: (d / "state.json").unlink(), "lacks state.json"),
    "file too many": (lambda d: (d / "more").write_text(""), "holds .*more"),
    "manifest gone": (lambda d: (d / "manifest.json").unlink(), "has no manifest"),
    "manifest cut": (lambda d: (d / "manifest.json").write_text('{"files'), "is not JSON"),
    "manifest empty": (lambda d: (d / "manifest.json").write_text('{"files": {}}'), "holds"),
}


@pytest.mark.parametrize(("damage", "message"), DAMAGE.values(), ids=DAMAGE)
def test_damaged_checkpoint_is_recognised(damage, message, tmp_path):
    sound = checkpoint(tmp_path / "checkpoints" / "step-00000004")
    hurt = checkpoint(tmp_path / "checkpoints" / "step-00000008")
    checkpoint(tmp_path / "checkpoints" / ".step-00000012.tmp")
    read_manifested(hurt)
    damage(hurt)
    with pytest.raises(AssertionError, match=message):
        read_manifested(hurt)
    assert valid_checkpoints(tmp_path) == {4: sound}
    assert list(broken_checkpoints(tmp_path)) == [8]


DIFFERENT = {
    "sign of zero": (torch.tensor([1.0, -0.0]), "w, element 1: 0.0 and -0.0"),
    "type": (torch.tensor([1.0, 0.0], dtype=torch.float64), "float32 .* and torch.float64"),
    "shape": (torch.tensor([[1.0, 0.0]]), r"\(2,\) and .*\(1, 2\)"),
    "last bit": (torch.nextafter(torch.tensor([1.0, 0.0]), torch.tensor(2.0)), "element 0: 1.0"),
}


@pytest.mark.parametrize(("other", "message"), DIFFERENT.values(), ids=DIFFERENT)
def test_bits_that_differ_are_named(other, message, tmp_path):
    for name, tensor in (("a", torch.tensor([1.0, 0.0])), ("b", other)):
        save_file({"w": tensor, "nan": torch.tensor(torch.nan)}, tmp_path / name)
    same_bits(tmp_path / "b", tmp_path / "b")
    with pytest.raises(AssertionError, match=message):
        same_bits(tmp_path / "a", tmp_path / "b")


def test_metrics_are_compared_without_their_times_and_no_step_is_missing_or_twice(tmp_path):
    line = {"kind": "train", "loss": 0.5}
    timed = {"time": 1.0, "step_seconds": 2.0, "tokens_per_second": 3.0, "mfu": None}
    for steps in ([1, 2], [1, 3], [1, 2, 2], [2, 3]):
        lines = [json.dumps({**line, **timed, "step": step}) + "\n" for step in steps]
        (tmp_path / "metrics.jsonl").write_text("".join(lines))
        if steps == [1, 2]:
            assert comparable_metrics(tmp_path) == [{**line, "step": step} for step in steps]
            continue
        with pytest.raises(AssertionError, match="steps of metrics"):
            comparable_metrics(tmp_path)


def test_waiting_for_a_command_that_ended_fails_at_once():
    class Ended:
        codes = staticmethod(lambda: [0])
        output = staticmethod(lambda: "what it said")

    wait_until(lambda: True, Ended)
    with pytest.raises(AssertionError, match="what it said"):
        wait_until(lambda: False, Ended)


def test_spread_keeps_both_ends(monkeypatch):
    monkeypatch.setattr("harness.LONG", False)
    assert spread(range(101), 5) == [0, 25, 50, 75, 100]
    assert spread([1, 2], 5) == [1, 2]
    assert spread(range(101), 1) == [50]
