"""Fixtures that run the verb ``audit``."""

import pytest

from dschat_lora import __main__ as command


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
