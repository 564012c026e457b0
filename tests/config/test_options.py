"""The command line: dataclasses to flags and back, YAML, and what a mistype is told."""

import dataclasses
import sys
from dataclasses import dataclass
from typing import Literal

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from dschat_lora.config.addons import installed
from dschat_lora.config.files import parse_yaml
from dschat_lora.config.options import (
    build_config,
    command_line,
    flatten,
    given_options,
    group,
    option,
    option_fields,
    options_in_python,
    options_of,
    parse_config,
    typed_options,
)
from dschat_lora.config.stages import DpoStageConfig, RewardStageConfig, SupervisedConfig
from dschat_lora.runtime.stage_main import fail, run_main
from helpers.addons import of_the_whole
from helpers.drawing import drawing

# What users' scripts rely on. A flag may be added here, never taken away or renamed.
STEP1_FLAGS = """
    expert_lora_dim expert_lora_alpha expert_learning_rate router_aux_loss_coef
    neftune_noise_alpha early_stopping_patience rope_scaling
    eval_tasks eval_tasks_limit allow_image_urls max_image_pixels
    train_vision vision_learning_rate
    model_name_or_path dtype gradient_checkpointing dropout attn_implementation base_bits
    trust_remote_code add_eot_token eot_token chat_template compile compute_fp32_loss
    fused_kernels training_graphs
    lora_dim lora_alpha lora_dropout use_rslora target_modules lora_module_name train_bias
    modules_to_save enable_lora only_optimize_lora
    resume_from_checkpoint accept_changed_data save_interval save_minutes save_total_limit
    data_path data_weights data_split_name columns unpaired_rows sft_only_data_path
    eval_data_path eval_ratio data_split data_output_path max_seq_len overlong bad_rows
    train_on_prompt train_empty_think packing preprocessing_num_workers chat_template_kwargs
    streaming shuffle_buffer_size max_source_rows max_repeats
    per_device_train_batch_size per_device_eval_batch_size gradient_accumulation_steps
    tokens_per_device
    learning_rate lora_learning_rate lora_lr_multiplier loraplus_lr_ratio weight_decay adam_beta1
    adam_beta2 adam_epsilon max_grad_norm lr_scheduler_type num_warmup_steps num_train_epochs
    max_steps
    zero_stage offload offload_activations tensor_parallel_size sequence_parallel
    context_parallel_size
    deepspeed_config deepspeed
    output_dir overwrite_output_dir seed logging_steps eval_interval eval_iters
    sample_generations merge_adapter merge_max_kl report_to enable_tensorboard tensorboard_path
    print_loss distributed_timeout dry_run verbose
""".split()
REWARD_FLAGS = """
    share_prompt reward_loss center_rewards_coefficient num_padding_at_beginning
""".split()
DPO_FLAGS = """
    share_prompt num_padding_at_beginning beta loss_type label_smoothing length_normalization
    simpo_gamma desirable_weight undesirable_weight rpo_alpha precompute_ref_log_probs
    offload_reference_model
""".split()

# Flags of DeepSpeed-Chat's step 1 with a value its scripts use; None: a switch.
CLASSIC_FLAGS = {
    "data_path": "Dahoas/rm-static",
    "data_split": "2,4,4",
    "sft_only_data_path": "some/set",
    "data_output_path": "data_files/",
    "model_name_or_path": "facebook/opt-1.3b",
    "per_device_train_batch_size": "16",
    "per_device_eval_batch_size": "16",
    "max_seq_len": "512",
    "learning_rate": "1e-3",
    "weight_decay": "0.",
    "num_train_epochs": "16",
    "gradient_accumulation_steps": "8",
    "lr_scheduler_type": "cosine",
    "num_warmup_steps": "0",
    "output_dir": "./output",
    "seed": "1234",
    "local_rank": "0",
    "gradient_checkpointing": None,
    "dropout": "0.0",
    "offload": None,
    "dtype": "bf16",
    "zero_stage": "2",
    "lora_dim": "128",
    "lora_module_name": "decoder.layers.",
    "only_optimize_lora": None,
    "lora_learning_rate": "5e-4",
    "compute_fp32_loss": None,
    "enable_tensorboard": None,
    "tensorboard_path": "step1_tensorboard",
    "add_eot_token": None,
    "eot_token": "<|endoftext|>",
    "print_loss": None,
    "deepspeed": None,
    "deepspeed_config": "ds.json",
    "deepscale": None,
    "deepscale_config": "ds.json",
}
if "trackers" not in installed():
    del CLASSIC_FLAGS["enable_tensorboard"], CLASSIC_FLAGS["tensorboard_path"]
