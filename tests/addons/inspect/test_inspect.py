"""dschat-lora inspect: what directories are, and whether their files are sound."""

import json

import pytest

from dschat_lora.addons.inspect.describe import InspectConfig, describe, inspect_directory
from dschat_lora.assets import BUNDLED_MODEL
from helpers.attacks import ESCAPES, has_control, seen
from helpers.step1 import write_adapter_config
from helpers.trained import home, verb

__all__ = ["home", "verb"]


def test_inspect_says_what_an_adapter_is(verb, home):
    facts = json.loads(verb("inspect", "sft/adapter", "--json"))
    assert (facts["kind"], facts["rank"], facts["task"]) == ("adapter", 4, "language model")
    assert facts["layers"] == ["q_proj", "v_proj"]
    tensors = [*(home / "sft" / "adapter").glob("*.safetensors")]
    assert len(tensors) == 1
    layers = json.loads((BUNDLED_MODEL / "config.json").read_text())["num_hidden_layers"]
    width = json.loads((BUNDLED_MODEL / "config.json").read_text())["hidden_size"]
    assert facts["tensors"] == 4 * layers
    assert facts["parameters"] == layers * 4 * width * 4
    assert facts["damage"] is None


@pytest.mark.smoke
def test_inspect_says_what_of_a_run_learns_and_at_which_rate(tmp_path):
    learns = {"actor": {"words": "q_proj of 4 layers; frozen: norms"}, "critic": None}
    rates = {"learning_rate": 5e-5, "lora_learning_rate": 5e-4, "only_optimize_lora": True}
    record = {"stage": "rlhf", "learns": learns, "config": rates}
    (tmp_path / "run.json").write_text(json.dumps(record))
    facts = describe(tmp_path)
    assert facts["learns"] == {"actor": "q_proj of 4 layers; frozen: norms"}
    assert (facts["lora_learning_rate"], "learning_rate" in facts) == (5e-4, False)


def test_inspect_names_the_weights_of_experts_that_learn(tmp_path):
    write_adapter_config(tmp_path, target_parameters=["down_proj", "gate_up_proj"])
    assert describe(tmp_path)["experts"] == ["down_proj", "gate_up_proj"]


def test_inspect_of_a_damaged_adapter_has_code_1(verb, home, tmp_path):
    copy = tmp_path / "adapter"
    copy.mkdir()
    for path in (home / "sft" / "adapter").iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    config = copy / "adapter_config.json"
    config.write_text(config.read_text().replace('"r": 4', '"r": 5'))
    facts = json.loads(verb("inspect", copy, "--json", code=1))
    assert "adapter_config.json" in facts["damage"]


def test_control_characters_of_a_run_do_not_reach_the_terminal(capsys, tmp_path):
    (tmp_path / "run.json").write_text(
        json.dumps({"stage": ESCAPES, "results": {ESCAPES: ESCAPES}})
    )
    for in_json in (False, True):
        inspect_directory(InspectConfig(path=str(tmp_path), json=in_json))
        words = seen(capsys)
        assert "[2J" in words
        assert not has_control(words)
