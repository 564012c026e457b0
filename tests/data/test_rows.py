import csv
import gzip
import json
import subprocess
import sys
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet
import pytest

from dschat_lora.config.data import DataConfig
from dschat_lora.data.readers import RawRow, RowError, hub_rows, iter_file, iter_rows
from dschat_lora.data.rows import RowOptions, check_sources, parse_row
from dschat_lora.data.sources import DataSource, find_source
from helpers.addons import ROW_FILES

PAIR = {"prompt": "p", "completion": "c"}
KINDS = f"{ROW_FILES} .parquet .arrow"
TURNS = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]


def read(path):
    return [(raw.location.rsplit(":", 1)[1], raw.values) for raw in iter_file(path)]


def reason_of(path):
    with pytest.raises(RowError) as error:
        [parse_row(raw) for raw in iter_file(path)]
    return str(error.value).replace(str(path.parent) + "/", "")


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (
            {"prompt": "p", "completion": 3},
            "`completion` must be text or a message list, found int",
        ),
        ('{"prompt": "p" "x"}', "not valid JSON (Expecting ',' delimiter, column 16)"),
        ("[1]", "row is not a JSON object but list"),
    ],
)
def test_a_wrong_row_is_named_by_file_line_and_reason(jsonl, row, reason):
    assert reason_of(jsonl([PAIR, "", row, PAIR])) == f"train.jsonl:3: {reason}"


def test_a_row_of_no_type_is_told_all_types_that_there_are(jsonl):
    assert reason_of(jsonl([{"query": "q", "answer": "a"}])) == (
        "train.jsonl:1: row has ['answer', 'query']; a row has `text`; `prompt`, `completion`; "
        "`messages`; `chosen`, `rejected` with or without `prompt`; or `prompt`; or as published "
        "`conversations`; `instruction`, `output`; `question`, `answer`; name other columns by "
        "--columns, as in --columns prompt=COLUMN completion=COLUMN"
    )


def test_bytes_that_are_not_utf8_spoil_one_line_only(tmp_path):
    path = tmp_path / "train.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"text": "a"}\n{"text": "\xff"}\n{"text": "c"}\n')
    problems = [(raw.values, raw.problem) for raw in iter_file(path)]
    assert problems == [
        ({"text": "a"}, None),
        ({}, "not UTF-8 (byte 11 of the line)"),
        ({"text": "c"}, None),
    ]


def test_lines_are_not_split_at_unicode_separators(tmp_path):
    path = tmp_path / "train.jsonl"
    path.write_text('{"text": "a\u2028b"}\n', encoding="utf-8")
    assert read(path) == [("1", {"text": "a\u2028b"})]


def test_gzipped_jsonl_reads_like_plain(jsonl, tmp_path):
    plain = jsonl([PAIR, {"text": "t"}])
    packed = tmp_path / "train.jsonl.gz"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    assert read(packed) == read(plain) == [("1", PAIR), ("2", {"text": "t"})]
    packed.write_bytes(packed.read_bytes()[:-12])
    with pytest.raises(ValueError, match=r"train\.jsonl\.gz cannot be read"):
        read(packed)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('[\n {"text": "a"},\n\n {"text":\n "b"}]\n', [("2", "a"), ("4", "b")]),
        ('{"text": "a"}\n{"text": "b"}\n', [("1", "a"), ("2", "b")]),
        ("[]", []),
        ("", []),
    ],
)
def test_json_is_a_list_or_objects_one_after_another(tmp_path, text, expected):
    path = tmp_path / "train.json"
    path.write_text(text)
    assert [(line, values["text"]) for line, values in read(path)] == expected


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('[{"text": "a"}\n {"text": "b"}]', "2: not valid JSON (Expecting ',' or ']', column 2)"),
        ('[{"text": "a"},\n', "2: not valid JSON (Expecting one list of objects, column 1)"),
        ('[{"text": "a"}]\n[]', "1: not valid JSON (Expecting one list of objects, column 15)"),
        ('[{"text": }]', "1: not valid JSON (Expecting value, column 11)"),
    ],
)
def test_broken_json_is_named_by_its_line(tmp_path, text, reason):
    path = tmp_path / "train.json"
    path.write_text(text)
    assert reason_of(path) == f"train.json:{reason}"


def test_csv_rows_carry_the_line_they_begin_on(tmp_path):
    path = tmp_path / "train.csv"
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerows([["prompt", "completion"], ["a", "two\nlines"], ["b", "x" * 200_000]])
        file.write("c\n")
    rows = list(iter_file(path))
    assert [raw.location.rsplit(":", 1)[1] for raw in rows] == ["2", "4", "5"]
    assert rows[0].values == {"prompt": "a", "completion": "two\nlines"}
    assert rows[2].problem == "row has 1 cells, the header names 2"


