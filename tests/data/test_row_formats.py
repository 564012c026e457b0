"""Formats of rows that an add-on provides."""

import json
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet
import pytest

from dschat_lora.config.addons import Addon
from dschat_lora.data import row_formats
from dschat_lora.data.readers import iter_file, iter_rows
from dschat_lora.data.row_formats import RowFormat, format_files
from dschat_lora.data.rows import parse_row
from dschat_lora.data.sources import DataSource


def tab_rows(line):
    prompt, completion = line.rstrip("\n").split("\t")
    return [{"prompt": prompt, "completion": completion}]


class SourceAndTarget:
    """Objects with lists of ``src`` and ``tgt``, a row for each pair."""

    @staticmethod
    def claims(value, path):
        return isinstance(value, dict) and {"src", "tgt"} <= value.keys()

    @staticmethod
    def rows(value):
        if len(value["src"]) != len(value["tgt"]):
            raise ValueError("`src` and `tgt` differ in length")
        pairs = zip(value["src"], value["tgt"], strict=True)
        return [{"instruction": src, "output": tgt} for src, tgt in pairs]


TABS = RowFormat(tab_rows, lambda value, path: isinstance(value, str) and "\t" in value)
INSIDE = RowFormat(lambda value: [{"text": value}] * 2, list_key="texts")
BROKEN = SimpleNamespace(rows=tab_rows)


@pytest.fixture
def provide(monkeypatch):
    """``provide(name=object, ...)`` installs an add-on with these formats of this module."""

    def install(**formats):
        paths = {name: f"{__name__}:{path}" for name, path in formats.items()}
        mine = Addon("mine", provides={"row_format": paths})
        monkeypatch.setattr(row_formats, "installed", lambda: {"mine": mine})
        monkeypatch.setattr(row_formats, "provided", lambda seam: mine.provides.get(seam, {}))
        forget()

    def forget():
        row_formats.row_formats.cache_clear()

    yield install
    forget()


def read(rows):
    return [(row.described, row.values) for row in map(parse_row, rows)]


def test_a_format_of_lines_has_all_lines_of_a_text_file(provide, tmp_path):
    path = tmp_path / "pairs.txt"
    path.write_text("\nHi?\tHo!\nBye\tBye.\nno tab\n")
    rows = list(iter_file(path))
    assert [row.values for row in rows] == [{"text": path.read_text()}]
    provide(tabs="TABS")
    rows = list(iter_file(path))
    assert [(row.location.rpartition(":")[2], row.values.get("completion")) for row in rows] == [
        ("2", "Ho!"),
        ("3", "Bye."),
        ("4", None),
    ]
    assert "not enough values to unpack" in rows[2].problem


def test_a_format_of_objects_makes_several_rows_of_one_in_a_json_file(provide, tmp_path):
    provide(translation="SourceAndTarget")
    path = tmp_path / "pairs.json"
    values = [{"src": ["a", "b"], "tgt": ["A", "B"]}, {"text": "plain"}, {"src": ["a"], "tgt": []}]
    path.write_text(json.dumps(values))
    rows = list(iter_file(path))
    assert read(rows[:3]) == [
        ("conversation (alpaca)", parse_row(rows[0]).values),
        ("conversation (alpaca)", parse_row(rows[1]).values),
        ("text", {"text": "plain"}),
    ]
    assert [row.values.get("output") for row in rows] == ["A", "B", None, None]
    assert rows[3].problem == "`src` and `tgt` differ in length"


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "memory"])
def test_a_format_of_rows_makes_one_of_each_wherever_it_is(provide, tmp_path, kind):
    provide(translation="SourceAndTarget")
    value, path = {"src": ["a"], "tgt": ["A"]}, tmp_path / f"pairs.{kind}"
    if kind == "memory":
        rows = list(iter_rows(DataSource("data_path", "rows", (), rows=[value])))
    elif kind == "parquet":
        pyarrow.parquet.write_table(pa.Table.from_pylist([value]), path)
        rows = list(iter_file(path))
    else:
        path.write_text(json.dumps(value))
        rows = list(iter_file(path))
    ((described, values),) = read(rows)
    assert described == "conversation (translation)"
    assert [each["content"] for each in values["messages"]] == ["a", "A"]
    with pytest.raises(ValueError, match="translation makes 2 rows of this instead of one"):
        parse_row(rows[0]._replace(values={"src": ["a", "b"], "tgt": ["A", "B"]}))


def test_a_format_of_a_key_has_the_whole_list_behind_it(provide, tmp_path):
    provide(inside="INSIDE")
    path = tmp_path / "texts.json"
    path.write_text('{"texts": ["a", "b"]}')
    assert [row.values["text"] for row in iter_file(path)] == ["a", "a", "b", "b"]
    path.write_text('{"texts": ["a"], "more": 1}')
    with pytest.raises(ValueError, match="Expecting inside's file to end after its texts"):
        list(iter_file(path))


def test_a_format_that_cannot_be_used_is_left_out_in_one_line(provide):
    provide(broken="BROKEN")
    with pytest.warns(UserWarning, match="add-on mine cannot be loaded and is skipped.*'claims'"):
        assert row_formats.row_formats() == {}


def test_the_files_of_formats_are_those_of_their_modules(provide):
    provide(tabs="TABS")
    assert {name: str(path) for name, path in format_files().items()} == {"tabs": __file__}
