"""Help by sections at 80 columns, and what other trainers' options are told."""

import re
import sys

import pytest

import dschat_lora.__main__ as command
from dschat_lora.config.options import option_fields, option_names, parse_config
from dschat_lora.config.parser import COMPATIBILITY, HINTS, OTHER, SECTIONS
from dschat_lora.config.stages import DpoStageConfig, RewardStageConfig, SupervisedConfig
from dschat_lora.experiments.nlg.config import NlgConfig
from dschat_lora.rl.config import RlhfConfig

STAGES = (SupervisedConfig, RewardStageConfig, DpoStageConfig, RlhfConfig, NlgConfig)


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
    assert {option for option, _ in HINTS.values()} <= known
    # One stage alone has the original's --fp16.
    assert not HINTS.keys() & known - {"fp16"}


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--bf16", "unknown option --bf16; --dtype bf16 computes"),
        ("--fp16 true", "unknown option --fp16; --dtype fp16 computes"),
        ("--load_in_4bit", "unknown option --load_in_4bit; there is no 4-bit base"),
        ("--load-in-4bit", "unknown option --load-in-4bit; there is no 4-bit base"),
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
    with pytest.raises(ValueError, match="unknown option --lora_r; did you mean"):
        parse_config(RlhfConfig, ["--lora_r", "8"])


def test_hint_ends_the_message_about_a_file_too(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("num_train_epochs: 0.5\n")
    with pytest.raises(ValueError, match=r"run.yaml: num_train_epochs must be .*; --max_steps N"):
        parse_config(SupervisedConfig, ["--config", str(path)])
    path.write_text("bf16: true\n")
    with pytest.raises(ValueError, match=r"run.yaml: unknown option --bf16; --dtype bf16"):
        parse_config(SupervisedConfig, ["--config", str(path)])
