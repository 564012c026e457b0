"""What a training on data and texts is to do: options by both names, layers, and its schedule."""

import json
from dataclasses import replace

import pytest
from transformers.models.gpt2 import GPT2Config

from dschat_lora.addons.nlg.config import DecodeConfig, NlgConfig
from dschat_lora.addons.nlg.validation import (
    NLG_CHECKS,
    check_training,
    in_optimizer_steps,
    schedule,
)
from dschat_lora.config.bundled import BUNDLED_DATA
from dschat_lora.config.groups import LoraConfig
from dschat_lora.config.options import chosen_verb, options_of, parse_config
from dschat_lora.lora.rates import adapter_learning_rate
from dschat_lora.models.source import find_model
from dschat_lora.runtime.checks import apply_checks
from dschat_lora.runtime.validation import Inputs, Sources


def parse(line):
    return parse_config(NlgConfig, line.split())


def rates(line, num_steps):
    config = parse(line)
    factor = schedule(config)(num_steps)
    return [config.optim.learning_rate * factor(step) for step in range(num_steps)]


def test_defaults_are_the_originals():
    config = parse("")
    optim = config.optim
    assert (config.lora.lora_dim, config.lora.lora_alpha) == (4, 32)
    assert (optim.learning_rate, optim.weight_decay) == (1e-5, 0.01)
    assert (optim.adam_beta1, optim.adam_beta2, optim.adam_epsilon) == (0.9, 0.98, 1e-6)
    assert (optim.lr_scheduler_type, optim.max_grad_norm, config.label_smoothing) == (
        "linear",
        0,
        0,
    )
    assert adapter_learning_rate(optim) == 1e-5


@pytest.mark.parametrize(
    ("config", "original", "ours"),
    [
        (
            NlgConfig,
            "--train_data a.jsonl --valid_data b.jsonl --train_batch_size 7 --grad_acc 3 "
            "--valid_batch_size 5 --seq_len 512 --lr 0.0002 --clip 0.5 --adam_epislon 1e-7 "
            "--scheduler cosine --warmup_step 500 --max_epoch 6 --work_dir out --random_seed 110 "
            "--log_interval 50 --max_step 9",
            "--data_path a.jsonl --eval_data_path b.jsonl --per_device_train_batch_size 7 "
            "--gradient_accumulation_steps 3 --per_device_eval_batch_size 5 --max_seq_len 512 "
            "--learning_rate 0.0002 --max_grad_norm 0.5 --adam_epsilon 1e-7 --lr_scheduler_type "
            "cosine --num_warmup_steps 500 --num_train_epochs 6 --output_dir out --seed 110 "
            "--logging_steps 50 --max_steps 9",
        ),
        (
            DecodeConfig,
            "--data x --beam 3 --eval_len 7 --batch_size 2 --output_file o --random_seed 5",
            "--data_path x --num_beams 3 --max_new_tokens 7 --per_device_eval_batch_size 2 "
            "--output_path o --seed 5",
        ),
    ],
)
def test_the_originals_command_parses_to_the_same_as_ours(config, original, ours):
    assert parse_config(config, original.split()) == parse_config(config, ours.split())
    assert set(config.spellings.values()) <= {name[2:] for name in ours.split()}


def test_a_file_may_use_the_originals_names_but_not_two_of_one_option():
    values = options_of(NlgConfig, {"grad_acc": 3, "lr": 1e-3}, label="file")
    assert values == {"gradient_accumulation_steps": 3, "learning_rate": 1e-3}
    with pytest.raises(ValueError, match="lr and another name of --learning_rate; give one"):
        options_of(NlgConfig, {"learning_rate": 1e-3, "lr": 1e-4}, label="file")


@pytest.mark.parametrize(("given", "taken"), [(1e-4, 0.0), (0.00011, 0.00011), (0.1, 0.1)])
def test_a_smoothing_of_a_ten_thousandth_or_less_means_none(given, taken):
    assert parse(f"--label_smooth {given}").label_smoothing == taken


