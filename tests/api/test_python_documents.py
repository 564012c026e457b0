"""The Python of the documentation runs as it stands."""

import re

import pytest

import dschat_lora as dl
from dschat_lora.assets import BUNDLED_MODEL
from helpers.launcher import ROOT
from helpers.spread import ALL

pytestmark = pytest.mark.stage


def blocks(name):
    text = (ROOT / name).read_text(encoding="utf-8")
    return re.findall(r"^```python\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)


def shortened(train, **most):
    """The function with options that are no more than these."""
    return lambda *inputs, **options: train(
        *inputs, **{**options, **{k: min(v, options.get(k, v)) for k, v in most.items()}}
    )


@pytest.mark.parametrize("name", ["README.md", *["docs/python_api.md"] * ALL])
def test_python_runs_and_prints_what_its_comments_say(name, tmp_path, monkeypatch, capsys):
    # Models of the hub are directories of their names here.
    (tmp_path / "Qwen").mkdir()
    for place in ("Qwen/Qwen3-0.6B", "path-or-name"):
        (tmp_path / place).symlink_to(BUNDLED_MODEL)
    monkeypatch.chdir(tmp_path)
    short = {"max_answer_seq_len": 8, "per_device_generation_batch_size": 8, "eval_prompts": 2}
    short["per_device_training_batch_size"] = 8
    monkeypatch.setattr(dl, "rlhf", shortened(dl.rlhf, max_steps=1, **short))
    monkeypatch.setattr(dl, "sft", shortened(dl.sft, max_steps=20))
    names = {}
    for block in blocks(name):
        capsys.readouterr()
        exec(compile(block, name, "exec"), names)
        printed = capsys.readouterr().out
        for expected in re.findall(r"print\(error\)  # (.*)", block):
            assert expected.removesuffix("...") in printed
    if "stopped" in names:
        assert names["stopped"].status == "stopped"
        assert names["stopped"].metrics[-1]["step"] < 20
        assert names["done"].metrics[-1]["step"] == 20
    assert (names["sft"].status, names["better"].status) == ("finished", "finished")
