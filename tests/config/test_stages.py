"""Values that no run can use are refused by name, whoever builds the config."""

import math

import pytest

from dschat_lora.config.data import DataConfig, parse_data_split
from dschat_lora.config.groups import LoraConfig, OptimConfig
from helpers.step1 import parsed


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--dropout 1", r"--dropout must be in \[0, 1\), got 1.0"),
        ("--dropout=-0.1", r"--dropout must be in \[0, 1\), got -0.1"),
        ("--no-compute_fp32_loss", "--no-compute_fp32_loss must be absent"),
        ("--lora_dim -1", r"--lora_dim must be >= 0 \(0 disables LoRA\), got -1"),
        ("--lora_alpha 0", "--lora_alpha must be > 0, got 0.0"),
        ("--lora_dropout 1", r"--lora_dropout must be in \[0, 1\), got 1.0"),
        ("--target_modules", "--target_modules must be one name or more"),
        ("--eval_ratio 1", r"--eval_ratio must be in \[0, 1\), got 1.0"),
        ("--max_seq_len 1", "--max_seq_len must be >= 2 tokens, got 1"),
        ("--preprocessing_num_workers -1", "--preprocessing_num_workers must be >= 0, got -1"),
        ("--data_path a b --data_weights 1", "one positive number for each of the 2 --data_path"),
        ("--data_path a --data_weights 0", "one positive number for each of the 1 --data_path"),
        ("--data_path a --data_weights 1e30", "1 --data_path, 10000 at most, got"),
        ("--data_path a b c --data_split_name d e", "one name, or one for each of the 3 --data_p"),
        ("--columns promt=a", "did you mean prompt?"),
        ("--data_split 2,4", "--data_split must be three numbers >= 0 such as 2,4,4, got '2,4'"),
        ("--data_split 0,0,0", "--data_split must be three numbers >= 0"),
        ("--data_split a,b,c", "--data_split must be three numbers >= 0"),
        ("--data_split 1,-1,1", "--data_split must be three numbers >= 0"),
        ("--data_split nan,1,1", "--data_split must be three numbers >= 0"),
        ("--data_split inf,1,1", "--data_split must be three numbers >= 0"),
        ("--per_device_train_batch_size 0", "--per_device_train_batch_size must be >= 1, got 0"),
        ("--per_device_eval_batch_size 0", "--per_device_eval_batch_size must be >= 1, got 0"),
        ("--gradient_accumulation_steps 0", "--gradient_accumulation_steps must be >= 1, got 0"),
        ("--learning_rate 0", "--learning_rate must be > 0, got 0.0"),
        ("--lora_learning_rate 0", "--lora_learning_rate must be > 0, got 0.0"),
        ("--lora_lr_multiplier 0", "--lora_lr_multiplier must be > 0, got 0.0"),
        ("--loraplus_lr_ratio 0", "--loraplus_lr_ratio must be > 0, got 0.0"),
        ("--adam_epsilon 0", "--adam_epsilon must be > 0, got 0.0"),
        ("--adam_beta1 1", r"--adam_beta1 must be in \[0, 1\), got 1.0"),
        ("--adam_beta2=-1", r"--adam_beta2 must be in \[0, 1\), got -1.0"),
        ("--weight_decay=-1", "--weight_decay must be >= 0, got -1.0"),
        ("--max_grad_norm=-1", "--max_grad_norm must be >= 0, got -1.0"),
        ("--num_warmup_steps -1", "--num_warmup_steps must be >= 0, got -1"),
        ("--num_train_epochs -1", "--num_train_epochs must be >= 0, got -1"),
        ("--max_steps -1", "--max_steps must be >= 0, got -1"),
        (
            "--lora_learning_rate 1e-3 --lora_lr_multiplier 2",
            "--lora_learning_rate 0.001 and --lora_lr_multiplier 2 both set",
        ),
        ("--eval_interval -1", "--eval_interval must be >= 0, got -1"),
        ("--eval_iters -1", "--eval_iters must be >= 0, got -1"),
        ("--sample_generations -1", "--sample_generations must be >= 0, got -1"),
        ("--merge_max_kl=-1", "--merge_max_kl must be >= 0, got -1.0"),
        ("--logging_steps 0", "--logging_steps must be >= 1, got 0"),
        ("--seed -1", r"--seed must be in \[0, 2\*\*63\), got -1"),
        (f"--seed {2**63}", r"--seed: must be in \[-2\*\*63, 2\*\*63\), got '9223372036854775808'"),
        (f"--output_dir {__file__}", "is a file, not a directory"),
    ],
)
def test_value_out_of_range_is_named_with_what_is_allowed(line, message):
    with pytest.raises(ValueError, match=message):
        parsed(*line.split())


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