def test_each_schedule_is_the_closed_form_at_every_optimizer_step():
    common = "--lr 1e-3 --warmup_step 2"
    assert rates(f"{common} --scheduler linear", 6) == pytest.approx(
        [0, 5e-4, 1e-3, 7.5e-4, 5e-4, 2.5e-4]
    )
    assert rates(f"{common} --scheduler constant", 4) == pytest.approx([0, 5e-4, 1e-3, 1e-3])
    # (1 + cos(pi / 2)) / 2 and (1 + cos(3 pi / 4)) / 2
    assert rates(f"{common} --scheduler cosine", 4) == pytest.approx([0, 5e-4, 5e-4, 1.4644661e-4])
    turns = "--lr 7e-3 --scheduler cycle --i_steps 0,2,4 --i_lrs 0,1e-3,5e-4"
    assert rates(turns, 6) == pytest.approx([0, 5e-4, 1e-3, 7.5e-4, 5e-4, 5e-4], rel=1e-6)


def test_micro_steps_advance_the_schedule_as_often_as_the_original_does():
    # Two micro-steps a step: the k-th update is at 2 k - 1, of 8.
    line = "--lr 1e-3 --warmup_step 2 --grad_acc 2 --scheduler_counts_micro_steps"
    assert rates(line, 4) == pytest.approx([5e-4, 5e-3 / 6, 3e-3 / 6, 1e-3 / 6])
    counted = parse(f"{line} --max_step 9")
    assert in_optimizer_steps(counted).optim.max_steps == 4
    turns = parse("--scheduler cycle --i_steps 0,8 --i_lrs 0,1 --grad_acc 4")
    assert in_optimizer_steps(turns).optim.max_steps == 8
    with pytest.raises(ValueError, match="3 micro-steps make no optimizer step"):
        in_optimizer_steps(parse("--grad_acc 4 --scheduler_counts_micro_steps --max_step 3"))


@pytest.fixture
def gpt2(tmp_path):
    GPT2Config(n_embd=8, n_layer=1, n_head=2).save_pretrained(tmp_path)
    return tmp_path


def named(model):
    return "--model_name_or_path", str(model), "--data_path", str(BUNDLED_DATA["train"])


def checked(*argv):
    return check_training(parse_config(NlgConfig, list(argv)))


@pytest.mark.parametrize(
    ("options", "layers", "parts"),
    [
        ("", ("c_attn",), ("q", "v")),
        ("--target_modules c_attn c_proj", ("c_attn", "c_proj"), ()),
        ("--target_modules c_attn", ("c_attn",), ("q", "v")),
        ("--enable_lora k q", ("c_attn",), ("q", "k")),
    ],
)
def test_query_and_value_of_gpt2_get_factors_unless_layers_or_parts_are_chosen(
    gpt2, capsys, options, layers, parts
):
    lora = checked(*named(gpt2), "--lr", "1e-3", *options.split()).lora
    assert (lora.target_modules, lora.enable_lora) == (layers, parts)
    assert "no effect" not in capsys.readouterr().out  # the rate is of all that trains


def test_query_and_value_of_other_models_are_layers_of_their_own(gpt2):
    assert checked().lora == LoraConfig(lora_dim=4, target_modules=("q_proj", "v_proj"))
    (gpt2 / "config.json").write_text(json.dumps({"model_type": "llama"}))
    assert checked(*named(gpt2)).lora.enable_lora == ()


def test_counted_micro_steps_are_not_gone_on_with_at_another_accumulation(tmp_path):
    checkpoint = tmp_path / "step-00000005"
    checkpoint.mkdir()
    state = {"config": {"gradient_accumulation_steps": 2}}
    (checkpoint / "state.json").write_text(json.dumps(state))
    inputs = Inputs(Sources({"model": find_model(None)}), ())

    def completed(line):
        return apply_checks(replace(parse(line), checkpoint=str(checkpoint)), inputs, NLG_CHECKS)

    completed("--scheduler_counts_micro_steps --grad_acc 2")
    completed("--grad_acc 1")
    with pytest.raises(ValueError, match="had 2 micro-batches a step and would have 1"):
        completed("--scheduler_counts_micro_steps --grad_acc 1")


def test_a_verb_may_stand_behind_what_the_launcher_puts_in_front():
    verbs = ("train", "decode")
    assert chosen_verb(["--lr", "1"], verbs) == ("train", ["--lr", "1"])
    assert chosen_verb(["decode", "--x"], verbs) == ("decode", ["--x"])
    assert chosen_verb(["--local_rank=1", "decode"], verbs) == ("decode", ["--local_rank=1"])
    assert chosen_verb(["--work_dir", "decode"], verbs) == ("train", ["--work_dir", "decode"])
    assert chosen_verb([], verbs) == ("train", [])
