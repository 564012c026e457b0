"""Options that change nothing are found by the conditions of their declarations."""

from dataclasses import dataclass, replace
from typing import ClassVar

import pytest

from dschat_lora.config.data import DataConfig
from dschat_lora.config.options import (
    ELSEWHERE,
    NEVER,
    given_options,
    group,
    option,
    option_names,
    parse_config,
)
from dschat_lora.config.stages import DpoStageConfig, RewardStageConfig, SupervisedConfig
from dschat_lora.config.when import messages, no_effect, without_effect
from dschat_lora.rl.options.config import RlhfConfig
from helpers.addons import of_addon

GLUE, NLG = of_addon("glue.config:GlueConfig"), of_addon("nlg.config:NlgConfig")
DISTILL = of_addon("distill.stage:DistillConfig")
TASK = {each: ["--model_name_or_path", "m", "--task_name", "cola"] for each in GLUE}
STAGES = [
    *(SupervisedConfig, RewardStageConfig, DpoStageConfig, RlhfConfig),
    *(*DISTILL, *NLG, *GLUE),
]


def notes(config_class, line):
    return without_effect(parse_config(config_class, [*TASK.get(config_class, []), *line.split()]))


@pytest.mark.parametrize("config_class", STAGES)
def test_conditions_name_what_the_stage_has(config_class):
    config = parse_config(config_class, TASK.get(config_class, []))
    found = dict(messages(config))
    assert found
    assert set(getattr(config_class, "when", {})) <= set(option_names(config_class))


@dataclass(frozen=True)
class Head:
    width: int = option(4, help="its width", when="size")
    size: int = option(0, help="its size")
    near: int = option(1, help="of a size above 8", when="size>8")


def odd_tail(value):
    return no_effect(f"tail {value('tail')}", ": it is odd") if value("tail") % 2 else ""


@dataclass(frozen=True)
class Animal:
    when: ClassVar = {"left_near": ELSEWHERE}

    body: Head = group(Head)
    left: Head = group(Head, flat=False, when="has_left_side")
    right: Head = group(Head, flat=False, size=3)
    kind: str = option("none", help="of animal")
    wild: bool = option(True, help="or not")
    tame: bool = option(False, help="or not")
    tail: int = option(2, help="an even number", when=odd_tail)
    stripes: int = option(0, help="of a zebra", when="kind=zebra,okapi")
    mane: int = option(7, help="of all else", when="not kind=zebra,okapi")
    fear: int = option(1, help="of the wild", when="wild")
    trust: int = option(1, help="of the others", when="not wild")
    name: str = option("", help="of one that is tame, or of a kind", when="tame or kind")
    price: int = option(1, help="of one that is not tame", when="not tame")
    bite: int = option(1, help="of the wild, or the large", when="wild or size")
    bark: int = option(1, help="of the wild, or untamed", when="wild or not tame")
    gills: bool = option(False, help="of fish", when=NEVER)
    given: frozenset[str] = given_options()

    @property
    def has_left_side(self):
        return self.kind != "flounder"


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("", []),
        ("--width 5", ["--width has no effect without --size"]),
        ("--width 5 --size 1", []),
        ("--near 2 --size 8", ["--near has no effect without --size above 8"]),
        ("--near 2 --size 9", []),
        ("--left_width 5", ["--left_width has no effect without --left_size"]),
        ("--left_width 5 --size 1", ["--left_width has no effect without --left_size"]),
        ("--left_size 1 --kind flounder", ["--left_size has no effect without a left side"]),
        ("--left_near 5", ["--left_near has no effect in this stage"]),
        ("--right_width 5", []),
        ("--right_width 5 --right_size 0", ["--right_width has no effect with --right_size 0"]),
        ("--stripes 9", ["--stripes has no effect without --kind zebra or okapi"]),
        ("--stripes 9 --kind okapi", []),
        ("--stripes 0", []),
        ("--mane 0 --kind okapi", ["--mane has no effect with --kind okapi"]),
        ("--fear 2", []),
        ("--fear 2 --no-wild", ["--fear has no effect with --no-wild"]),
        ("--trust 2", ["--trust has no effect without --no-wild"]),
        ("--name Leo", ["--name has no effect without --tame or --kind"]),
        ("--name Leo --tame", []),
        ("--name Leo --kind lion", []),
        ("--price 2 --tame", ["--price has no effect with --tame"]),
        ("--bite 2", []),
        ("--bite 2 --no-wild", ["--bite has no effect without --size and with --no-wild"]),
        ("--bark 2 --no-wild --tame", ["--bark has no effect with --no-wild and with --tame"]),
        ("--gills", ["accepted without effect: --gills (--help compatibility says why)"]),
        ("--no-gills", []),
        ("--tail 4", []),
        ("--tail 3", ["--tail 3 has no effect: it is odd"]),
        (
            "--gills --stripes 1",
            [
                "--stripes has no effect without --kind zebra or okapi",
                "accepted without effect: --gills (--help compatibility says why)",
            ],
        ),
    ],
)
def test_what_rules_an_option_out_is_said(line, expected):
    assert notes(Animal, line) == expected


