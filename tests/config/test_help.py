"""Help by sections at 80 columns, and what other trainers' options are told."""

import re
import sys

import pytest

import dschat_lora.__main__ as command
from dschat_lora.commands.stages import STAGES as VERBS_OF_STAGES
from dschat_lora.commands.train import run_stage
from dschat_lora.config.addons import installed
from dschat_lora.config.options import (
    option_aliases,
    option_fields,
    option_names,
    options_in_python,
)
from dschat_lora.config.other_names import other_names
from dschat_lora.config.parser import COMPATIBILITY, EVERYDAY, OTHER, SECTIONS, unknown_option
from dschat_lora.config.stages import DpoStageConfig, RewardStageConfig, SupervisedConfig
from dschat_lora.config.values import is_switch, value_shape
from dschat_lora.config.verbs import GenerateConfig, MergeConfig
from dschat_lora.rl.options.config import RlhfConfig
from helpers.addons import of_addon, of_the_whole

NLG, TINKER = of_addon("nlg.config:NlgConfig"), of_addon("tinker.config:TinkerConfig")
STAGES = (SupervisedConfig, RewardStageConfig, DpoStageConfig, RlhfConfig, *NLG)
OF_ADDONS = (
    "audit.config:AuditConfig",
    *("evaluation.config:EvalConfig", "evaluation.config:ScoreConfig", "glue.config:GlueConfig"),
    *("serving.config:ChatConfig", "serving.config:ServeConfig", "publish.config:ExportConfig"),
    "distill.stage:DistillConfig",
)
COMMANDS = (
    *STAGES,
    *(GenerateConfig, MergeConfig),
    *(each for path in OF_ADDONS for each in of_addon(path)),
    *TINKER,
)
KNOWN = {each: {*option_names(each), *option_aliases(each)} for each in COMMANDS}
TRAINERS = {
    "DeepSpeed-Chat",
    "TRL",
    "PEFT",
    "transformers",
    "Unsloth",
    "axolotl",
    "LLaMA-Factory",
    "OpenRLHF",
    "verl",
}
NO_VALUES = {"names", "says", "sets", "has", "is"}  # what may follow an option that has choices


def annotations(command_class):
    """Type and allowed values of each option, as words."""
    for name, (_, annotation) in option_fields(command_class).items():
        if annotation is bool or is_switch(annotation):
            yield name, (bool, ())
        else:
            kind, choices, _ = value_shape(annotation)
            yield name, (kind, [str(choice) for choice in choices])


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


VERBS = [*command.VERBS, *(verb for each in installed().values() for verb in each.verbs)]


@pytest.mark.parametrize("verb", VERBS)
def test_help_fits_80_columns(verb, shown):
    for more in ([], ["all"]):
        assert [line for line in shown(verb, "--help", *more).splitlines() if len(line) > 80] == []


@of_the_whole
def test_example_comes_first_then_sections_in_the_order_of_need(shown):
    assert titles(shown("sft", "--help")) == [
        "examples", "model", "data", "training", "LoRA", "output and checkpoints", "evaluation",
        "logging", "memory and processes", "other options",
    ]  # fmt: skip
    assert titles(shown("rlhf", "-h"))[:4] == [
        "examples", "actor", "critic and reward model", "data",
    ]  # fmt: skip


def test_first_option_of_a_section_is_what_a_person_looks_for(shown):
    text = shown("sft", "--help")
    first = {
        part.splitlines()[0].rstrip(":"): part.split()[1 + part.splitlines()[0].count(" ")]
        for part in re.split(r"\n\n(?=\S.*:\n)", text)[1:]
    }
    assert first["model"] == "--model_name_or_path"
    assert first["data"] == "--data_path"
    assert first["training"] == "--learning_rate"
    assert first["LoRA"] == "--lora_dim"
    assert first["output and checkpoints"] == "--output_dir"


