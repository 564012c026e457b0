"""Places of data: files of every kind, directories, patterns and names of the hub."""

import gzip
import json

import pyarrow as pa
import pyarrow.parquet
import pytest

from dschat_lora.config.data import DataConfig
from dschat_lora.config.options import parse_config
from dschat_lora.data.readers import iter_file, iter_rows
from dschat_lora.data.rows import check_sources, config_sources, parse_row
from dschat_lora.data.sources import find_source
from dschat_lora.rl.options.config import RlhfConfig
from dschat_lora.rl.options.inputs import text_data
from helpers.addons import ROW_FILES


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def save(path, *texts):
    """A parquet file of rows with these texts, its directories made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pa.parquet.write_table(pa.table({"text": list(texts)}), path)


def write(path, *texts):
    """The same as JSON lines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


def texts(entry, split=None):
    return [raw.values["text"] for raw in iter_rows(find_source("data_path", entry, split))]


def reason(entry, split=None):
    with pytest.raises(ValueError) as error:  # noqa: PT011 - the whole text is compared
        list(iter_rows(find_source("data_path", entry, split)))
    return str(error.value)


# ---------------------------------------------------------------------------- files


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("rows.jsonl", '{"text": "a"}\n{"text": "b"}\n'),
        ("rows.json", '[{"text": "a"},\n {"text": "b"}]'),
        ("rows.csv", 'text\n"a"\nb\n'),
        ("rows.txt", "a\n\nb\n"),
    ],
)
@pytest.mark.parametrize("packed", [".gz", ".zst"])
def test_packed_files_read_as_those_inside(tmp_path, name, content, packed):
    (tmp_path / name).write_text(content)
    path = tmp_path / f"{name}{packed}"
    if packed == ".gz":
        path.write_bytes(gzip.compress(content.encode()))
    else:
        with pa.output_stream(str(path), compression="zstd") as file:
            file.write(content.encode())
    plain = [(raw.location, raw.values) for raw in iter_file(tmp_path / name)]
    assert [(raw.location.replace(packed, ""), raw.values) for raw in iter_file(path)] == plain
    path.write_bytes(path.read_bytes()[:-6])
    with pytest.raises(ValueError, match=rf"{name}{packed} cannot be read"):
        list(iter_file(path))


def test_a_text_file_is_one_document(tmp_path):
    document = "\ufeffA title | a bar\n\nIts text || with bars,\nto the end.\n"
    (tmp_path / "book.txt").write_text(document, encoding="utf-8")
    (row,) = (parse_row(raw) for raw in iter_file(tmp_path / "book.txt"))
    assert (row.kind, row.values) == ("text", {"text": document[1:]})
    (tmp_path / "book.txt").write_bytes(b"caf\xe9")
    (raw,) = iter_file(tmp_path / "book.txt")
    assert (raw.location, raw.problem) == (
        f"{tmp_path}/book.txt:1",
        "not UTF-8 (byte 4 of the file)",
    )
    (tmp_path / "book.txt").write_text(" \n")
    with pytest.raises(ValueError, match=r"--data_path book\.txt: book\.txt has no rows"):
        check_sources(DataConfig(data_path=("book.txt",)))


@pytest.mark.parametrize("form", ["stream", "file"])
def test_arrow_files_of_both_forms_are_read(tmp_path, form):
    table, path = pa.table({"text": ["a", None, "c"], "n": [1, 2, 3]}), tmp_path / "rows.arrow"
    make = pa.ipc.new_stream if form == "stream" else pa.ipc.new_file
    with pa.OSFile(str(path), "wb") as sink, make(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=2)
    assert [(raw.location, raw.values) for raw in iter_file(path)] == [
        (f"{path}:1", {"text": "a", "n": 1}),
        (f"{path}:2", {"text": None, "n": 2}),
        (f"{path}:3", {"text": "c", "n": 3}),
    ]
    path.write_bytes(path.read_bytes()[:-100])
    assert reason("rows.arrow").startswith("rows.arrow cannot be read: ")


# ---------------------------------------------------------------------------- directories


