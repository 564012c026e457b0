"""Fixtures of the verb ``audit``: rows, and what runs it."""

import json

import pytest

from dschat_lora import __main__ as command

ROWS = [
    {"prompt": "Hello", "completion": " good morning"},
    {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
    {"prompt": "no answer"},
]


@pytest.fixture
def data(tmp_path):
    """A file of ``ROWS``."""
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path


@pytest.fixture
def audit(monkeypatch, capsys):
    """Runs the verb; returns exit code, output and error output."""

    def run(*argv):
        monkeypatch.setattr("sys.argv", ["dschat-lora", "audit", *map(str, argv)])
        try:
            command.main()
            code = 0
        except SystemExit as end:
            code = end.code
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run
