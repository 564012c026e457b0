"""Files of rows."""

import json

import pytest


@pytest.fixture
def jsonl(tmp_path):
    """Writes rows (dicts, or raw lines) to a file and returns its path."""

    def write(rows, name="train.jsonl"):
        lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
        path = tmp_path / name
        path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
        return path

    return write
