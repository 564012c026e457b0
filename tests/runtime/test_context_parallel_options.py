"""``--context_parallel_size``: what is refused before torch is there, and what a step holds."""

import pytest

from dschat_lora.config.groups import ModelConfig
from dschat_lora.config.options import parse_config
from dschat_lora.config.stages import DpoStageConfig, RewardStageConfig
from dschat_lora.models.option_checks import check_divided_rows
from dschat_lora.rl.loop.validation import check_rlhf
from dschat_lora.rl.options.config import RlhfConfig
from dschat_lora.supervised.validation import check_supervised
from helpers.step1 import checked, write_jsonl

TWO = ("--context_parallel_size", "2")


@pytest.fixture(autouse=True)
def two_processes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_jsonl(tmp_path / "row.jsonl", [{"prompt": "a", "chosen": " b", "rejected": " c"}])
    monkeypatch.setenv("WORLD_SIZE", "2")


@pytest.mark.parametrize("nested", [False, True])
def test_rotation_by_the_longest_row_is_refused(nested):
    rope = {"rope_type": "dynamic", "factor": 2.0}
    fields = {"rope_parameters": {"full_attention": rope} if nested else rope}
    with pytest.raises(ValueError, match="of type dynamic depend on the longest row"):
        check_divided_rows(ModelConfig(), fields, 2)


@pytest.mark.parametrize("config", [RewardStageConfig, DpoStageConfig])
def test_rows_of_pairs_are_divided_too(config):
    given = parse_config(config, ["--data_path", "row.jsonl", *TWO])
    assert check_supervised(given).parallel.shares(6) == 3


def test_step_3_takes_rows_whole():
    options = ["--data_path", "row.jsonl", *TWO, "--reward_function", "dschat_lora.world:reward"]
    with pytest.raises(ValueError, match="2 is for steps 1 and 2; step 3 needs whole rows: drop"):
        check_rlhf(parse_config(RlhfConfig, options))


def test_processes_that_divide_rows_are_one_share_of_a_step():
    parallel = checked("--data_path", "row.jsonl", *TWO).parallel
    assert parallel.shares(6) == 3
    assert parallel.share_words(6) == "6 processes / --context_parallel_size 2"