def test_parquet_rows_count_from_one_and_null_columns_are_absent(tmp_path):
    path = tmp_path / "train.parquet"
    pa.parquet.write_table(
        pa.Table.from_pylist([{"text": "a", "prompt": None}, {"text": None, "prompt": "b"}]), path
    )
    rows = [parse_row(raw) for raw in iter_file(path)]
    assert [(row.location, row.kind) for row in rows] == [
        (f"{path}:1", "text"),
        (f"{path}:2", "prompt"),
    ]
    path.write_bytes(b"PAR1 no")
    with pytest.raises(ValueError, match=r"train\.parquet cannot be read"):
        list(iter_file(path))


def test_arguments_that_arrow_adds_to_the_calls_of_other_tools_are_absent(tmp_path):
    from datasets import Dataset

    def row(name, **arguments):
        call = {"function": {"name": name, "arguments": arguments}}
        schema = {"properties": {key: {"type": "integer"} for key in arguments}}
        return {
            "messages": [TURNS[0], {"role": "assistant", "tool_calls": [call]}],
            "tools": [{"type": "function", "function": {"name": name, "parameters": schema}}],
            "tests": [{"input": None}],
        }

    rows = [row("f", a=1), row("g", b=2) | {"tests": [{"input": "i"}]}]
    table, path = pa.Table.from_pylist(rows), tmp_path / "train.parquet"
    pa.parquet.write_table(table, path)
    assert table.to_pylist() != rows
    assert [raw.values for raw in iter_file(path)] == rows
    own = DataSource("data_path", "rows", (), rows=Dataset(table))
    assert [raw.values for raw in iter_rows(own)] == rows
    assert [raw.values for raw in hub_rows("org/name", Dataset(table))] == rows


def test_a_directory_gives_its_data_files_in_name_order(jsonl, tmp_path):
    jsonl([{"text": "b"}], "b.jsonl")
    jsonl(['[{"text": "a"}]'], "a.JSON")
    jsonl([{"text": "x"}], ".hidden.jsonl")
    (tmp_path / "README.md").write_text("about")
    source = find_source("data_path", str(tmp_path))
    assert [raw.values["text"] for raw in iter_rows(source)] == ["a", "b"]


def test_a_name_that_is_no_path_is_a_hub_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert find_source("data_path", "org/name").hub_name == "org/name"
    assert find_source("data_path", "org/name:test").hub_name == "org/name:test"
    (tmp_path / "org").mkdir()
    with pytest.raises(ValueError, match="--data_path org/name does not exist"):
        find_source("data_path", "org/name")


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (
            "trian.jsonl",
            "trian.jsonl does not exist (did you mean train.jsonl? in .: train.jsonl); give a file "
            f"({KINDS}), a directory of them, a pattern such as 'data/*.jsonl', or a hub name such "
            "as org/name",
        ),
        (
            "data/train.jsonl",
            f"data/train.jsonl does not exist (nor does the directory data); give a file ({KINDS})"
            ", a directory of them, a pattern such as 'data/*.jsonl', or a hub name such as "
            "org/name",
        ),
        (
            "notes.md",
            f"notes.md is not a supported file type; use {KINDS}, a directory of such files, or a "
            "hub name",
        ),
        (
            "bare",
            "bare is a directory without data files; it contains other.md; files may be " + KINDS,
        ),
    ],
)
def test_what_cannot_be_found_is_named_with_what_was_found(
    jsonl, tmp_path, monkeypatch, entry, message
):
    monkeypatch.chdir(tmp_path)
    jsonl([PAIR])
    jsonl([], "notes.md")
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "other.md").write_text("")
    with pytest.raises(ValueError) as error:  # noqa: PT011 - the whole text is compared
        check_sources(DataConfig(data_path=(entry,)))
    assert str(error.value) == f"--data_path {message}"


def test_the_check_names_a_first_row_that_supervised_training_cannot_use(jsonl):
    path = jsonl([{"prompt": "p", "answer": "a"}])
    with pytest.raises(RowError) as error:
        check_sources(DataConfig(eval_data_path=(str(path),)))
    assert str(error.value) == (
        f"{path}:1: row lacks 'completion'; it has ['answer', 'prompt']; a prompt alone has no "
        "answer: name the text to train on 'completion' (--columns completion=COLUMN); "
        "--bad_rows skip leaves such rows out"
    )
    check_sources(DataConfig(eval_data_path=(str(path),), bad_rows="skip"))


