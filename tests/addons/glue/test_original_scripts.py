"""The scripts that microsoft/LoRA publishes for GLUE start as they stand."""

import shlex
from itertools import pairwise

import pytest

from dschat_lora.addons.glue.verbs import run_glue

GLUE = """--task_name {} --do_train --do_eval --max_seq_length {} --per_device_train_batch_size {}
    --learning_rate {} --num_train_epochs {} --output_dir $output_dir/model --logging_steps 10
    --logging_dir $output_dir/log --apply_lora"""
ROBERTA = f"""{GLUE} --evaluation_strategy epoch --save_strategy epoch --warmup_ratio 0.06
    --lora_r 8 --lora_alpha 16 --seed 0 --weight_decay 0.1"""
BASE = f"--model_name_or_path roberta-base --overwrite_output_dir {ROBERTA}"
LARGE = f"--model_name_or_path roberta-large {ROBERTA}"
BASE_MNLI = "--lora_path ./roberta_base_mnli_lora.bin"
LARGE_MNLI = "--lora_path ./roberta_large_lora_mnli.bin"
DEBERTA = f"""--model_name_or_path microsoft/deberta-v2-xxlarge --overwrite_output_dir {GLUE} --fp16
    --evaluation_strategy steps --save_strategy steps --lora_r 16 --lora_alpha 32
    --use_deterministic_algorithms"""
DEBERTA_MNLI = "--lora_path mnli/pytorch_model_lora.bin"
OFTEN, RARELY = "--eval_steps 20 --save_steps 20", "--eval_steps 500 --save_steps 500"
MNLI = DEBERTA.format("mnli", 256, 8, "1e-4", 5) + (
    f" {RARELY} --warmup_steps 1000 --cls_dropout 0.15 --weight_decay 0"
)
ADAPTERS = """--model_name_or_path roberta-large --task_name mnli --do_train --do_eval
    --evaluation_strategy epoch --save_strategy epoch --max_seq_length 128
    --per_device_train_batch_size 32 --per_device_eval_batch_size 32 --learning_rate 3e-4
    --num_train_epochs 5 --output_dir output_dir/model --overwrite_output_dir --logging_steps 10
    --logging_dir output_dir/log --warmup_ratio 0.1 --apply_adapter --seed 0"""

