"""Recipes and DeepSpeed JSONs by name, words without an option, and the verbs' one-line errors."""

import json
import re
import socket
from pathlib import Path

import pytest

from dschat_lora import __main__ as command
from dschat_lora.commands.launch import LauncherConfig, launch_command, split_launcher_options
from dschat_lora.commands.stages import options_of_file
from dschat_lora.config.addons import verbs
from dschat_lora.config.bundled import CONFIGS, find_deepspeed_json, find_recipe
from dschat_lora.config.options import parse_config
from dschat_lora.config.stages import SupervisedConfig
from dschat_lora.config.verbs import GenerateConfig
from dschat_lora.engine.ds_config import read_deepspeed_json
from helpers.addons import of_the_whole
from helpers.step1 import ROOT


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def verb(monkeypatch, capsys):
    """``verb(*argv)``: exit code, output and error output of ``dschat-lora``."""

    def run(*argv):
        monkeypatch.setattr("sys.argv", ["dschat-lora", *map(str, argv)])
        capsys.readouterr()
        try:
            command.main()
            code = 0
        except SystemExit as end:
            code = end.code
        return code, *capsys.readouterr()

    return run


# ---------------------------------------------------------------------------- by name


def test_package_has_the_very_files_of_the_checkout():
    assert CONFIGS.resolve() == (ROOT / "configs").resolve()


@pytest.mark.parametrize(
    ("given", "file"),
    [
        ("bundled", "bundled"),
        ("opt-1.3b", "opt-1.3b_opt-350m"),
        ("opt-1.3b_opt-350m.yaml", "opt-1.3b_opt-350m"),
        ("configs/recipes/llama-2-7b.yaml", "llama-2-7b"),
        ("glue/roberta-base_cola", "glue/roberta-base_cola"),
        ("gpt2-medium_e2e", "nlg/gpt2-medium_e2e"),
    ],
)
def test_recipe_is_found_by_its_name_and_by_its_path_in_the_checkout(given, file):
    assert find_recipe(given, label="--config") == CONFIGS / "recipes" / f"{file}.yaml"


def test_file_of_the_user_comes_before_a_recipe_of_that_name():
    Path("bundled").write_text("lora_dim: 3\n")
    assert parse_config(SupervisedConfig, ["--config", "bundled"]).lora.lora_dim == 3


def test_beginning_of_several_names_is_refused_with_them():
    with pytest.raises(
        ValueError, match="is ambiguous: opt-1.3b_opt-350m, opt-6.7b_4bit, opt-6.7b_opt"
    ):
        find_recipe("opt", label="--config opt")


def test_deepspeed_json_is_found_by_name():
    content = json.loads((ROOT / "configs" / "ds" / "zero2.json").read_text())
    assert read_deepspeed_json("zero2") == content
    assert find_deepspeed_json("configs/ds/zero2.json") == CONFIGS / "ds" / "zero2.json"
    with pytest.raises(ValueError, match="--deepspeed_config zero7 .*did you mean zero"):
        find_deepspeed_json("zero7")


def test_stages_of_a_pipeline_need_its_add_on(monkeypatch):
    Path("plain.yaml").write_text("lora_dim: 3\n")
    monkeypatch.setattr("dschat_lora.commands.stages.provided", lambda seam: {})
    assert options_of_file("sft", "plain.yaml") == {"lora_dim": 3}
    line = "--config bundled has the stages of a pipeline, which is an add-on that is not installed"
    with pytest.raises(ValueError, match=f"^{line}$"):
        options_of_file("rlhf", "bundled")


# ---------------------------------------------------------------------------- command lines


def test_words_without_an_option_are_the_model_and_then_the_prompts():
    names = ("model_name_or_path", "prompts")
    argv = ["run", "--top_k", "3", "one", "two"]
    config = parse_config(GenerateConfig, argv, positionals=names)
    assert (config.model_name_or_path, config.prompts) == ("run", ("one", "two"))
    typed = parse_config(GenerateConfig, ["--model_name_or_path", "run", "one"], positionals=names)
    assert (typed.model_name_or_path, typed.prompts) == ("run", ("one",))


def test_options_of_the_launcher_are_told_from_those_of_the_stage():
    argv = ["--lora_dim", "8", "--num_gpus", "2", "--data_path", "a", "b", "--hostfile=hosts"]
    launcher, rest = split_launcher_options(argv)
    assert launcher == LauncherConfig(num_gpus=2, hostfile="hosts")
    assert rest == ["--lora_dim", "8", "--data_path", "a", "b"]
    assert split_launcher_options(rest) == (None, rest)
    assert launch_command("sft", launcher, rest, program="deepspeed") == [
        *("deepspeed", "--num_gpus", "2", "--hostfile", "hosts"),
        *("--module", "dschat_lora", "sft", *rest),
    ]


@pytest.mark.parametrize("default", [False, True])
def test_runs_side_by_side_on_one_machine_meet_at_ports_of_their_own(
    monkeypatch, tmp_path, default
):
    """Unless the port is given, or a file of hosts stands where the launcher looks for one."""
    hosts = tmp_path / "hostfile"
    monkeypatch.setattr("dschat_lora.commands.launch.DEFAULT_HOSTFILE", str(hosts))
    if default:
        hosts.write_text("other slots=8\n", encoding="utf-8")

    def command_of(**options):
        return launch_command("sft", LauncherConfig(num_gpus=2, **options), (), program="deepspeed")

    rest = ["--module", "dschat_lora", "sft"]
    given = ["deepspeed", "--num_gpus", "2", "--master_port", "29501", *rest]
    assert command_of(master_port=29501) == given
    found = command_of()
    if default:
        assert found == ["deepspeed", "--num_gpus", "2", *rest]
        return
    position = found.index("--master_port")
    with socket.socket() as server:
        server.bind(("127.0.0.1", int(found[position + 1])))
    assert [*found[:position], *found[position + 2 :]] == ["deepspeed", "--num_gpus", "2", *rest]


def test_ranks_of_a_launcher_find_their_verb_behind_its_arguments(monkeypatch):
    seen = []
    monkeypatch.setattr(command, "load", lambda path: lambda argv: seen.append((path, argv)))
    monkeypatch.setattr("sys.argv", ["dschat-lora", "--local_rank=1", "sft", "--lora_dim", "8"])
    command.main()
    assert seen == [(command.path_of("sft"), ["--local_rank=1", "--lora_dim", "8"])]


@of_the_whole
def test_help_names_every_verb_and_each_has_its_own(verb):
    code, out, _ = verb("--help")
    assert code == 0
    shown = re.findall(r"^  (\w+) ", out, re.MULTILINE)
    assert sorted(shown) == sorted([*command.VERBS, *verbs()])
    for name in ("merge", "generate", "eval", "score", "inspect", "push", "export"):
        code, out, _ = verb(name, "--help")
        assert code == 0
        examples = out.partition("examples:\n")[2].partition("\n\n")[0].splitlines()
        assert examples
        assert all(line.startswith(f"  dschat-lora {name} ") for line in examples)
        assert name == "score" or "--json" in out  # which prints nothing else
