import gzip
import json

import pytest

from dschat_lora.config.data import DataConfig
from dschat_lora.data.readers import RowError, iter_file
from dschat_lora.data.rows import check_sources, parse_row
from dschat_lora.data.sources import find_source


def rows(path):
    return [parse_row(raw).values for raw in iter_file(path)]


def reason_of(path):
    with pytest.raises(RowError) as error:
        rows(path)
    return str(error.value).replace(str(path.parent) + "/", "")


def entry(number, texts, *, category="Airport", triples=(("Aarhus", "leaderName", "Jacob"),)):
    """One of WebNLG's: ``texts`` are pairs of a text and its comment."""
    return {
        str(number): {
            "category": category,
            "modifiedtripleset": [
                {"object": o, "property": p, "subject": s} for s, p, o in triples
            ],
            "lexicalisations": [{"lex": lex, "comment": comment} for lex, comment in texts],
            "size": str(len(triples)),
        }
    }


def as_json(tmp_path, value, **kwargs):
    path = tmp_path / "data.json"
    path.write_text(json.dumps(value, **kwargs), encoding="utf-8")
    return path


@pytest.mark.smoke
@pytest.mark.parametrize("name", ["test.txt", "test.txt.gz"])
def test_a_line_of_e2e_is_a_meaning_and_its_text(tmp_path, name):
    path = tmp_path / name
    lines = b"name : A | food : B||A has B . \n\nname : C||C D .\n"
    path.write_bytes(gzip.compress(lines) if name.endswith(".gz") else lines)
    assert rows(path) == [
        {"prompt": "name : A | food : B", "completion": " A has B ."},
        {"prompt": "name : C", "completion": " C D ."},
    ]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("no bars here", "test.txt:2: line has no || between a meaning and its text"),
        ("a||b||c", "test.txt:2: line has || more than once"),
        ("||text", "test.txt:2: `prompt` is empty"),
        ("meaning|| ", "test.txt:2: `completion` is empty"),
    ],
)
def test_a_bad_line_of_e2e_is_named_by_file_and_line(tmp_path, line, reason):
    path = tmp_path / "test.txt"
    path.write_text(f"a||b\n{line}\n")
    assert reason_of(path) == reason


@pytest.mark.smoke
def test_webnlg_gives_a_row_for_each_good_text(tmp_path):
    triples = (("A_B", "isPartOf", "C"), ("A_B", "leader", "D"))
    entries = [
        entry(1, [("A b.", "good"), ("A c.", "toFix"), ("A d.", "good")], triples=triples),
        entry(2, [("Food.", "good")], category="Food"),
    ]
    meaning = "A_B : isPartOf : C | A_B : leader : D"
    assert rows(as_json(tmp_path, {"entries": entries}, indent=4)) == [
        {"prompt": meaning, "completion": " A b.", "category": "Airport"},
        {"prompt": meaning, "completion": " A d.", "category": "Airport"},
        {"prompt": "Aarhus : leaderName : Jacob", "completion": " Food.", "category": "Food"},
    ]


def test_rows_of_webnlg_are_named_by_the_line_their_entry_begins_on(tmp_path):
    path = tmp_path / "data.json"
    first, second = (json.dumps(entry(i, [("a", "good"), ("b", "good")])) for i in (1, 2))
    path.write_text('{"entries": [\n' + first + ",\n" + second + "]\n}\n")
    lines = [raw.location.rsplit(":", 1)[1] for raw in iter_file(path)]
    assert lines == ["2", "2", "3", "3"]


@pytest.mark.smoke
def test_dart_gives_a_row_for_each_text_with_relations_in_lower_case(tmp_path):
    sets = [
        {
            "tripleset": [["Mars Hill", "JOINED_IN", "1973"], ["Mars Hill", "LOCATION", "NC"]],
            "subtree_was_extended": True,
            "annotations": [{"source": "x", "text": "One."}, {"source": "y", "text": "Two."}],
        }
    ]
    meaning = "Mars Hill : joined_in : 1973 | Mars Hill : location : NC"
    assert rows(as_json(tmp_path, sets)) == [
        {"prompt": meaning, "completion": " One."},
        {"prompt": meaning, "completion": " Two."},
    ]


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (
            {"entries": [{"1": {"category": "Food"}}]},
            "entry is no object of one object with 'modifiedtripleset'",
        ),
        (
            {"entries": [{"1": {"modifiedtripleset": [{"subject": "a", "object": "b"}]}}]},
            "'property' must be text, found NoneType",
        ),
        (
            {"entries": [{"1": {"modifiedtripleset": [], "category": "Food"}}]},
            "'lexicalisations' must be a list, found NoneType",
        ),
        ({"entries": [entry(1, [(7, "good")])]}, "'lex' must be text, found int"),
        (
            [{"tripleset": [["a", "b"]], "annotations": []}],
            "'tripleset' has ['a', 'b'] where three texts belong",
        ),
        ([{"tripleset": [], "annotations": ["t"]}], "an object with 'text' belongs where str is"),
    ],
)
def test_a_bad_entry_is_named_by_file_line_and_reason(tmp_path, value, reason):
    assert reason_of(as_json(tmp_path, value)) == f"data.json:1: {reason}"


@pytest.mark.smoke
@pytest.mark.parametrize("text", ['{"entries": []', '{"entries": [], "more": 1}'])
def test_what_follows_the_entries_must_be_their_end(tmp_path, text):
    path = tmp_path / "data.json"
    path.write_text(text)
    assert reason_of(path).startswith("data.json:1: not valid JSON (")


def test_ordinary_rows_stay_what_they_are(tmp_path):
    ordinary = [
        {"prompt": "p", "completion": "c", "tripleset": [], "annotations": []},
        {"text": "t", "entries": [1]},
    ]
    assert rows(as_json(tmp_path, ordinary)) == ordinary
    assert rows(as_json(tmp_path, ordinary[1])) == [ordinary[1]]


def test_text_files_beside_data_are_notes(tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "p", "completion": "c"}\n')
    (tmp_path / "README.txt").write_text("words\n")
    assert [path.name for path in find_source("data_path", str(tmp_path)).files] == ["rows.jsonl"]


def test_start_up_checks_read_the_lines(tmp_path):
    path = tmp_path / "train.txt"
    path.write_text("a||b\nc\n")
    with pytest.raises(ValueError, match="train.txt:2: line has no"):
        check_sources(DataConfig(data_path=(str(path),)))