def test_a_saved_data_set_has_the_rows_in_its_order(tmp_path):
    from datasets import Dataset

    rows = Dataset.from_list([{"text": str(i)} for i in range(10)])
    rows.save_to_disk(tmp_path / "saved", num_shards=3)
    source = find_source("data_path", "saved")
    assert [path.name for path in source.files] == [
        f"data-0000{i}-of-00003.arrow" for i in range(3)
    ]
    assert texts("saved") == texts("saved", "train") == [str(i) for i in range(10)]
    assert reason("saved", "test") == "--data_path saved has no split 'test'; it has train"
    assert reason("saved/dataset_info.json") == (
        "--data_path saved/dataset_info.json describes a data set; give its directory, saved"
    )
    source.files[1].unlink()
    assert reason("saved") == (
        "saved/state.json names data-00001-of-00003.arrow, which does not exist"
    )
    (tmp_path / "saved" / "state.json").write_text("{")
    assert reason("saved").startswith("saved/state.json cannot be read: ")


def test_a_saved_dictionary_has_splits(tmp_path):
    from datasets import Dataset, DatasetDict

    parts = {name: Dataset.from_list([{"text": name}]) for name in ("train", "test")}
    DatasetDict(parts).save_to_disk(tmp_path / "saved")
    assert texts("saved") == ["train"]
    assert texts("saved", "test") == texts("saved:test") == ["test"]
    assert reason("saved:dev") == "--data_path saved:dev has no split 'dev'; it has train, test"
    parts["dev"] = parts.pop("train")
    DatasetDict(parts).save_to_disk(tmp_path / "other")
    assert reason("other") == (
        "--data_path other has the splits test, dev; name one, as in other:test"
    )


def test_a_snapshot_of_a_hub_repository_has_its_split_train(tmp_path):
    for name in ("train-00000-of-00002", "train-00001-of-00002-0a1b", "test-00000-of-00001"):
        save(tmp_path / "snap" / "data" / f"{name}.parquet", name[:7])
    (tmp_path / "snap" / "README.md").write_text("about")
    (tmp_path / "snap" / "dataset_infos.json").write_text('{"default": {"citation": ""}}')
    (tmp_path / "snap" / ".cache").mkdir()
    write(tmp_path / "snap" / ".cache" / "x.jsonl", "hidden")
    assert texts("snap") == texts("snap", "train") == texts("snap/data") == ["train-0", "train-0"]
    assert texts("snap:test") == texts("snap/data", "test") == ["test-00"]
    assert reason("snap", "dev") == "--data_path snap has no split 'dev'; it has test, train"


def test_splits_of_a_snapshot_keep_their_own_names(tmp_path):
    for name in ("train_prefs", "test_prefs", "train_sft"):
        save(tmp_path / "snap" / "data" / f"{name}-00000-of-00001.parquet", name)
    assert texts("snap", "train_prefs") == ["train_prefs"]
    assert reason("snap") == (
        "--data_path snap has the splits test_prefs, train_prefs, train_sft; name one, as in "
        "snap:test_prefs"
    )


def test_a_snapshot_of_several_data_sets_asks_for_one(tmp_path):
    for name in ("main", "socratic"):
        save(tmp_path / "snap" / name / "train-00000-of-00001.parquet", name)
    assert reason("snap") == (
        "--data_path snap contains several data sets: main, socratic; give one of these directories"
    )
    assert texts("snap/main") == ["main"]


@pytest.mark.parametrize(
    ("train", "test"),
    [
        ("default/train/0000.parquet", "default/test/0000.parquet"),
        ("train/data-00000-of-00001.parquet", "test/data-00000-of-00001.parquet"),
        ("data/my_train.parquet", "data/my_eval.parquet"),
        ("data/rows.parquet", "data/rows.test.parquet"),
    ],
)
def test_files_below_belong_to_the_split_that_they_or_their_directories_are_named_after(
    tmp_path, train, test
):
    save(tmp_path / "root" / train, "a")
    save(tmp_path / "root" / test, "b")
    assert (texts("root"), texts("root", "test")) == (["a"], ["b"])


def test_files_directly_in_a_directory_are_all_read_but_where_a_split_is_named(tmp_path):
    write(tmp_path / "flat" / "train.jsonl", "a")
    write(tmp_path / "flat" / "valid.jsonl", "b")
    write(tmp_path / "flat" / "below" / "train.jsonl", "left out")
    assert texts("flat") == ["a", "b"]
    assert (texts("flat", "train"), texts("flat:validation")) == (["a"], ["b"])
    assert texts("flat", "valid") == ["b"]