# Of its step 2 and DPO: those that they share with step 1, and what each has besides.
SHARED_FLAGS = CLASSIC_FLAGS.keys() - {"sft_only_data_path", "eot_token", "print_loss"}
SHARED = {name: value for name, value in CLASSIC_FLAGS.items() if name in SHARED_FLAGS}
OF_REWARD = {"num_padding_at_beginning": "1", "eval_interval": "0", "eval_iters": "100"}
OF_DPO = {
    "offload_reference_model": None,
    "beta": "0.1",
    "label_smoothing": "0.0",
    "print_loss": None,
}
# By the class of a stage, its flags and DeepSpeed-Chat's.
FLAGS = {
    SupervisedConfig: (STEP1_FLAGS, CLASSIC_FLAGS),
    RewardStageConfig: (STEP1_FLAGS + REWARD_FLAGS, SHARED | OF_REWARD),
    DpoStageConfig: (STEP1_FLAGS + DPO_FLAGS, SHARED | OF_DPO),
}


@dataclass(frozen=True)
class Part:
    size: int = option(3, help="a whole number")
    rate: float | None = option(None, help="a number, 100% optional")
    kind: Literal["one", "two"] = option("one", help="a choice")
    level: Literal[0, 1, 2] | None = option(None, help="a choice of numbers")

    def __post_init__(self):
        if self.size < 0:
            raise ValueError(f"--size must be >= 0, got {self.size}")


@dataclass(frozen=True)
class Whole:
    """A stage with one nested group."""

    part: Part = group(Part)
    name: str = option("x", help="a text")
    paths: tuple[str, ...] = option(("a", "b"), help="texts")
    weights: tuple[float, ...] = option((), help="numbers")
    fast: bool = option(False, help="a switch")
    slow: bool = option(True, help="a switch that is on")
    tuned: bool | Literal["auto"] = option("auto", help="a switch that decides by itself")
    given: frozenset[str] = given_options()


@dataclass(frozen=True)
class Pair:
    actor: Part = group(Part, flat=False)
    critic: Part = group(Part, flat=False)


@dataclass(frozen=True)
class Demanding:
    path: str = option(help="must be given")


def parse(line, config_class=Whole):
    return parse_config(config_class, line.split())


# ---------------------------------------------------------------------------- values


DEFAULTS = {
    **{"size": 3, "rate": None, "kind": "one", "level": None, "name": "x", "paths": ["a", "b"]},
    **{"weights": [], "fast": False, "slow": True, "tuned": "auto"},
}
NUMBERS = st.floats(1e-30, 1e30) | st.floats(-1e30, -1e-30) | st.just(0.0)
ODD = st.sampled_from(
    ["12:30", "010", "0x10", "1.50", "1_000", "2024-01-02", "1e3", "=", "+3", "null", "no", "a b"]
)
TEXTS = ODD | st.text(
    st.characters(exclude_characters="\0", codec="utf-8"), min_size=1, max_size=6
).filter(lambda text: not text.startswith("-"))
VALUES = st.fixed_dictionaries(
    {},
    optional={
        "size": st.integers(0, 2**63 - 1),
        "rate": NUMBERS,
        "kind": st.sampled_from(["one", "two"]),
        "level": st.sampled_from([0, 1, 2]),
        "name": TEXTS,
        "paths": st.lists(TEXTS, max_size=3),
        "weights": st.lists(NUMBERS, max_size=3),
        "fast": st.booleans(),
        "slow": st.booleans(),
        "tuned": st.sampled_from([True, False, "auto"]),
    },
)


