"""Rows of the nine tasks, in GLUE's own files and in files with the hub's columns."""

import json
import re

import pytest

from dschat_lora.addons.glue.config import GlueConfig
from dschat_lora.addons.glue.data import find_files, read_split
from dschat_lora.config.options import parse_config
from helpers.glue_toys import TSV_TASKS, write_task


def config_of(task, *more):
    return parse_config(
        GlueConfig,
        ["--model_name_or_path", "m", "--task_name", task, *(str(each) for each in more)],
    )


# One line of each task's own file, as GLUE's download has it, and what it says.
LINES = {
    "cola": ('gj04\t0\t*\tThey "made him angry.', ('They "made him angry.',), 0),
    "sst2": ("sentence\tlabel\na fine film \t1", ("a fine film ",), 1),
    "mrpc": (
        "\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String\r\n1\t7\t8\tOne .\tTwo .\r",
        ("One .", "Two ."),
        1,
    ),
    "qqp": (
        "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate\n0\t1\t2\tWhy ?\tHow ?\t0",
        ("Why ?", "How ?"),
        0,
    ),
    "stsb": (
        "index\tgenre\tfilename\tyear\told_index\tsource1\tsource2\tsentence1\tsentence2\tscore\n"
        "0\tg\tf\t2012\t1\tn\tn\tA plane.\tA jet.\t4.250",
        ("A plane.", "A jet."),
        4.25,
    ),
    "mnli": (
        "index\tpromptID\tpairID\tgenre\tsentence1_binary_parse\tsentence2_binary_parse\t"
        "sentence1_parse\tsentence2_parse\tsentence1\tsentence2\tlabel1\tgold_label\n"
        "0\t1\t1n\tg\t( p )\t( p )\t(R)\t(R)\tIt rains.\tIt is wet.\tentailment\tneutral",
        ("It rains.", "It is wet."),
        1,
    ),
    "qnli": (
        "index\tquestion\tsentence\tlabel\n0\tWho?\tHe did.\tnot_entailment",
        ("Who?", "He did."),
        1,
    ),
    "rte": ("index\tsentence1\tsentence2\tlabel\n0\tA.\tB.\tentailment", ("A.", "B."), 0),
    "wnli": ("index\tsentence1\tsentence2\tlabel\n0\tA.\tB.\t1", ("A.", "B."), 1),
}


@pytest.mark.parametrize("task", LINES)
def test_a_line_of_the_own_file_gives_its_texts_and_label(task, tmp_path):
    text, texts, label = LINES[task]
    path = tmp_path / "train.tsv"
    path.write_bytes(text.encode())
    (example,) = read_split(path, config_of(task), "train").examples
    assert example.texts == texts
    assert example.label == label


@pytest.mark.smoke
@pytest.mark.parametrize("task", TSV_TASKS)
def test_every_file_of_the_download_is_found_and_read(task, tmp_path):
    write_task(task, tmp_path / "x", train=5, dev=4)
    config = config_of(task, "--data_dir", tmp_path / "x", "--do_predict")
    splits = {s: read_split(p, config, s) for s, p in find_files(config).items()}
    counts = {name: len(split.examples) for name, split in splits.items()}
    extra = {"validation_mismatched": 4, "test_mismatched": 4} if task == "mnli" else {}
    assert counts == {"train": 5, "validation": 4, "test": 4} | extra
    assert all(example.label is None for example in splits["test"].examples)
    if task == "mnli":
        assert splits["validation"].examples != splits["validation_mismatched"].examples


def test_the_folder_of_the_whole_download_will_do(tmp_path):
    write_task("sst2", tmp_path / "SST-2")
    files = find_files(config_of("sst2", "--data_dir", tmp_path))
    assert files["train"] == tmp_path / "SST-2" / "train.tsv"


@pytest.mark.parametrize(
    ("task", "names", "label", "number"),
    [
        ("mnli", ("premise", "hypothesis"), 2, 2),
        ("rte", ("sentence1", "sentence2"), "not_entailment", 1),
        ("stsb", ("sentence1", "sentence2"), 2.5, 2.5),
        ("qqp", ("question1", "question2"), 0, 0),
    ],
)
def test_rows_with_the_columns_of_the_hub_are_read(task, names, label, number, tmp_path):
    row = dict(zip(names, "ab", strict=True)) | {"label": label}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n", encoding="utf-8")
    (example,) = read_split(tmp_path / "rows.jsonl", config_of(task), "train").examples
    assert (example.texts, example.label) == (("a", "b"), number)


BAD = [
    ("cola", "gj04\t1\tToo short\n", "train.tsv:1: row has 3 cells, expected 4: source, label"),
    ("rte", "index\tsentence1\tsentence2\tlabel\n0\ta\tb\tmaybe\n", "train.tsv:2: 'label' must"),
    ("sst2", "sentence\tlabel\nfine\t2\n", "'label' must be one of 0 negative, 1 positive; found"),
    ("stsb", "sentence1\tsentence2\tscore\na\tb\t5.1\n", "'score' must be a number in [0, 5]"),
    ("stsb", "sentence1\tsentence2\tscore\na\tb\tnan\n", "'score' must be a number in [0, 5]"),
    ("qnli", "question\tanswer\tlabel\na\tb\tentailment\n", "row lacks question, sentence; it has"),
    ("mrpc", "sentence1\tsentence2\na\tb\n", "row lacks 'label'; it has sentence1, sentence2"),
]


@pytest.mark.parametrize(("task", "text", "message"), BAD)
def test_a_bad_row_is_named_with_its_line_and_reason(task, text, message, tmp_path):
    (tmp_path / "train.tsv").write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=re.escape(message)):
        read_split(tmp_path / "train.tsv", config_of(task), "train")


def test_skipped_rows_are_counted_with_their_places_and_only_line_feeds_end_a_row(tmp_path):
    text = "sentence\tlabel\none\u2028two\x0cthree\t1\nbad\nb\xff\t1\nnice\t0\n"
    data = text.encode().replace("\xff".encode(), b"\xff")
    (tmp_path / "train.tsv").write_bytes(data)
    split = read_split(tmp_path / "train.tsv", config_of("sst2", "--bad_rows", "skip"), "train")
    assert [example.label for example in split.examples] == [1, 0]
    assert split.examples[0].texts == ("one\u2028two\x0cthree",)
    assert [why.split("train.tsv")[1][:3] for why in split.skipped] == [":3:", ":4:"]
    assert "not UTF-8 (byte 2 of the line)" in split.skipped[1]
