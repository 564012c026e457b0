"""Help by sections at 80 columns, and what other trainers' options are told."""

import re
import sys

import pytest

import dschat_lora.__main__ as command
from dschat_lora.config.options import (
    option_aliases,
    option_fields,
    option_names,
    options_in_python,
    parse_config,
)
from dschat_lora.config.other_names import OTHER_NAMES
from dschat_lora.config.parser import COMPATIBILITY, OTHER, SECTIONS
from dschat_lora.config.stages import (
    AuditConfig,
    DpoStageConfig,
    RewardStageConfig,
    ScoreConfig,
    SupervisedConfig,
)
from dschat_lora.config.verbs import EvalConfig, ExportConfig, GenerateConfig, MergeConfig
from dschat_lora.experiments.glue.config import GlueConfig
from dschat_lora.experiments.nlg.config import NlgConfig
from dschat_lora.rl.config import DistillConfig, RlhfConfig
from dschat_lora.serving.config import ChatConfig, ServeConfig
from dschat_lora.tinker.config import TinkerConfig

STAGES = (SupervisedConfig, RewardStageConfig, DpoStageConfig, RlhfConfig, NlgConfig)
COMMANDS = (
    *STAGES,
    *(DistillConfig, GlueConfig, AuditConfig, ScoreConfig, EvalConfig, GenerateConfig),
    *(MergeConfig, ExportConfig, ChatConfig, ServeConfig, TinkerConfig),
)


@pytest.fixture
def shown(monkeypatch, capsys):
    """``shown(word, ...)``: what ``dschat-lora word ...`` prints at 80 columns before it ends."""
    monkeypatch.setenv("COLUMNS", "80")

    def call(*words):
        monkeypatch.setattr(sys, "argv", ["dschat-lora", *words])
        with pytest.raises(SystemExit, match="0"):
            command.main()
        return capsys.readouterr().out

    return call


def titles(text):
    return re.findall(r"^(\S.*):$", text, re.MULTILINE)


@pytest.mark.parametrize("verb", command.VERBS)
def test_help_fits_80_columns(verb, shown):
    for more in ([], ["all"]):
        assert [line for line in shown(verb, "--help", *more).splitlines() if len(line) > 80] == []


def test_example_comes_first_then_sections_in_the_order_of_need(shown):
    assert titles(shown("sft", "--help")) == [
        "examples", "model", "data", "training", "LoRA", "output and checkpoints", "evaluation",
        "logging", "memory and processes", "other options",
    ]  # fmt: skip
    assert titles(shown("rlhf", "-h"))[:4] == [
        "examples", "actor", "critic and reward model", "model",
    ]  # fmt: skip


def test_first_option_of_a_section_is_what_a_person_looks_for(shown):
    text = shown("sft", "--help")
    first = {
        part.splitlines()[0].rstrip(":"): part.split()[1 + part.splitlines()[0].count(" ")]
        for part in re.split(r"\n\n(?=\S.*:\n)", text)[1:]
    }
    assert first["model"] == "--model_name_or_path"
    assert first["data"] == "--data_path"
    assert first["training"] == "--num_train_epochs"
    assert first["LoRA"] == "--lora_dim"
    assert first["output and checkpoints"] == "--output_dir"


def test_options_for_compatibility_are_named_and_explained_by_help_all_alone(shown):
    short, whole = shown("rlhf", "--help"), shown("rlhf", "--help", "all")
    assert "explained by --help all: --deepspeed, " in short
    assert "--enable_hybrid_engine" in short
    assert "rollouts have a decode loop of their own" not in " ".join(short.split())
    assert "rollouts have a decode loop of their own" in " ".join(whole.split())
    assert titles(whole)[-1] == COMPATIBILITY
    for name in option_names(RlhfConfig):
        assert re.search(rf"--{name}\b", short), name