@drawing(100)
@given(values=VALUES)
def test_values_are_the_same_on_a_command_line_in_a_file_and_in_python(values):
    config = parse_config(Whole, command_line(values))
    assert flatten(config) == {**DEFAULTS, **values}
    assert config.given == values.keys()
    assert all(isinstance(weight, float) for weight in config.weights)
    one = {name: v for name, v in values.items() if not isinstance(v, bool | list)}
    assert parse_config(Whole, [f"--{name}={v}" for name, v in one.items()]) == build_config(
        Whole, one
    )
    read = options_of(Whole, parse_yaml(yaml.safe_dump(values)), label="a file")
    assert build_config(Whole, read) == config
    assert build_config(Whole, options_in_python(Whole, values)) == config
    assert typed_options(config) == values
    single = {
        name: v[0] if isinstance(v, list) and len(v) == 1 else v for name, v in values.items()
    }
    assert build_config(Whole, options_of(Whole, single, label="a file")) == config


@pytest.mark.parametrize(
    ("line", "value"),
    [
        ("", "auto"),
        ("--tuned", True),
        ("--tuned --fast", True),
        ("--tuned on", True),
        ("--tuned=off", False),
        ("--no-tuned", False),
        ("--no-tuned --tuned auto", "auto"),
    ],
)
def test_switch_that_decides_by_itself_is_a_switch_too(line, value):
    config = parse(line)
    assert config.tuned == value
    assert config.fast == ("fast" in line)
    assert ("tuned" in config.given) == bool(line)
    assert parse(" ".join(command_line({"tuned": value}))).tuned == value


def test_nested_group_with_prefix_has_two_sets_of_options():
    pair = parse("--actor_size 8 --critic_kind two", Pair)
    assert pair == Pair(actor=Part(size=8), critic=Part(kind="two"))
    assert set(flatten(pair)) == {
        f"{who}_{name}" for who in ("actor", "critic") for name in ("size", "rate", "kind", "level")
    }


def test_prefixed_option_has_no_bare_name():
    with pytest.raises(ValueError, match="unknown option --size; did you mean --actor_size"):
        parse("--size 8", Pair)


def test_required_option_is_named_when_absent():
    with pytest.raises(ValueError, match="--path is required"):
        parse("", Demanding)
    assert parse("--path p", Demanding).path == "p"


# ---------------------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("line", "parts"),
    [
        *(
            (f"--{name}={number}", [f"--{name}: must be a number, got"])
            for name in ("rate", "weights")
            for number in ("nan", "inf", "-inf", "NaN", "Infinity", "1e999")
        ),
        ("--size eight", ["--size", "a whole number", "'eight'"]),
        ("--size 8.5", ["--size", "a whole number", "'8.5'"]),
        ("--size nan", ["--size", "a whole number", "'nan'"]),
        ("--rate fast", ["--rate", "a number", "'fast'"]),
        ("--kind three", ["--kind", "one of one, two", "'three'"]),
        ("--level 7", ["--level", "one of 0, 1, 2", "'7'"]),
        ("--weights 1 x", ["--weights", "a number", "'x'"]),
        ("--size -1", ["--size", ">= 0", "-1"]),
        ("--size", ["--size", "expected one argument"]),
        ("--fast yes", ["'yes'"]),
        ("--tuned yes", ["--tuned", "one of on, off, auto", "'yes'"]),
        ("--no-tuned yes", ["'yes'"]),
        ("--no-tuned=yes", ["--no-tuned", "'yes'"]),
        ("--fast=yes", ["--fast", "'yes'"]),
        ("stray", ["unexpected argument 'stray'"]),
    ],
)
def test_wrong_value_is_named_with_its_option_and_what_is_allowed(line, parts):
    with pytest.raises(ValueError, match=r"^[^\n]+$") as caught:
        parse(line)
    for part in parts:
        assert part in str(caught.value)


