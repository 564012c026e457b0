"""Reward models and DPO of divided models or rows: losses, files and replicas of one process."""

import json
from functools import cache

import peft
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from helpers.rlhf_course import save_family
from helpers.tensor_parallel_roles import write_pairs

pytestmark = [pytest.mark.stage, pytest.mark.thorough]

STEPS = 3
COMMON = f"""
    --max_seq_len 32 --eval_ratio 0 --max_steps {STEPS} --num_warmup_steps 1 --num_train_epochs 9
    --learning_rate 5e-3 --lora_lr_multiplier 1 --max_grad_norm 0.5 --save_interval 0
    --save_minutes 0 --per_device_train_batch_size 2 --gradient_accumulation_steps 2
    --sample_generations 1 --merge_adapter
""".split()
STAGES = {
    "step2_reward": ("reward", "--center_rewards_coefficient 0.02"),
    "step2_dpo": ("actor", "--beta 0.3 --rpo_alpha 0.1"),
}
LAYOUTS = {
    "tokens dealt": "--tensor_parallel_size 2 --sequence_parallel",
    "ZeRO 3": "--tensor_parallel_size 2 --zero_stage 3 --sample_generations 0",
    "rows divided": "--context_parallel_size 2",
}
AUTO = {"step2_reward": AutoModelForSequenceClassification, "step2_dpo": AutoModelForCausalLM}


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A directory with pairs."""
    home = tmp_path_factory.mktemp("pairs")
    write_pairs(home / "pairs.jsonl", 15)
    write_pairs(home / "held.jsonl", 5, seed=1)
    return home


@pytest.fixture(scope="module")
def family(home):
    return save_family("llama", home / "llama")


@pytest.fixture(scope="module")
def runs(ranks, home, family):
    """``runs(stage)``: reports of the ranks of each layout, and where it wrote; "whole" for one."""

    def command_line(stage, layout):
        start, options = STAGES[stage]
        return [
            *["--model_name_or_path", family[start], "--data_path", home / "pairs.jsonl"],
            *["--eval_data_path", home / "held.jsonl", *COMMON, *options.split()],
            # Else the one finds the reference's values that the other computed.
            *["--data_output_path", home / f"cache-{stage}-{layout}"],
            *["--output_dir", home / f"{stage}-{layout}", *LAYOUTS.get(layout, "").split()],
        ]

    @cache
    def of(stage):
        by_layout = {}
        for size, layouts in ((1, ["whole"]), (2, list(LAYOUTS))):
            results = ranks(size).run(
                "helpers.tensor_parallel_roles:train_pairs_many",
                runs=[
                    {"stage": stage, "argv": list(map(str, command_line(stage, layout)))}
                    for layout in layouts
                ],
            )
            for layout, reports in zip(layouts, zip(*results, strict=True), strict=True):
                lines = json.loads(reports[0]["lines"])
                by_layout[layout] = (
                    lines,
                    [r["unlike"] for r in reports],
                    home / f"{stage}-{layout}",
                )
        return by_layout

    return of


FIGURES = ("step", "loss", "accuracy", "margin", "grad_norm", "samples", "chosen", "rejected")


@pytest.mark.parametrize("stage", STAGES)
def test_losses_on_pairs_are_those_of_one_process(runs, stage):
    reports = runs(stage)
    expected = reports["whole"][0]
    losses = [line["loss"] for line in expected if line["kind"] == "train"]
    assert len(losses) == STEPS
    # The agreement says something only where training moves the loss much further.
    assert max(losses) - min(losses) > 1e-2
    for lines, _, _ in (reports[layout] for layout in LAYOUTS):
        assert [line["kind"] for line in lines] == [line["kind"] for line in expected]
        for ours, theirs in zip(lines, expected, strict=True):
            names = [name for name in FIGURES if name in theirs]
            assert "loss" in names or theirs["kind"] not in ("train", "eval")
            assert [ours[name] for name in names] == pytest.approx(
                [theirs[name] for name in names], abs=1e-5
            )


def test_answers_of_ranks_that_share_tokens_are_those_of_one_process(runs):
    answers = {
        layout: json.loads((directory / "run.json").read_text(encoding="utf-8"))["answers"]
        for layout, (_, _, directory) in runs("step2_dpo").items()
        if layout != "ZeRO 3"
    }
    assert len(answers["whole"]) == 2
    assert answers["tokens dealt"] == answers["rows divided"] == answers["whole"]


@pytest.mark.parametrize("stage", STAGES)
def test_ranks_hold_the_same_bits_and_write_whole_adapters(runs, stage):
    """The score head among it, which trains on every rank."""
    path = "adapter/adapter_model.safetensors"
    expected = load_file(runs(stage)["whole"][2] / path)
    assert expected
    for layout, (_, unlike, directory) in runs(stage).items():
        assert unlike == [[]] * (1 if layout == "whole" else 2)
        tensors = load_file(directory / path)
        assert tensors.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(tensors[name], value, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("stage", STAGES)
def test_peft_reads_what_ranks_wrote_as_the_model_they_merged(runs, family, stage):
    """The one was written as factors, the other as what the ranks' parts add up to."""
    ids = torch.arange(3, 15)[None]
    for layout in LAYOUTS:
        directory = runs(stage)[layout][2]
        labels = {"num_labels": 1} if stage == "step2_reward" else {}
        base = AUTO[stage].from_pretrained(family["base"], **labels)
        stock = peft.PeftModel.from_pretrained(base, directory / "adapter").eval()
        merged = AUTO[stage].from_pretrained(directory / "model").eval()
        if stage == "step2_reward":
            stock.config.pad_token_id = merged.config.pad_token_id
        with torch.no_grad():
            torch.testing.assert_close(
                merged(input_ids=ids).logits, stock(input_ids=ids).logits, rtol=0.0, atol=1e-5
            )
