"""`dschat-lora audit` with options of rows: counts, the table, and the file of the rows kept."""

import json
import sys

import pytest
from audits import ROWS, audit, data

__all__ = ["audit", "data"]


@pytest.mark.smoke
def test_filtered_rows_are_in_the_counts_the_table_and_a_file(audit, tmp_path):
    rows = [{"prompt": "What is held out?", "completion": " Yes"}, ROWS[0], ROWS[0], ROWS[-1]]
    data, held_out, kept = (tmp_path / f"{name}.jsonl" for name in ("data", "eval", "kept"))
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    held_out.write_text(json.dumps({"prompt": "what is held out"}) + "\n")
    options = (data, "--against", held_out, "--kept_path", kept)
    _, out, _ = audit(*options, "--json")
    found = json.loads(out)
    assert (found["counts"]["contaminated"], found["counts"]["kept"]) == (1, 1)
    assert found["counts"]["duplicates"] == found["filtered"]["fates"]["duplicates"] == 1
    assert found["filtered"]["contaminated"] == [
        {"row": f"{data}:1", "like": f"{held_out}:1", "by": "what is held out"}
    ]
    assert kept.read_text() == json.dumps(ROWS[0]) + "\n"
    code, _, err = audit(*options)
    assert (code, err) == (
        2,
        f"error: --kept_path {kept} exists; choose another file, or use --overwrite_kept_path\n",
    )
    _, out, _ = audit(*options, "--overwrite_kept_path", "--stage", "rlhf")
    assert "contaminated 1 row (25.0%) by --against" in out
    assert f"kept         2 of 4 rows, in {kept}; left out: 1 contaminated, 1 duplicates" in out


@pytest.mark.smoke
@pytest.mark.parametrize("option", ["data_path", "against", "eval_data_path"])
def test_a_file_that_is_read_is_not_written(audit, data, tmp_path, option):
    link, other = tmp_path / "link.jsonl", tmp_path / "other.jsonl"
    other.write_text(json.dumps(ROWS[0]) + "\n")
    read = data if option == "data_path" else other
    link.symlink_to(read)
    more = () if option == "data_path" else (f"--{option}", other)
    before = read.read_bytes()
    code, _, err = audit(data, *more, "--kept_path", link, "--overwrite_kept_path")
    assert (code, read.read_bytes()) == (2, before)
    assert err == (
        f"error: --kept_path {link} is an input file of --{option} {read}; choose another one\n"
    )


def test_near_duplicates_are_refused_without_their_package(audit, data, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasketch", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    _, _, err = audit(data, "--near_duplicates", 0.8)
    assert err == "error: --near_duplicates needs datasketch: pip install 'dschat_lora[audit]'\n"
