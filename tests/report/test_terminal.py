import shlex
import sys

import pytest

from dschat_lora.report import terminal
from dschat_lora.report.terminal import table


def test_first_column_is_left_and_numbers_are_right():
    assert table(["SFT", "before", "after"], [["perplexity", "1.5", "1.25"], ["x", "10", "2"]]) == [
        "SFT         before  after",
        "----------  ------  -----",
        "perplexity     1.5   1.25",
        "x               10      2",
    ]


# ---------------------------------------------------------------------------- width


def test_long_line_goes_on_below_its_text():
    line = "  note         " + "word " * 30
    first, *more = terminal.wrapped(line).splitlines()
    assert len(first) <= 80
    assert all(each.startswith(" " * 15 + "word") and len(each) <= 80 for each in more)
    assert " ".join([first, *more]).split() == line.split()
    path = "/" + "x" * 90
    assert terminal.wrapped(f"output: {path} (temporary)") == f"output:\n  {path}\n  (temporary)"


@pytest.mark.parametrize(("size", "width"), [("200", 200), ("40", 80)])
def test_text_and_commands_are_as_wide_as_the_terminal(monkeypatch, size, width):
    words = " ".join(["word"] * 50)
    command = shlex.join(["dschat-lora", "sft", "--columns", '{"a": "b c"}', *["--seed", "1"] * 25])
    assert terminal.fitted(words) == words
    assert terminal.fitted_command(command, "$ ") == f"$ {command}"
    monkeypatch.setenv("COLUMNS", size)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    lines = terminal.fitted(words).splitlines()
    typed = terminal.fitted_command(command, "$ ").splitlines()
    for shown in (lines, typed):
        assert width - 12 < max(map(len, shown)) <= width
    assert " ".join(lines).split() == words.split()
    assert all(line.endswith(" \\") for line in typed[:-1])
    assert shlex.split("\n".join(typed).replace("\\\n", ""))[1:] == shlex.split(command)


def test_a_prompt_and_its_answer_are_shown_as_they_were_written():
    prompt, answer = "\n\nHuman: Hi,\n\nyou.\n\nAssistant:", " def f():\n    pass\n"
    assert terminal.sample_lines("before", prompt, answer).splitlines() == [
        "  before       Hi,",
        "               you.",
        "            -> def f():",
        "                   pass",
    ]
    *_, wide, rest = terminal.sample_lines("before", "Hi", "a" * 65).splitlines()
    assert (wide, rest) == (f"            -> {'a' * 60}", f"{'':15}{'a' * 5}")
    long = terminal.sample_lines("sample", "Hi", "word " * 999, " (score 1)")
    assert long.endswith("word  ... (score 1)")
