"""Command lines drawn from every verb's table of options: taken as typed, or refused in a line."""

import json
import os

import pytest
from hypothesis import given

from dschat_lora import __main__ as program
from dschat_lora.config.addons import installed
from helpers.command_lines import COMMANDS, MODEL, Command, Line, faults_of, make_home, run_line
from helpers.drawing import drawing
from helpers.drawn_lines import lines


@pytest.fixture
def home(tmp_path, monkeypatch, first_rows):
    """The working directory of lines, with what they name."""
    make_home(tmp_path / "home")
    monkeypatch.chdir(tmp_path / "home")
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path / "home"


@drawing(100)
@given(line=lines())
def test_a_drawn_line_is_taken_as_typed_or_refused_in_one_line_that_names_it(home, line):
    make_home(home)
    os.chdir(home)
    faults = faults_of(line, run_line(line))
    assert not faults, "\n".join([repr(line.argv), *map(repr, line.files), *faults])


def test_lines_of_every_verb_are_drawn():
    of_addons = {verb for addon in installed().values() for verb in addon.verbs}
    assert {command.verb for command in COMMANDS} == program.VERBS.keys() | of_addons


def refusal(*argv, files=()):
    """The line that a command line is refused with, which writes nothing."""
    if argv[0] not in {command.verb for command in COMMANDS}:
        pytest.skip(f"{argv[0]} is of an add-on that is not there")
    line = Line(Command((argv[0],)), extra=argv[1:], files=files)
    outcome = run_line(line)
    assert outcome.code == 2, outcome
    assert not outcome.calls
    assert not outcome.error
    assert not outcome.written
    assert outcome.err.count("\n") == 1
    return outcome.err.removeprefix("error: ").rstrip("\n")


# What was drawn and was a traceback, an unnamed value or a lost one.


def test_a_path_of_nobodys_home_is_refused(home):
    for argv in (("sft", "--data_path", "~nobody_at_all/x"), ("chat", "~nobody_at_all/x")):
        assert refusal(*argv).startswith("a path begins with ~")


@pytest.mark.parametrize(
    ("argv", "option"),
    [
        (("generate", MODEL, "Hello."), "--output_path"),
        (
            ("nlg", "decode", "--model_name_or_path", MODEL, "--data_path", "e2e.txt"),
            "--output_path",
        ),
        (("audit", "pairs.jsonl"), "--html"),
        (("report", "run"), "--output_path"),
        (
            ("nlg", "format", "--predictions", "p.jsonl", "--output_ref_file", "r"),
            "--output_pred_file",
        ),
        (
            ("nlg", "format", "--predictions", "p.jsonl", "--output_pred_file", "r"),
            "--output_ref_file",
        ),
    ],
)
def test_a_directory_in_place_of_a_file_is_refused_before_anything_is_made_of_it(
    home, argv, option
):
    directory = str(home / "directory")
    message = refusal(*argv, option, directory)
    assert message == f"{option} {directory} is a directory; name a file"


def test_a_file_in_place_of_a_directory_of_references_is_refused_before_texts_are_written(home):
    argv = ("nlg", "format", "--profile", "webnlg", "--predictions", "p.jsonl")
    message = refusal(*argv, "--output_pred_file", "h", "--output_ref_file", "file.txt")
    assert message == "--output_ref_file file.txt cannot be made: file.txt is no directory"


@pytest.mark.parametrize(
    "argv", [("audit", ""), ("inspect", ""), ("accept", ""), ("generate", MODEL, "")]
)
def test_an_empty_word_is_refused_and_does_not_mean_this_directory(home, argv):
    assert "must be some text, in UTF-8, got ''" in refusal(*argv)


def test_bytes_that_are_no_text_are_refused_by_name(home):
    assert refusal("audit", "x\udc80.jsonl") == (
        r"--data_path must be some text, in UTF-8, got 'x\udc80.jsonl'"
    )


def test_a_seed_that_no_stage_takes_is_refused_before_the_demo_writes(home):
    assert refusal("demo", "--seed=-1") == "--seed must be in [0, 2**63), got -1"


@pytest.mark.parametrize("host", [".", "a..b", "x" * 64])
def test_what_is_no_name_of_a_host_is_refused_by_its_option(home, host):
    message = refusal("serve", MODEL, "--port", "0", "--token", "t", "--host", host)
    assert message.startswith(f"--host {host} ")


@pytest.mark.parametrize("word", ["nan", "inf", "1e400"])
def test_alpha_of_extract_is_a_finite_number(home, word):
    message = refusal("extract", "adapter", "--base", MODEL, "--lora_alpha", word)
    assert message == f"--lora_alpha: must be a number, got '{word}'"


@pytest.mark.parametrize(
    ("option", "word", "message"),
    [
        ("--num_beams", str(2**32), "must be in [1, 1000], got 4294967296"),
        ("--length_penalty", "1e5", "must be in [0, 10], got 100000.0"),
    ],
)
def test_a_search_that_fits_no_memory_or_float_is_refused(home, option, word, message):
    assert refusal("nlg", "decode", "--data_path", "e2e.txt", option, word) == f"{option} {message}"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ('{"gradient_clipping": ' + "9" * 400 + "}", "gradient_clipping must be a number >= 0"),
        (
            '{"train_batch_size": 7, "train_batch_size": 8}',
            "an object has 'train_batch_size' twice",
        ),
        ("[" * 5000, "nested too deeply"),
        ('{"train_batch_size": ' + "9" * 5000 + "}", "Exceeds the limit"),
        (json.dumps({"train_micro_batch_size_per_gpu": 0}), "per_gpu must be a whole number >= 1"),
    ],
)
def test_a_deepspeed_file_is_refused_by_its_option(home, content, words):
    message = refusal("rlhf", "--deepspeed_config", "drawn", files=(("drawn", content),))
    assert message.startswith("--deepspeed_config drawn")
    assert words in message


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('{"a":' * 2000, "nested too deeply"),
        ('{"a": 1, "a": 2}', "an object has 'a' twice"),
    ],
)
def test_variables_of_a_template_are_refused_by_their_option(home, text, reason):
    message = refusal("sft", "--chat_template_kwargs", text)
    assert message.startswith("--chat_template_kwargs must be a JSON object")
    assert reason in message


@pytest.mark.parametrize("value", ["!!int ''", "!!bool x", "[" * 5000, "{a: 1, a: 2}"])
def test_an_override_that_is_no_yaml_is_refused_by_name(home, value):
    message = refusal("pipeline", "recipe.yaml", "--set", f"sft.seed={value}")
    assert message.startswith(f"--set sft.seed={value}: the value cannot be read: "[:2000])


@pytest.mark.parametrize("stage", ["sft", "reward", "dpo", "rlhf"])
def test_data_that_is_asked_for_and_not_named_is_refused_and_not_the_bundled_data(home, stage):
    assert refusal(stage, "--data_path", "--seed", "1") == (
        "--data_path names no data; give a file, or leave it out for the bundled data"
    )