# By the names of the scripts of examples/NLU.
SCRIPTS = {
    "adapter_houlsby_roberta_large_mnli": f"{ADAPTERS} --adapter_type houlsby --adapter_size 8",
    "adapter_pfeiffer_roberta_large_mnli": f"{ADAPTERS} --adapter_type pfeiffer --adapter_size 16",
    "roberta_base_cola": BASE.format("cola", 512, 32, "4e-4", 80),
    "roberta_base_mnli": BASE.format("mnli", 512, 16, "5e-4", 30),
    "roberta_base_mrpc": f"{BASE_MNLI} {BASE.format('mrpc', 512, 16, '4e-4', 30)}",
    "roberta_base_qnli": BASE.format("qnli", 512, 32, "4e-4", 25),
    "roberta_base_qqp": BASE.format("qqp", 512, 16, "5e-4", 25),
    "roberta_base_rte": f"{BASE_MNLI} {BASE.format('rte', 512, 32, '5e-4', 80)}",
    "roberta_base_sst2": BASE.format("sst2", 512, 16, "5e-4", 60),
    "roberta_base_stsb": f"{BASE_MNLI} {BASE.format('stsb', 512, 16, '4e-4', 40)}",
    "roberta_large_cola": LARGE.format("cola", 128, 4, "3e-4", 20),
    "roberta_large_mnli": LARGE.format("mnli", 128, 4, "3e-4", 10),
    "roberta_large_mrpc": f"{LARGE_MNLI} {LARGE.format('mrpc', 512, 4, '3e-4', 20)}",
    "roberta_large_qnli": LARGE.format("qnli", 512, 4, "2e-4", 10),
    "roberta_large_qqp": LARGE.format("qqp", 512, 4, "3e-4", 20),
    "roberta_large_rte": f"{LARGE_MNLI} {LARGE.format('rte', 512, 8, '4e-4', 20)}",
    "roberta_large_sst2": LARGE.format("sst2", 512, 8, "4e-4", 10),
    "roberta_large_stsb": f"{LARGE_MNLI} {LARGE.format('stsb', 128, 4, '3e-4', 10)}",
    "deberta_v2_xxlarge_cola": DEBERTA.format("cola", 64, 4, "1.3e-4", 10)
    + f" {OFTEN} --warmup_steps 100 --cls_dropout 0.1 --seed 0 --weight_decay 0",
    "deberta_v2_xxlarge_mnli": f"{MNLI} --seed 0",
    "mnli.rdrop": f"{MNLI} --reg_loss_wgt 1.0 --seed 42",
    "mnli.cutoff": f"{MNLI} --reg_loss_wgt 1.0 --masking_prob 0.1 --seed 42",
    "deberta_v2_xxlarge_mrpc": f"{DEBERTA_MNLI} {DEBERTA.format('mrpc', 128, 32, '2e-4', 30)}"
    " --eval_steps 10 --save_steps 10 --warmup_ratio 0.1 --cls_dropout 0 --seed 0"
    " --weight_decay 0.01",
    "deberta_v2_xxlarge_qnli": DEBERTA.format("qnli", 512, 6, "1e-4", 8)
    + f" {RARELY} --warmup_steps 500 --cls_dropout 0.1 --seed 0 --weight_decay 0.01",
    "deberta_v2_xxlarge_qqp": DEBERTA.format("qqp", 320, 8, "1e-4", 11)
    + f" {RARELY} --warmup_steps 10000 --cls_dropout 0.2 --seed 0 --weight_decay 0.01",
    "deberta_v2_xxlarge_rte": f"{DEBERTA_MNLI} {DEBERTA.format('rte', 320, 4, '2.6e-4', 11)}"
    f" {OFTEN} --warmup_steps 50 --cls_dropout 0.2 --seed 0 --weight_decay 0.01",
    "deberta_v2_xxlarge_sst2": DEBERTA.format("sst2", 128, 8, "6e-5", 16)
    + " --eval_steps 100 --save_steps 100 --warmup_steps 1000 --cls_dropout 0 --seed 0"
    " --weight_decay 0.01",
    "deberta_v2_xxlarge_stsb": f"{DEBERTA_MNLI} {DEBERTA.format('stsb', 128, 4, '2e-4', 10)}"
    " --eval_steps 50 --save_steps 50 --warmup_steps 100 --cls_dropout 0.2 --seed 0"
    " --weight_decay 0.1",
    "README, evaluation": "--model_name_or_path microsoft/deberta-v2-xxlarge --task_name mnli"
    " --lora_path ./deberta_v2_xxlarge_lora_mnli.bin --do_eval --output_dir ./output --apply_lora"
    " --lora_r 16 --lora_alpha 32",
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_script_of_glue_starts(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    argv = shlex.split(SCRIPTS[name].replace("$output_dir", "./out"))
    if "--lora_path" in argv:
        file = tmp_path / argv[argv.index("--lora_path") + 1]
        file.parent.mkdir(exist_ok=True)
        file.touch()
    run_glue([*argv, "--dry_run"])
    shown = dict(line.split(": ", 1) for line in capsys.readouterr().out.splitlines()[-40:])
    assert shown["do_train"] == str("--do_train" in argv)
    wanted = {
        "do_train": None,
        "evaluation_strategy": "eval_strategy",
        "cls_dropout": "classifier_dropout",
    }
    for flag, value in pairwise(argv):
        option = wanted.get(flag[2:], flag[2:])
        if flag.startswith("--") and not value.startswith("--") and option in shown:
            same = shown[option] == value or option == "lora_path"
            assert same or float(shown[option]) == float(value), option


def test_there_are_as_many_scripts_as_published():
    assert len([name for name in SCRIPTS if not name.startswith("README")]) == 28