def test_an_option_whose_list_a_check_has_emptied_is_found():
    config = parse_config(RewardStageConfig, ["--sft_only_data_path", "more.jsonl"])
    emptied = replace(config, data=DataConfig())
    assert without_effect(emptied) == ["--sft_only_data_path has no effect in this stage"]


def test_a_condition_that_names_nothing_is_an_error():
    @dataclass(frozen=True)
    class Misspelt:
        lora_dim: int = option(0, help="rank")
        lora_alpha: int = option(0, help="scale", when="tame or lora_dmi")
        tame: bool = option(True, help="or not")

    with pytest.raises(LookupError, match="lora_dmi"):
        list(messages(Misspelt()))


GRPO = "--algorithm grpo"
CONSTANT = "--lr_scheduler_type constant --num_warmup_steps 3"


@pytest.mark.parametrize(
    ("config_class", "line", "expected"),
    [
        (SupervisedConfig, CONSTANT, ["num_warmup_steps:with --lr_scheduler_type constant"]),
        *((each, CONSTANT, []) for each in NLG),
        (SupervisedConfig, "--merge_max_kl 1 --lora_dim 4", [
            "merge_max_kl:without --merge_adapter or --no-only_optimize_lora"
        ]),
        (SupervisedConfig, "--lora_dim 4 --merge_adapter --merge_max_kl 1", []),
        (RewardStageConfig, "--sample_generations 3", ["sample_generations:in this stage"]),
        (DpoStageConfig, "--sample_generations 3", []),
        (DpoStageConfig, "--unpaired_rows all", ["unpaired_rows:in this stage"]),
        (RlhfConfig, "--actor_lora_learning_rate 1e-3", [
            "actor_lora_learning_rate:without --actor_lora_dim"
        ]),
        (RlhfConfig, "--critic_lora_dim 4 --loraplus_lr_ratio 2 --critic_lora_alpha 8", []),
        (RlhfConfig, f"{GRPO} --critic_lora_dim 4 --critic_model_name_or_path r", [
            "critic_lora_dim:without a critic"
        ]),
        (RlhfConfig, f"{GRPO} --gamma 0.9", ["gamma:with --algorithm grpo"]),
        (RlhfConfig, "--algorithm reinforce_pp --gamma 0.9", []),
        (RlhfConfig, "--algorithm reinforce_pp --lam 0.9", ["lam:without a critic"]),
        *((each, "--kl_in loss", ["kl_in:with --algorithm distill"]) for each in DISTILL),
        (RlhfConfig, "--no-do_sample --top_k 5", ["top_k:with --no-do_sample"]),
        (RlhfConfig, "--rollout_is sequence", [
            "rollout_is:without --rollout_correction or --importance_cap"
        ]),
        (RlhfConfig, "--rollout_correction none --rollout_is_threshold 3", [
            "rollout_is_threshold:without --rollout_correction or --importance_cap"
        ]),
        (RlhfConfig, "--judge_function j:j --eval_prompts 0", [
            "judge_function:with --eval_prompts 0"
        ]),
        *((each, "--jsd_beta 0.3", ["jsd_beta:without --distill_loss jsd"]) for each in DISTILL),
        *((each, "--jsd_beta 0.3 --distill_loss jsd", []) for each in DISTILL),
        *((each, "--lora_init uniform", ["lora_init:without --apply_lora"]) for each in GLUE),
        *((each, "--lora_init uniform --apply_lora", []) for each in GLUE),
    ],
)  # fmt: skip
def test_options_of_stages_that_change_nothing_are_found(config_class, line, expected):
    pairs = (text.split(":") for text in expected)
    assert notes(config_class, line) == [f"--{name} has no effect {why}" for name, why in pairs]
