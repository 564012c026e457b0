"""Names of modules and what is in them that were in use before modules moved."""

import importlib
import subprocess
import sys

import pytest

from dschat_lora.old_names import OLD_NAMES

# What options and programs of users name in them.
NAMED = {
    "rl.rewards": "UserFunctionError TrainerState RewardError RewardFunction RewardFunctions",
    "rl.score.reward_functions": "RewardFunction RewardFunctions",
    "world": "reward rule",
}


@pytest.mark.parametrize("module", OLD_NAMES)
def test_former_module_has_what_took_its_place(module):
    former = importlib.import_module(f"dschat_lora.{module}")
    for successor in OLD_NAMES[module].split():
        assert vars(importlib.import_module(f"dschat_lora.{successor}")).keys() <= {*dir(former)}
    assert [name for name in NAMED.get(module, "").split() if not hasattr(former, name)] == []


def test_former_modules_are_these():
    formers = """
    engine.adamw engine.linear generation.search pipeline.launch rl.algorithms rl.batch
    rl.config rl.coroutines rl.draw.order rl.draw.turn_decoder rl.dynamic_sampling rl.ema
    rl.engines rl.evaluation rl.experience rl.inputs rl.learn.ema rl.learn.network rl.memory
    rl.metrics rl.pretraining rl.response.messages rl.response.transfer rl.rewards
    rl.role_config rl.roles rl.rollout rl.score.reward_functions rl.score.shaping rl.setup
    rl.throughput rl.train rl.trainer rl.update rl.validation rl.watch.rows
    supervised.pair_stages world
    """.split()
    assert sorted(OLD_NAMES) == formers
    assert NAMED.keys() <= OLD_NAMES.keys()


def test_what_had_no_such_name_has_none():
    with pytest.raises(ImportError, match="cannot import name 'nothing'"):
        from dschat_lora.rl.rewards import nothing  # noqa: F401
    with pytest.raises(ModuleNotFoundError, match=r"dschat_lora\.rl\.nothing"):
        importlib.import_module("dschat_lora.rl.nothing")


def test_a_former_name_imports_nothing_until_it_is_used():
    code = "import sys, dschat_lora.rl.trainer; print('torch' in sys.modules)"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stdout == "False\n"


def test_all_names_come_by_a_star_and_what_is_set_is_set_where_it_is_used(monkeypatch):
    from dschat_lora.rl.score import user_functions

    names = {}
    # Other tests have asked for its names.
    monkeypatch.delitem(sys.modules, "dschat_lora.rl.rewards", raising=False)
    exec("from dschat_lora.rl.rewards import *", names)
    assert names["shortened"] is user_functions.shortened
    assert "load_function" in dir(importlib.import_module("dschat_lora.rl.rewards"))
    with monkeypatch.context() as patches:
        patches.setattr("dschat_lora.rl.rewards.shortened", len)
        assert user_functions.shortened is len
    assert user_functions.shortened is names["shortened"]