EVERYDAY_BY_STAGE = {
    "sft": """
        model_name_or_path data_path max_seq_len columns eval_data_path learning_rate
        num_train_epochs max_steps per_device_train_batch_size gradient_accumulation_steps lora_dim
        lora_alpha output_dir resume_from_checkpoint dry_run eval_interval report_to base_bits
        zero_stage gradient_checkpointing
    """,
    "reward": """
        model_name_or_path data_path max_seq_len columns eval_data_path learning_rate
        num_train_epochs max_steps per_device_train_batch_size gradient_accumulation_steps lora_dim
        lora_alpha reward_loss output_dir resume_from_checkpoint dry_run eval_interval report_to
        base_bits zero_stage
    """,
    "dpo": """
        model_name_or_path data_path max_seq_len columns learning_rate num_train_epochs max_steps
        per_device_train_batch_size gradient_accumulation_steps lora_dim lora_alpha loss_type beta
        output_dir resume_from_checkpoint dry_run eval_interval report_to base_bits zero_stage
    """,
    "rlhf": """
        actor_model_name_or_path actor_lora_dim actor_learning_rate critic_model_name_or_path
        data_path max_prompt_seq_len max_answer_seq_len per_device_training_batch_size
        num_train_epochs max_steps num_generations per_device_generation_batch_size
        generation_batches rollout_engine reward_function algorithm kl_coef output_dir
        resume_from_checkpoint eval_interval
    """,
    "distill": """
        actor_model_name_or_path actor_lora_dim actor_learning_rate data_path max_prompt_seq_len
        max_answer_seq_len per_device_training_batch_size num_train_epochs max_steps
        per_device_generation_batch_size generation_batches temperature rollout_engine output_dir
        resume_from_checkpoint eval_interval teacher_model_name_or_path distill_loss
        teacher_system_prompt on_policy_share
    """,
}


def explained(text):
    """The options that a help explains, in its order."""
    return [name for name in re.findall(r"^  --(\w+)", text, re.MULTILINE) if name != "config"]


@of_the_whole
@pytest.mark.parametrize("stage", VERBS_OF_STAGES)
def test_help_of_a_stage_is_its_everyday_options_and_how_many_more_there_are(stage, shown):
    text = shown(stage, "--help")
    found = explained(text)
    assert found == EVERYDAY_BY_STAGE[stage].split()
    assert len(re.findall("^  --", text, re.MULTILINE)) <= 25
    assert len(text.splitlines()) <= 90
    more = set(option_names(VERBS_OF_STAGES[stage].config)) - set(found)
    assert f"\n{len(more)} more options: --help all" in text
    counts = re.search(r"By heading: (.*)\.$", " ".join(text.split()))[1].split(", ")
    assert sum(int(each.rpartition(" ")[2]) for each in counts) == len(more)


@of_the_whole
@pytest.mark.parametrize("stage", VERBS_OF_STAGES)
def test_help_all_explains_every_option_with_the_everyday_ones_first_in_each_section(stage, shown):
    text = shown(stage, "--help", "all")
    assert set(option_names(VERBS_OF_STAGES[stage].config)) <= set(explained(text))
    everyday, found = set(EVERYDAY_BY_STAGE[stage].split()), []
    for part in re.split(r"\n\n(?=\S.*:\n)", text):
        names = explained(part)
        first = [name for name in names if name in everyday]
        assert names[: len(first)] == first
        found += first
    assert found == EVERYDAY_BY_STAGE[stage].split()


def test_everyday_option_has_its_first_line_in_help_and_its_details_in_help_all(shown, capsys):
    short, whole = (" ".join(shown("sft", "--help", *more).split()) for more in ([], ["all"]))
    first = "hub name, model directory or output of an earlier stage; default: the bundled tiny"
    assert first in short
    assert first in whole
    assert "repository:file.gguf" not in short
    assert "tiny model; or a GGUF file, from the hub as repository:file.gguf" in whole
    assert "training batch size per device, in rows (default: 16)" in short
    assert "training batch size per device, in rows (default: 16); of one micro" in whole
    assert "LoRA rank; 0 trains all weights; default: 16" in short
    with pytest.raises(SystemExit):
        run_stage("sft", argv=["--help"])  # as a script
    assert "0 trains all weights; default: 0" in " ".join(capsys.readouterr().out.split())


