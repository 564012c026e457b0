"""Values that no run can use are refused by name, whoever builds the config."""

import math

import pytest

from dschat_lora.config.data import DataConfig, parse_data_split
from dschat_lora.config.groups import LoraConfig, OptimConfig
from helpers.step1 import parsed


@pytest.mark.parametrize(
    "line",
    [
        "--dropout 0.999 --lora_dropout 0 --eval_ratio 0 --max_seq_len 2",
        "--adam_beta1 0 --adam_beta2 0.999 --weight_decay 0 --max_grad_norm 0",
        "--num_train_epochs 0 --max_steps 0 --eval_iters 0 --sample_generations 0 --lora_dim 0",
        f"--seed {2**63 - 1} --merge_max_kl 0 --logging_steps 1",
        "--data_path a b --data_weights 1 0.5",
    ],
)
def test_values_at_the_edge_are_taken(line):
    parsed(*line.split())


def test_number_that_is_not_one_is_refused_from_code_too():
    with pytest.raises(ValueError, match="--lora_alpha must be > 0, got nan"):
        LoraConfig(lora_alpha=math.nan)
    with pytest.raises(ValueError, match="--weight_decay must be >= 0, got nan"):
        OptimConfig(weight_decay=math.nan)


@pytest.mark.parametrize(
    ("text", "shares"),
    [
        ("2,4,4", (0.2, 0.4, 0.4)),
        ("10,0,0", (1.0, 0.0, 0.0)),
        ("0.5, 0.25, 0.25", (0.5, 0.25, 0.25)),
    ],
)
def test_data_split_gives_shares_that_sum_to_one(text, shares):
    assert parse_data_split(text) == pytest.approx(shares)


def test_config_cannot_be_changed_after_its_check():
    with pytest.raises(AttributeError):
        DataConfig().max_seq_len = 0