# ---------------------------------------------------------------------------- YAML


@pytest.fixture
def from_yaml(tmp_path):
    def parse_file(text, *argv, config_class=Whole):
        path = tmp_path / "run.yaml"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return parse_config(config_class, ["--config", str(path), *argv])

    return parse_file


def test_yaml_may_have_options_that_are_gone_where_they_did_nothing(from_yaml):
    assert from_yaml("lr_probe: 0\nprompt_lookup_num_tokens: 0\nname: y").name == "y"


@pytest.mark.parametrize(
    ("text", "value"), [("auto", "auto"), ("true", True), ("false", False), ("on", True)]
)
def test_yaml_sets_a_switch_that_decides_by_itself(from_yaml, text, value):
    assert from_yaml(f"tuned: {text}\n").tuned == value


def test_command_line_wins_over_yaml(from_yaml):
    config = from_yaml("size: 7\nname: file\nfast: true\n", "--size", "8", "--no-fast")
    assert (config.part.size, config.name, config.fast) == (8, "file", False)


def test_yaml_knows_prefixed_names(from_yaml):
    assert from_yaml("actor_size: 8\n", config_class=Pair).actor.size == 8


def test_yaml_null_is_the_absent_value_of_an_optional_field(from_yaml):
    assert from_yaml("rate: null\nlevel:\n").part == Part()


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("sise: 3", ["unknown option --sise", "did you mean --size"]),
        ("size: eight", ["size", "a whole number", "'eight'"]),
        ("size: 8.0", ["size", "a whole number", "8.0"]),
        ("size: true", ["size", "a whole number", "True"]),
        ("size: null", ["size", "a whole number"]),
        ("size: [8]", ["size", "a whole number", "['8']"]),
        ("rate: .nan", ["rate", "a number", "nan"]),
        ("rate: .inf", ["rate", "a number", "inf"]),
        ("kind: three", ["kind", "one of one, two", "three"]),
        ("level: 7", ["level", "one of 0, 1, 2", "7"]),
        ("fast: 'no'", ["fast", "true or false", "'no'"]),
        ("tuned: 'no'", ["tuned", "true or false or auto", "'no'"]),
        ("tuned: 1", ["tuned", "true or false or auto", "1"]),
        ("tuned: null", ["tuned", "true or false or auto", "None"]),
        ("fast: 1", ["fast", "true or false", "1"]),
        ("weights: [1, x]", ["weights", "a number", "'x'"]),
        ("name: [a, b]", ["name", "text", "['a', 'b']"]),
        ("name: {a: b}", ["name", "text"]),
        ("paths: null", ["paths", "None"]),
        ("paths: [null]", ["paths", "None"]),
        ("paths: [[a]]", ["paths", "['a']"]),
        ("- size", ["must hold 'option: value' lines"]),
        ("", ["must hold 'option: value' lines"]),
        ("a: [", ["cannot be read"]),
        (b"\xff\xfe\x00", ["cannot be read"]),
        ("config: other.yaml", ["unknown option --config"]),
        ("lr_probe: 60", ["option --lr_probe was removed in version 0.3.0"]),
        ("given: [size]", ["unknown option --given"]),
        ("1: 2", ["unknown option --1"]),
    ],
)
def test_yaml_mistake_names_the_file_the_option_and_what_is_allowed(from_yaml, text, parts):
    with pytest.raises(ValueError, match="run.yaml") as caught:
        from_yaml(text)
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("size: 1\nname: a\nsize: 2", "'size' is given twice"),
        ("name: &a {x: 1, x: 2}", "'x' is given twice"),
        ("size: !!int ''", "int"),
        ("fast: !!bool x", "'x' is neither true nor false"),
        ("name: !!timestamp x", "timestamp"),
        ("name: !!binary eA==", "binary"),
        ("name: " + "[" * 5000, "nested too deeply"),
    ],
)
def test_yaml_that_was_a_traceback_or_lost_a_value_is_refused(from_yaml, text, words):
    with pytest.raises(ValueError, match=r"^--config .*run\.yaml cannot be read: ") as caught:
        from_yaml(text)
    assert words in str(caught.value)