def test_help_of_a_word_is_of_options_that_have_it_in_their_name_or_heading(shown):
    text = shown("sft", "--help", "lora")
    assert titles(text) == ["training", "LoRA", "compatibility"]
    assert {"lora_learning_rate", "loraplus_lr_ratio", "use_rslora"} <= set(explained(text))
    assert "modules_to_save" in explained(text)
    assert "seed" not in explained(text)


def test_help_of_a_word_that_nothing_has_says_so(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["dschat-lora", "sft", "--help", "banana"])
    with pytest.raises(SystemExit, match="2"):
        command.main()
    assert capsys.readouterr() == (
        "",
        "error: --help banana: no option or heading contains this word; see --help all\n",
    )


def test_sections_of_addons_and_of_compatibility_come_last_in_help_all(shown):
    whole = titles(shown("sft", "--help", "all"))
    sections = {each.metadata["section"] for each, _ in option_fields(SupervisedConfig).values()}
    addons = [title for name in installed() if (title := f"add-on {name}") in sections]
    assert "add-on images" in addons or "images" not in installed()
    assert whole[-2 - len(addons) :] == ["other options", *addons, COMPATIBILITY]
    assert whole[-1] == titles(shown("rlhf", "--help", "all"))[-1] == COMPATIBILITY


@pytest.mark.parametrize("config_class", STAGES)
def test_every_option_of_a_stage_has_a_section(config_class):
    sections = {
        name: field.metadata["section"] for name, (field, _) in option_fields(config_class).items()
    }
    known = {*SECTIONS, COMPATIBILITY, *(f"add-on {name}" for name in installed())}
    assert {name: s for name, s in sections.items() if s not in known} == {}
    assert OTHER not in sections.values()


@of_the_whole
def test_everyday_options_exist():
    known = {name for each in STAGES for name in option_names(each)}
    assert {*EVERYDAY} <= known
    for stage in VERBS_OF_STAGES.values():
        assert {*stage.config.everyday} <= {*option_names(stage.config)}


@of_the_whole
@pytest.mark.parametrize("name", other_names())
def test_another_trainers_option_is_answered_with_options_that_the_command_has(name):
    rows, answered = other_names()[name], []
    for known in KNOWN.values():
        same = [(row, here) for row in rows for here in row.options if here in known]
        if not same or name in known:
            continue
        row, here = same[0]
        said = unknown_option(f"--{name}", known)
        assert said == f"unknown option --{name}; " + row.words.replace("{}", f"--{here}")
        named = {*re.findall(r"--(?:no-)?(\w+)", row.words.replace("{}", f"--{here}"))}
        assert named <= {*known, "num_gpus"}
        answered.append(row)
    assert [row for row in rows if row not in answered] == []
    for row in rows:
        assert row.sources
        assert {*row.sources} <= TRAINERS


@pytest.mark.parametrize("command_class", [*STAGES, GenerateConfig, *TINKER])
def test_values_that_are_named_for_another_trainers_option_are_allowed(command_class):
    kinds = dict(annotations(command_class))
    tried = 0
    for row in {row for rows in other_names().values() for row in rows}:
        for here in kinds.keys() & {*row.options}:
            said = row.words.replace("{}", f"--{here}")
            for option, word in re.findall(r"--(\w+) (\w+)", said):
                if option in kinds:
                    kind, choices = kinds[option]
                    assert {"N": int, "X": float}.get(word, kind) is kind, said
                    assert not choices or word in {*choices, *NO_VALUES}, said
                    tried += 1
    assert tried


@pytest.mark.parametrize("command_class", COMMANDS)
def test_further_names_and_hints_of_options_belong_to_options(command_class):
    aliases, names = option_aliases(command_class), option_names(command_class)
    assert set(aliases.values()) <= set(names)
    assert not aliases.keys() & set(names)
    hints = [field.metadata["hint"] for field, _ in option_fields(command_class).values()]
    assert {*re.findall(r"--(\w+)", " ".join(hints))} <= set(names)


def test_hints_in_python_are_those_of_the_command_line():
    for given, said in (
        ("lora_r", "--lora_dim N is the rank"),
        ("per_device_batch", "did you mean"),
    ):
        with pytest.raises(TypeError, match=f"unknown option --{given}; {said}"):
            options_in_python(SupervisedConfig, {given: 8})
