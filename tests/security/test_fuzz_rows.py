"""Rows of every recognised shape, changed at random: they are read whole, or refused by place."""

import json
import re
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data.chat_tokenizers import build_chat_tokenizer
from data.hand_tokenizers import build_byte_tokenizer
from dschat_lora.config.data import DataConfig
from dschat_lora.data.chat import make_chat
from dschat_lora.data.prepare import prepare
from dschat_lora.data.readers import iter_file
from dschat_lora.data.record_files import RowCounts, RowReader
from dschat_lora.data.rows import DEFAULT_OPTIONS
from helpers.addons import of_the_whole
from helpers.drawing import drawing
from security.drawn_rows import drawn_rows, words_that_count

TEMPLATES = ("built-in", "qwen3", "qwen2_5_training")  # the last one marks answers
KINDS = ("samples", "pairs", "unpaired", "prompts")
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
    texts = [span.text for each in records for span in each.spans]
    return " ".join([*texts, *(each.rejected or "" for each in records)])


@drawing(150)
@given(row=drawn_rows(TEMPLATES))
def test_a_drawn_row_is_read_or_refused_by_file_and_line(chats, directory, row):
    path = row.write(directory)
    if path is None:
        return
    records, refusal = made_of(path, chats[row.template], row)
    if refusal is not None:
        assert re.match(rf"{re.escape(str(path))}[: ]", refusal)
    elif row.kind == "prompts":
        assert all(has_columns(record, row) for record in records)
    elif row.is_valid and not row.options.columns and records:
        assert [word for word in words_that_count(row) if word not in said_by(records)] == []


@drawing(40, every=300)
@given(rows=st.lists(drawn_rows(TEMPLATES), min_size=1, max_size=5), kind=st.sampled_from(KINDS))
def test_files_of_mixed_drawn_rows_are_prepared_with_every_row_counted(directory, rows, kind):
    path, lines = directory / "mixed.jsonl", [row.text.replace("\n", " ") for row in rows]
    path.write_bytes("".join(f"{each}\n" for each in lines).encode("utf-8", "surrogatepass"))
    audit, refusal = audit_of(path, kind)
    if refusal is not None:  # no row at all, or of all answers to one prompt none to another
        assert str(path) in refusal
    else:
        counted = sum(audit.rows_by_type.values()) + audit.bad_rows
        assert counted == len(list(filter(str.strip, lines)))


def audit_of(path, kind):
    """The audit of a file whose bad rows are skipped, and the message where it is refused."""
    config = DataConfig(data_path=(str(path),), bad_rows="skip", preprocessing_num_workers=1)
    where = {"phase": 1, "seed": 0, "eos_id": EOS, "kind": kind}
    with TemporaryDirectory() as cache:
        try:
            config = replace(config, unpaired_rows="all", max_seq_len=256)
            found = prepare(config, build_byte_tokenizer(), **where, cache_dir=Path(cache))
        except ValueError as error:
            return None, str(error)
    return found.audit, None


def made_of(path, chat, row):
    """The records of a row, and the message where it is refused."""
    try:
        return records_of(path, chat, row.kind, row.options), None
    except ValueError as error:
        return [], str(error)


def has_columns(record, row):
    """Whether a reward function gets the row as it is."""
    if row.values is None or row.suffix in (".csv", ".parquet") or row.shape in ("webnlg", "dart"):
        return True
    return json.dumps(json.loads(record.columns)) == json.dumps(row.values)


# What was drawn and was a traceback, an unnamed value or a lost one.

TURNS = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
ANSWER = json.dumps(TURNS[1])
DEEP = "[" * 700 + "]" * 700


@pytest.fixture
def refusal(tmp_path, chats):
    """``refusal(text)``: what a file of this text is refused with, behind its name."""

    def call(text, *, suffix=".jsonl", kind="samples", template="built-in"):
        path = tmp_path / f"row{suffix}"
        path.write_text(text, encoding="utf-8")
        with pytest.raises(ValueError, match=re.escape(str(path))) as caught:
            records_of(path, chats[template], kind)
        return str(caught.value).removeprefix(str(path))

    return call


@pytest.mark.parametrize("kind", KINDS)
def test_data_of_which_no_row_can_be_used_is_counted(directory, kind):
    path = directory / "bad.jsonl"
    path.write_text('{"extra": 1}\n')
    assert audit_of(path, kind)[0].bad_rows == 1


@of_the_whole
@pytest.mark.parametrize("ids", [[-5], [2**32], [2**70]])
def test_token_ids_that_no_vocabulary_has_are_a_bad_row(refusal, ids):
    message = refusal(json.dumps({"context": [40], "completion": ids}))
    assert message.startswith(":1: `completion` holds token ids")


def test_a_pair_or_a_prompt_beside_lists_of_token_ids_is_not_lost(tmp_path, chats, refusal):
    lists = {"context": [40, 41], "completion": [42, 43, 2]}
    path = tmp_path / "row.jsonl"
    path.write_text(json.dumps({"prompt": "p", "chosen": "c", "rejected": "r", **lists}))
    (record,) = records_of(path, chats["built-in"], "pairs")
    assert (record.prompt, record.completion, record.rejected) == ("p", "c", "r")
    path.write_text(json.dumps({"messages": TURNS, **lists}))
    (record,) = records_of(path, chats["built-in"], "samples")
    assert record.kind == "conversation"
    assert refusal(json.dumps({"prompt": "p", **lists})) == (
        ":1: `completion` item 1 must have 'role' and 'content', found int; "
        "--bad_rows skip leaves such rows out"
    )


@pytest.mark.parametrize("suffix", [".jsonl", ".json"])
@pytest.mark.parametrize(
    "text",
    [
        '{"prompt": "p", "prompt": "q", "completion": "c"}',
        '{"messages": [{"role": "user", "role": "system", "content": "q"}]}',
    ],
)
def test_a_key_twice_in_an_object_is_a_bad_row_as_one_value_would_be_lost(refusal, suffix, text):
    assert re.match(
        ":1: (not valid JSON \\()?an object has '(prompt|role)' twice", refusal(text, suffix=suffix)
    )


def test_a_column_twice_in_a_header_is_refused_as_one_would_be_lost(refusal):
    message = refusal("prompt,completion,prompt\na,b,c\n", suffix=".csv")
    assert message == ":1: the header names 'prompt' twice"


@pytest.mark.parametrize("suffix", [".jsonl", ".json"])
def test_a_number_of_more_digits_than_python_reads_is_named_by_its_line(refusal, suffix):
    text = '{"text": "a"}\n{"text": "b", "id": ' + "9" * 5000 + "}"
    assert refusal(text, suffix=suffix).startswith(":2: ")


@pytest.mark.parametrize("kind", ["samples", "prompts"])
@pytest.mark.parametrize(
    "row",
    [
        f'{{"messages": {json.dumps(TURNS)}, "tools": [{{"x": {DEEP}}}]}}',
        json.dumps({"messages": TURNS, "tools": f'[{{"x": {"[" * 5000}}}]'}),
        json.dumps({"messages": TURNS, "chat_template_kwargs": f'{{"x": {DEEP}}}'}),
        f'{{"messages": [{{"role": "user", "content": "q", "k": {DEEP}}}, {ANSWER}]}}',
    ],
    ids=["tools", "text of tools", "variables", "key"],
)
def test_what_no_template_renders_for_its_depth_is_a_bad_row(refusal, row, kind):
    assert refusal(row, kind=kind, template="qwen3").startswith(":1: ")
