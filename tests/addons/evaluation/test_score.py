"""``dschat-lora score``: rows of every kind, with the scores that stock PEFT gives."""

import json
import subprocess
import sys
from datetime import datetime

import pytest

from dschat_lora.assets import BUNDLED_MODEL
from helpers.step1 import write_jsonl
from helpers.trained import PAIRS, home, stock_scorer, verb

__all__ = ["home", "verb"]

MODEL = ("score", "--model_name_or_path", "reward")


@pytest.fixture(scope="module")
def stock(home):
    return stock_scorer(BUNDLED_MODEL, home / "reward" / "adapter")


def lines_of(text):
    return [json.loads(line) for line in text.splitlines()]


def test_scores_on_standard_output_are_those_of_stock_peft(verb, home, stock):
    tie = {"prompt": "Say a.", "chosen": " a", "rejected": " a"}
    write_jsonl(home / "rows.jsonl", [{**row, "family": "f"} for row in (*PAIRS, tie)])
    ended = verb.run(*MODEL, "--data_path", "rows.jsonl")
    right = 0
    for line, row in zip(lines_of(ended.out), (*PAIRS, tie), strict=True):
        scores = line["chosen_score"], line["rejected_score"]
        expected = [stock(row["prompt"], row[name]) for name in ("chosen", "rejected")]
        assert scores == pytest.approx(expected, abs=1e-5)
        assert line.items() >= {**row, "family": "f"}.items()
        right += (scores[0] > scores[1]) + 0.5 * (scores[0] == scores[1])
    assert right % 1 == 0.5
    assert f"accuracy {right / 4:.1%} over 4 pairs" in ended.err
    assert "4 rows scored" in ended.err


def test_rows_of_other_kinds_are_scored_and_too_long_ones_are_null(verb, home, stock):
    rows = [
        {"prompt": "Add 1 and 1.", "completion": " It is 2.", "id": 7},
        {"prompt": "Add 1 and 1. " * 20, "completion": " It is 2."},
        {"prompt": "Say a.", "chosen": " a", "rejected": " b" * 60},
        {"text": "A plum is a fruit."},
    ]
    write_jsonl(home / "mixed.jsonl", rows)
    ended = verb.run(
        *("score", "--model_name_or_path", "reward/adapter", "--data_path", "mixed.jsonl"),
        *("--output_path", "new/directory/scored.jsonl", "--max_seq_len", 40),
        *("--per_device_eval_batch_size", 1),
    )
    assert ended.out == ""
    (file,) = (home / "new" / "directory").iterdir()
    first, second, third, fourth = lines_of(file.read_text(encoding="utf-8"))
    score = pytest.approx(stock("Add 1 and 1.", " It is 2."), abs=1e-5)
    assert first == {**rows[0], "score": score}
    assert second == {**rows[1], "score": None}
    assert third["rejected_score"] is None
    assert third["chosen_score"] == pytest.approx(stock("Say a.", " a"), abs=1e-5)
    assert fourth["score"] == pytest.approx(stock("", "A plum is a fruit."), abs=1e-5)
    assert "no score (null) for 2 rows of more than 40 tokens" in ended.err
    assert "4 rows scored to " in ended.err


def test_columns_of_types_that_json_lacks_are_passed_on_as_text(verb, home):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    columns = {"prompt": ["a"], "completion": [" b"], "when": [datetime(2020, 1, 2)]}
    parquet.write_table(pyarrow.table(columns), home / "typed.parquet")
    (line,) = lines_of(verb(*MODEL, "--data_path", "typed.parquet"))
    assert line["when"].startswith("2020-01-02")


def test_merged_model_is_scored_alike(verb, stock):
    verb("merge", "reward", "--output_dir", "merged", "--dtype", "fp32")
    lines = lines_of(verb("score", "--model_name_or_path", "merged", "--data_path", "pairs.jsonl"))
    for line, row in zip(lines, PAIRS, strict=True):
        expected = stock(row["prompt"], row["chosen"])
        assert line["chosen_score"] == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize(
    ("argv", "parts"),
    [
        (
            "--model_name_or_path sft --data_path pairs.jsonl",
            ["--model_name_or_path", "reward model"],
        ),
        ("--model_name_or_path {model} --data_path pairs.jsonl", ["--model_name_or_path"]),
        ("--model_name_or_path reward", ["--data_path"]),
        ("--data_path pairs.jsonl", ["--model_name_or_path"]),
        ("--data_pth pairs.jsonl", ["did you mean --data_path?"]),
        ("--model_name_or_path reward --data_path no.jsonl", ["no.jsonl"]),
        ("--model_name_or_path reward --data_path prompts.jsonl", ["prompts.jsonl:1"]),
        (
            "--model_name_or_path reward --data_path pairs.jsonl --max_seq_len 4000",
            ["--max_seq_len is 4000, but the model has 512 positions"],
        ),
    ],
)
def test_wrong_request_is_one_line_and_writes_nothing(verb, home, argv, parts):
    words = argv.format(model=BUNDLED_MODEL).split()
    line = verb.refused("score", *words, "--output_path", "none.jsonl")
    assert not [part for part in parts if part not in line], line
    assert not (home / "none.jsonl").exists()


@pytest.mark.thorough
@pytest.mark.stage
def test_scores_whose_reader_has_gone_end_quietly(home):
    process = subprocess.Popen(
        [sys.executable, "-m", "dschat_lora.__main__", *MODEL, "--data_path", "pairs.jsonl"],
        cwd=home,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    process.stdout.close()
    err = process.stderr.read()
    assert process.wait(timeout=120) == 0
    assert "Traceback" not in err
    assert "Error" not in err