@pytest.mark.parametrize("config_class", STAGES)
def test_every_option_of_a_stage_has_a_section(config_class):
    sections = {name: field.metadata["section"] for name, (field, _) in option_fields(config_class)}
    known = {*SECTIONS, COMPATIBILITY}
    assert {name: s for name, s in sections.items() if s not in known} == {}
    assert OTHER not in sections.values()


def test_options_that_come_first_in_a_section_exist():
    known = {name for each in STAGES for name in option_names(each)}
    assert {name for first in SECTIONS.values() for name in first} <= known


@pytest.mark.parametrize("name", OTHER_NAMES)
def test_what_does_the_same_as_another_trainers_option_is_there_with_the_value_named(name):
    tried = 0
    for command_class in COMMANDS:
        names = {*option_names(command_class), *option_aliases(command_class)}
        same = [option for option in OTHER_NAMES[name].options if option in names]
        if not same or name in names:
            continue
        tried += 1
        with pytest.raises(TypeError) as caught:
            options_in_python(command_class, {name: True})
        said = str(caught.value)
        assert said.startswith(f"unknown option --{name}; ")
        assert f"--{same[0]} " in said
        for option, value in re.findall(r"--(\w+)(?: (N|\d+|bf16|fp16|auto)\b)?", said)[1:]:
            assert option in names
            if value:
                options_in_python(command_class, {option: {"N": 8}.get(value, value)})
    assert tried
    assert OTHER_NAMES[name].sources


@pytest.mark.parametrize("command_class", COMMANDS)
def test_further_names_and_hints_of_options_belong_to_options(command_class):
    aliases, names = option_aliases(command_class), option_names(command_class)
    assert set(aliases.values()) <= set(names)
    assert not aliases.keys() & set(names)
    hints = [field.metadata["hint"] for _, (field, _) in option_fields(command_class)]
    assert {*re.findall(r"--(\w+)", " ".join(hints))} <= set(names)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--bf16", "unknown option --bf16; --dtype bf16 does"),
        ("--fp16 true", "unknown option --fp16; --dtype sets the type"),
        ("--load_in_4bit", "unknown option --load_in_4bit; --base_bits 4 holds"),
        (
            "--load-in-8bit",
            "unknown option --load-in-8bit; no base is held in 8 bits, and files of",
        ),
        ("--warmup_ratio 0.1", "--num_warmup_steps N counts optimizer steps"),
        ("--warmup_ratio=0.1", "unknown option --warmup_ratio; --num_warmup_steps N"),
        ("--num_train_epochs 0.5", "got '0.5'; --max_steps N ends a run within an epoch"),
        (
            "--attn_implementation flash_attention_2",
            "sdpa, flex_attention, eager, got 'flash_attention_2'; sdpa runs PyTorch's flash",
        ),
        ("--lora_r 8", "unknown option --lora_r; --lora_dim N is the rank"),
        ("--lora_rank 8", "unknown option --lora_rank; did you mean --lora_"),
    ],
)
def test_options_of_other_trainers_are_told_what_does_the_same(line, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        parse_config(SupervisedConfig, line.split())


def test_hint_names_no_option_that_the_command_lacks():
    with pytest.raises(ValueError, match="unknown option --lora_r; --actor_lora_dim N is the rank"):
        parse_config(RlhfConfig, ["--lora_r", "8"])
    with pytest.raises(ValueError, match="unknown option --max_length; did you mean"):
        parse_config(RlhfConfig, ["--max_length", "8"])


def test_hint_ends_the_message_about_a_file_too(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("num_train_epochs: 0.5\n")
    with pytest.raises(ValueError, match=r"run.yaml: num_train_epochs must be .*; --max_steps N"):
        parse_config(SupervisedConfig, ["--config", str(path)])
    path.write_text("bf16: true\n")
    with pytest.raises(ValueError, match=r"run.yaml: unknown option --bf16; --dtype bf16"):
        parse_config(SupervisedConfig, ["--config", str(path)])