def test_a_tree_without_splits_is_read_whole(tmp_path):
    for name in ("de/b", "de/a", "en/x/y"):
        write(tmp_path / "tree" / f"{name}.jsonl", name)
    assert texts("tree") == ["de/a", "de/b", "en/x/y"]
    write(tmp_path / "deep" / "1" / "2" / "3" / "4" / "5" / "x.jsonl", "x")
    assert "is a directory without data files; it contains 1" in reason("deep")


def test_text_files_are_documents_where_there_is_no_other_data(tmp_path):
    for name in ("b.txt", "a.txt", "sub/c.txt"):
        (tmp_path / "books" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "books" / name).write_text(name)
    assert texts("books") == ["a.txt", "b.txt"]
    write(tmp_path / "books" / "data" / "rows.jsonl", "row")
    assert texts("books") == ["row"]


# ---------------------------------------------------------------------------- patterns


def test_a_pattern_gives_the_data_files_that_match(tmp_path):
    for name in ("b", "a", "c"):
        write(tmp_path / "data" / f"{name}.jsonl", name)
    (tmp_path / "data" / "README.md").write_text("about")
    assert texts("data/[ab].jsonl") == ["a", "b"]
    assert texts("data/*") == texts("**/*.jsonl") == ["a", "b", "c"]
    assert reason("data/*.md") == (
        f"--data_path data/*.md matches no data file ({ROW_FILES} .parquet .arrow), but README.md"
    )
    assert reason("none/*.jsonl").endswith(", but nothing")
    (tmp_path / "data[1].jsonl").write_text('{"text": "itself"}\n')
    assert texts("data[1].jsonl") == ["itself"]


# ---------------------------------------------------------------------------- splits, the hub


@pytest.mark.parametrize(
    ("entry", "split", "expected"),
    [
        ("org/name", None, ("org/name", "train")),
        ("org/name", "test", ("org/name", "test")),
        ("org/name:test", None, ("org/name", "test")),
        ("org/name:train+test", None, ("org/name", "train+test")),
        ("org/name:test", "test", ("org/name", "test")),
        ("org/name:main:test", None, ("org/name", "main", "test")),
        ("org/name", "train[:10%]", ("org/name", "train[:10%]")),
    ],
)
def test_a_hub_name_may_have_a_configuration_and_a_split(monkeypatch, entry, split, expected):
    import datasets

    asked = []

    def load(*names, split):
        asked.append((*names, split))
        return [{"text": "a"}]

    monkeypatch.setattr(datasets, "load_dataset", load)
    (raw,) = iter_rows(find_source("data_path", entry, split))
    assert (asked, raw.location) == ([expected], f"{entry}:1")


@pytest.mark.parametrize(
    ("entry", "split", "message"),
    [
        (
            "org/name:test",
            "train",
            "--data_split_name train and --data_path org/name:test name different splits",
        ),
        (
            "rows.jsonl",
            "train",
            "--data_split_name train: --data_path rows.jsonl is a file; directories and hub data "
            "sets have splits",
        ),
        (
            "*.jsonl",
            "train",
            "--data_split_name train: --data_path *.jsonl is a pattern; directories and hub data "
            "sets have splits",
        ),
    ],
)
def test_a_split_that_does_not_apply_is_one_line(tmp_path, entry, split, message):
    write(tmp_path / "rows.jsonl", "a")
    assert reason(entry, split) == message
    too_many = "org/name:a:b:c"
    assert reason(too_many).startswith(f"--data_path {too_many} does not exist")


def test_split_names_are_those_of_the_training_sources_in_their_order(tmp_path):
    for name in ("one", "two"):
        for split in ("train", "test"):
            save(tmp_path / name / f"{split}-00000-of-00001.parquet", f"{name} {split}")

    def read(*splits):
        config = DataConfig(
            data_path=("one", "two"), eval_data_path=("one:test",), data_split_name=splits
        )
        return [raw.values["text"] for each in config_sources(config) for raw in iter_rows(each)]

    assert read() == ["one train", "two train", "one test"]
    assert read("test") == ["one test", "two test", "one test"]
    assert read("test", "train") == ["one test", "two train", "one test"]
    with pytest.raises(ValueError, match="one name, or one for each of the 2 --data_path, got"):
        read("a", "b", "c")


def test_the_configuration_of_pretraining_text_is_one_of_its_split_train():
    names = ["--unsupervised_dataset_name", "org/name", "--unsupervised_dataset_config_name", "c"]
    data = text_data(parse_config(RlhfConfig, names))
    assert data is not None
    (source,) = config_sources(data)
    assert source.hub_parts == ("org/name", "c", "train")
