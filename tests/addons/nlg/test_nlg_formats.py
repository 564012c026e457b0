import gzip
import json
import re

import pytest

from dschat_lora.config.data import DataConfig
from dschat_lora.data.readers import iter_file
from dschat_lora.data.rows import check_sources, parse_row
from dschat_lora.data.sources import find_source


def rows(path):
    return [parse_row(raw).values for raw in iter_file(path)]


def entry(*texts, category="Airport", triples=(("Aarhus", "leaderName", "Jacob"),)):
    """One of WebNLG's: ``texts`` are pairs of a text and its comment."""
    parts = ("subject", "property", "object")
    return {
        "1": {
            "category": category,
            "modifiedtripleset": [dict(zip(parts, each, strict=True)) for each in triples],
            "lexicalisations": [{"lex": lex, "comment": comment} for lex, comment in texts],
            "size": str(len(triples)),
        }
    }


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
    ("name", "content", "reason"),
    [
        ("test.txt", "a||b\nno bars here\n", "2: line has no || between a meaning and its text"),
        ("test.txt", "a||b\na||b||c\n", "2: line has || more than once"),
        ("test.txt", "a||b\n||text\n", "2: `prompt` is empty"),
        ("test.txt", "a||b\nmeaning|| \n", "2: `completion` is empty"),
        (
            *("data.json", {"entries": [{"1": {"category": "Food"}}]}),
            "1: entry is no object of one object with 'modifiedtripleset'",
        ),
        (
            *("data.json", {"entries": [{"1": {"modifiedtripleset": [{"subject": "a"}]}}]}),
            "1: 'property' must be text, found NoneType",
        ),
        (
            *("data.json", {"entries": [{"1": {"modifiedtripleset": [], "category": "Food"}}]}),
            "1: 'lexicalisations' must be a list, found NoneType",
        ),
        ("data.json", {"entries": [entry((7, "good"))]}, "1: 'lex' must be text, found int"),
        (
            *("data.json", [{"tripleset": [["a", "b"]], "annotations": []}]),
            "1: 'tripleset' has ['a', 'b'] where three texts belong",
        ),
        (
            *("data.json", [{"tripleset": [], "annotations": ["t"]}]),
            "1: an object with 'text' belongs where str is",
        ),
        ("data.json", '{"entries": []', "1: not valid JSON ("),
        ("data.json", '{"entries": [], "more": 1}', "1: not valid JSON ("),
    ],
)
def test_a_bad_row_is_named_by_file_line_and_reason(tmp_path, name, content, reason):
    path = tmp_path / name
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(ValueError, match=re.escape(f"{path}:{reason}")):
        rows(path)
    with pytest.raises(ValueError, match=re.escape(f"{name}:{reason}")):  # at start-up too
        check_sources(DataConfig(data_path=(str(path),)))


@pytest.mark.smoke
def test_webnlg_gives_a_row_for_each_good_text_named_by_the_line_of_its_entry(tmp_path):
    triples = (("A_B", "isPartOf", "C"), ("A_B", "leader", "D"))
    first = entry(("A b.", "good"), ("A c.", "toFix"), ("A d.", "good"), triples=triples)
    second = entry(("Food.", "good"), category="Food")
    path = tmp_path / "data.json"
    path.write_text('{"entries": [\n' + f"{json.dumps(first)},\n{json.dumps(second)}]\n}}\n")
    meaning = "A_B : isPartOf : C | A_B : leader : D"
    assert rows(path) == [
        {"prompt": meaning, "completion": " A b.", "category": "Airport"},
        {"prompt": meaning, "completion": " A d.", "category": "Airport"},
        {"prompt": "Aarhus : leaderName : Jacob", "completion": " Food.", "category": "Food"},
    ]
    assert [raw.location.rsplit(":", 1)[1] for raw in iter_file(path)] == ["2", "2", "3"]


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
    path = tmp_path / "data.json"
    path.write_text(json.dumps(sets))
    assert rows(path) == [
        {"prompt": meaning, "completion": " One."},
        {"prompt": meaning, "completion": " Two."},
    ]


def test_ordinary_rows_stay_what_they_are_and_text_files_beside_them_are_notes(tmp_path):
    ordinary = [
        {"prompt": "p", "completion": "c", "tripleset": [], "annotations": []},
        {"text": "t", "entries": [1]},
    ]
    path = tmp_path / "data.json"
    for value, expected in ((ordinary, ordinary), (ordinary[1], ordinary[1:])):
        path.write_text(json.dumps(value))
        assert rows(path) == expected
    (tmp_path / "README.txt").write_text("words\n")
    assert find_source("data_path", str(tmp_path)).files == (path,)