@pytest.mark.parametrize("text", ["12:30", "010", "0x10", "1.50", "1_000", "2024-01-02", "1e3"])
def test_yaml_text_arrives_as_it_is_written(from_yaml, text):
    assert from_yaml(f"name: {text}\npaths: {text}\n") == parse(f"--name {text} --paths {text}")


def test_yaml_merges_and_aliases_are_read(from_yaml):
    assert from_yaml("<<: &a {size: 4}\nname: &b n\npaths: [*b, *b]\n") == parse(
        "--size 4 --name n --paths n n"
    )


@pytest.mark.parametrize("option", ["name", "paths"])
def test_an_empty_text_is_refused_as_that_of_a_variable_which_is_not_set(from_yaml, option):
    message = f"--{option}: must be some text, in UTF-8, got ''"
    for words in ([f"--{option}", ""], [f"--{option}="]):
        with pytest.raises(ValueError, match=message):
            parse_config(Whole, words)
    with pytest.raises(ValueError, match=f"run.yaml: {option} must be some text, in UTF-8, got ''"):
        from_yaml(f"{option}: ''\n")


@pytest.mark.parametrize("option", ["name", "paths"])
def test_two_dashes_as_a_value_are_refused_and_not_dropped(option):
    with pytest.raises(
        ValueError, match=f"--{option} cannot be --, which marks the end of options"
    ):
        parse_config(Whole, [f"--{option}=--"])


def test_of_an_option_given_twice_the_last_counts_and_a_file_of_options_is_given_once():
    assert parse("--paths a b --paths c").paths == ("c",)
    with pytest.raises(ValueError, match="--config is given twice"):
        parse("--config a.yaml --config b.yaml")
    assert parse("--size 1 --size 2").part.size == 2, "of a single value the last one counts"


# ---------------------------------------------------------------------------- ending


def run_with(monkeypatch, argv, check=lambda config: config, main=lambda config: None):
    monkeypatch.setattr(sys, "argv", ["main.py", *argv])
    run_main(Whole, check, main, description="What this stage does.")


def test_run_main_hands_the_checked_config_to_main(monkeypatch):
    seen = []
    run_with(
        monkeypatch,
        ["--size", "7"],
        check=lambda config: dataclasses.replace(config, name="checked"),
        main=seen.append,
    )
    assert (seen[0].part.size, seen[0].name) == (7, "checked")


def test_mistake_ends_with_code_2_and_one_line(monkeypatch, capsys):
    with pytest.raises(SystemExit, match="2"):
        run_with(monkeypatch, ["--size", "x"])
    out, err = capsys.readouterr()
    assert out == ""
    assert err == "error: --size: must be a whole number, got 'x'\n"


def test_mistake_found_by_check_ends_the_same_way(monkeypatch, capsys):
    def check(config):
        raise ValueError("two\nlines   of text")

    with pytest.raises(SystemExit, match="2"):
        run_with(monkeypatch, [], check=check)
    assert capsys.readouterr().err == "error: two lines of text\n"


def test_error_inside_main_is_not_taken_for_a_wrong_option(monkeypatch):
    def main(config):
        raise ValueError("a bug")

    with pytest.raises(ValueError, match="a bug"):
        run_with(monkeypatch, [], main=main)


def test_other_ranks_end_alike_without_a_word(monkeypatch, capsys):
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(SystemExit, match="2"):
        fail("wrong")
    assert capsys.readouterr() == ("", "")


