"""Rows of every recognised shape, changed at random: they are read whole, or refused by place."""

import json
import re

import pytest
from hypothesis import HealthCheck, given, settings

from data.chat_tokenizers import build_chat_tokenizer
from data.hand_tokenizers import build_byte_tokenizer
from dschat_lora.data.chat import make_chat
from dschat_lora.data.readers import iter_file
from dschat_lora.data.row_reader import RowCounts, RowReader
from dschat_lora.data.rows import DEFAULT_OPTIONS
from helpers.drawn_rows import drawn_rows, words_that_count
from helpers.spread import ALL

TEMPLATES = ("built-in", "qwen3", "qwen2_5_training")  # the last one marks answers
EOS = 2


@pytest.fixture(scope="module")
def chats():
    """Chats by the name of their template."""
    return {
        name: make_chat(build_byte_tokenizer(), eos_id=EOS)
        if name == "built-in"
        else make_chat(build_chat_tokenizer(name))
        for name in TEMPLATES
    }


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tmp_path_factory.mktemp("rows")


def records_of(path, chat, kind, options=DEFAULT_OPTIONS):
    """What a stage makes of the rows of a file."""
    reader = RowReader(options, chat, kind, skips=False)
    return [each for raw in iter_file(path) for each in reader.records(raw, RowCounts())[0]]


def said_by(records):
    """All that records say."""
    return " ".join(
        text for each in records for text in (*(s.text for s in each.spans), each.rejected or "")
    )


@settings(
    max_examples=2000 if ALL else 200,
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
@given(row=drawn_rows(TEMPLATES))
def test_a_drawn_row_is_read_or_refused_by_file_and_line(chats, directory, row):
    path = row.write(directory)
    if path is None:
        return
    try:
        records = records_of(path, chats[row.template], row.kind, row.options)
    except ValueError as error:
        assert re.match(rf"{re.escape(str(path))}[: ]", str(error)), str(error)
        return
    if row.is_valid and not row.options.columns and records and row.kind != "prompts":
        lost = [word for word in words_that_count(row) if word not in said_by(records)]
        assert not lost
    for record in records:
        if row.kind == "prompts":  # for a reward function
            assert row.values is None or row.suffix in (".csv", ".parquet") or same(record, row)
        record.digest(row.kind)


def same(record, row):
    return json.dumps(json.loads(record.columns)) == json.dumps(json.loads(row.text))
