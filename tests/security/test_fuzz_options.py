"""Command lines drawn from every verb's table of options: taken as typed, or refused in a line."""

import json
import os

import pytest
from hypothesis import given

from dschat_lora import __main__ as program
from dschat_lora.config.addons import installed
from helpers.command_lines import COMMANDS, Command, Line, faults_of, make_home, run_line
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


def test_bytes_that_are_no_text_are_refused_by_name(home):
    assert refusal("audit", "x\udc80.jsonl") == (
        r"--data_path must be some text, in UTF-8, got 'x\udc80.jsonl'"
    )


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