def test_help_names_every_option_with_its_text_and_default(monkeypatch, capsys):
    with pytest.raises(SystemExit, match="0"):
        run_with(monkeypatch, ["--help"])
    shown = " ".join(capsys.readouterr().out.split())
    assert "What this stage does." in shown
    assert "--size N a whole number (default: 3)" in shown
    assert "--rate X a number, 100% optional" in shown
    assert "--kind {one,two} a choice (default: one)" in shown
    assert "texts (default: a b)" in shown
    assert "--fast, --no-fast a switch" in shown
    assert "--tuned [{on,off,auto}] a switch that decides by itself (default: auto)" in shown
    assert "--no-tuned same as --tuned off" in shown
    assert "local_rank" not in shown


@dataclass(frozen=True)
class Zeros:
    steps: int = option(0, help="a count")
    decay: float = option(0.0, help="a share")
    off: bool = option(False, help="a switch")
    listed: tuple[str, ...] = option((), help="texts")


def test_help_shows_a_default_of_zero_though_it_equals_false(capsys):
    with pytest.raises(SystemExit):
        parse("--help", Zeros)
    shown = " ".join(capsys.readouterr().out.split())
    assert "--steps N a count (default: 0)" in shown
    assert "--decay X a share (default: 0.0)" in shown
    assert shown.count("default") == 2


def is_ours(name):
    """Whether a flag is no launcher's."""
    return not name.startswith(("local_rank", "deepscale"))


@of_the_whole
@pytest.mark.parametrize("config_class", FLAGS)
def test_flags_of_a_stage_are_these_each_with_help_and_a_default(config_class, capsys):
    flags, _ = FLAGS[config_class]
    options = option_fields(config_class)
    assert sorted(options) == sorted(flags)
    for field, _ in options.values():
        assert len(field.metadata["help"]) > 8
        assert field.default is not dataclasses.MISSING
    with pytest.raises(SystemExit, match="0"):
        parse_config(config_class, ["--help", "all"])
    shown = capsys.readouterr().out
    assert [name for name in flags if f"--{name}" not in shown] == []


@pytest.mark.parametrize("config_class", FLAGS)
def test_classic_flags_are_accepted_with_their_meaning_alone_and_together(config_class):
    _, classic = FLAGS[config_class]
    whole = {name: value for name, value in classic.items() if is_ours(name)}
    argv = [part for name, value in classic.items() for part in (f"--{name}", value) if part]
    together = parse_config(config_class, argv)
    assert together.given == whole.keys()
    for name, value in classic.items():
        alone = parse_config(config_class, [f"--{name}", *([] if value is None else [value])])
        if value is not None:
            assert parse_config(config_class, [f"--{name}={value}"]) == alone
        assert alone.given == {name} & whole.keys()
        for config in (alone, together) if is_ours(name) else ():
            flag = flatten(config)[name]
            flag = flag[0] if isinstance(flag, list) else flag
            assert flag == (True if value is None else type(flag)(value))


@pytest.mark.parametrize(
    ("config_class", "expected"),
    [
        (RewardStageConfig, {"packing": False, "learning_rate": 5e-5, "share_prompt": True}),
        (DpoStageConfig, {"packing": False, "learning_rate": 1e-6, "beta": 0.1}),
    ],
)
def test_default_of_a_stage_is_used_and_shown_in_its_help(capsys, config_class, expected):
    flat = flatten(config_class())
    assert {name: flat[name] for name in expected} == expected
    with pytest.raises(SystemExit, match="0"):
        parse_config(config_class, ["--help"])
    shown = " ".join(capsys.readouterr().out.split())
    assert f" for adapters, {expected['learning_rate']} for base weights" in shown


def test_one_option_given_leaves_a_stages_other_defaults():
    config = parse_config(DpoStageConfig, ["--weight_decay", "0.1", "--max_seq_len", "64"])
    assert (config.optim.learning_rate, config.optim.weight_decay) == (1e-6, 0.1)
    assert config.optim.default_lora_learning_rate == 1e-5
    assert (config.data.packing, config.data.max_seq_len) == (False, 64)