def test_what_is_said_of_many_columns_is_cut_before_the_remedy(jsonl):
    path = jsonl([dict.fromkeys(["a  b", *(f"column {n}" for n in range(400))], 1)])
    with pytest.raises(RowError) as error:
        check_sources(DataConfig(data_path=(str(path),)))
    assert error.value.reason.startswith("row has ['a  b', 'column 0',")
    assert error.value.reason.endswith(" ...; --bad_rows skip leaves such rows out")


def test_a_row_with_images_is_refused_and_one_with_none_is_not(jsonl):
    path = jsonl([{**PAIR, "images": []}, {**PAIR, "images": ["a.png"]}])
    with pytest.raises(RowError) as error:
        check_sources(DataConfig(data_path=(str(path),)))
    assert str(error.value) == (
        f"{path}:2: `images` is not empty; only text is trained on, without images; "
        "--bad_rows skip leaves such rows out"
    )
    check_sources(DataConfig(data_path=(str(path),), bad_rows="skip"))


def test_a_row_with_images_is_given_to_who_reads_them(jsonl):
    seen = []

    def read(values, fields, folder):
        seen.append((values["images"], list(fields), folder))
        if values["images"] == ["bad"]:
            raise ValueError("no image")
        return {**values, "images": ("read",)}

    parts = [{"type": "image"}, {"type": "text", "text": "q"}]
    rows = [{"prompt": [{"role": "user", "content": parts}], "images": [n]} for n in ("a", "bad")]
    path, options = jsonl(rows), RowOptions(media=SimpleNamespace(row=read))
    first, second = iter_file(path)
    assert parse_row(first, options).values == {**rows[0], "images": ("read",)}
    with pytest.raises(RowError) as error:
        parse_row(second, options)
    assert str(error.value) == f"{path}:2: no image"
    assert seen == [([name], ["prompt"], path.parent) for name in ("a", "bad")]
    for row, reason in [
        (
            {**PAIR, "videos": ["a"]},
            "`videos` is not empty; only text is trained on, without videos",
        ),
        ({"text": "<image>", "images": []}, "a text has <image>, and `images` is empty"),
    ]:
        with pytest.raises(RowError) as error:
            parse_row(RawRow("f:1", row), options)
        assert str(error.value) == f"f:1: {reason}"


def test_the_check_refuses_a_file_without_rows(jsonl):
    path = jsonl(["", ""])
    with pytest.raises(ValueError, match=r"--data_path .*train\.jsonl has no rows"):
        check_sources(DataConfig(data_path=(str(path),)))


def test_the_check_reads_small_files_whole_and_the_first_row_of_others(jsonl, monkeypatch):
    config = DataConfig(data_path=(str(jsonl([PAIR, "not json"])),))
    with pytest.raises(ValueError, match=r":2: "):
        check_sources(config)
    monkeypatch.setattr("dschat_lora.data.rows.SMALL_FILE", 10)
    check_sources(config)


def test_the_check_neither_needs_the_network_nor_heavy_imports(jsonl):
    path = jsonl([PAIR])
    code = (
        "import sys; from dschat_lora.config.stages import DataConfig\n"
        "from dschat_lora.data.rows import check_sources\n"
        f"check_sources(DataConfig(data_path=({json.dumps(str(path))}, 'org/name')))\n"
        "assert not {'torch', 'numpy', 'pyarrow', 'datasets', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_hub_set_that_cannot_be_loaded_is_one_clear_line(monkeypatch):
    import datasets

    def fail(name, *, split):
        assert (name, split) == ("org/name", "train")
        raise ConnectionError("no route\nsecond line")

    monkeypatch.setattr(datasets, "load_dataset", fail)
    with pytest.raises(ValueError) as error:  # noqa: PT011 - the whole text is compared
        list(iter_rows(find_source("data_path", "org/name")))
    assert str(error.value) == (
        "--data_path org/name is not a local path and could not be loaded from the hub: no route"
    )


def test_hub_rows_come_from_the_named_split(monkeypatch):
    import datasets

    dataset = datasets.Dataset.from_list([{"text": "a"}, {"text": "b"}])
    monkeypatch.setattr(datasets, "load_dataset", lambda name, *, split: {"test": dataset}[split])
    rows = list(iter_rows(find_source("data_path", "org/name:test")))
    assert [(raw.location, raw.values["text"]) for raw in rows] == [
        ("org/name:test:1", "a"),
        ("org/name:test:2", "b"),
    ]
