"""Rows of a GLUE task from GLUE's own files, from files with the hub's columns, or from the hub."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from dschat_lora.addons.glue.config import GlueConfig, GlueTask
from dschat_lora.data.readers import RawRow, RowError, iter_file

HUB_NAME = "nyu-mll/glue"


class Split(NamedTuple):
    """A part of a task."""

    option: str  # that names a file of it
    stems: tuple[str, ...]  # names of its file in GLUE's download and in others
    way_out: str  # what to do without one


# MNLI alone has two kinds of each but the first.
SPLITS = {
    "train": Split("train_file", ("train",), "use --no-do_train to evaluate only"),
    "validation": Split(
        "validation_file",
        ("dev_matched", "dev", "validation_matched", "validation"),
        "use --no-do_eval to skip evaluation",
    ),
    "validation_mismatched": Split(
        "validation_mismatched_file",
        ("dev_mismatched", "validation_mismatched"),
        "give the files with --validation_file",
    ),
    "test": Split("test_file", ("test_matched", "test"), "remove --do_predict"),
    "test_mismatched": Split(
        "test_mismatched_file", ("test_mismatched",), "give the files with --test_file"
    ),
}
_SUFFIXES = (".tsv", ".jsonl", ".json", ".csv", ".parquet")


@dataclass(frozen=True)
class Example:
    """One row: its texts, and its label's number (a regression: the label itself)."""

    texts: tuple[str, ...]
    label: float | None  # None in a test


@dataclass(frozen=True)
class TaskSplit:
    """The rows of one part of a task."""

    examples: list[Example]
    skipped: list[str]  # why rows were left out, each with its place
    source: str


def split_names(config: GlueConfig) -> list[str]:
    """The parts this run reads."""
    wanted = ["train"] if config.do_train else []
    if config.do_eval or config.eval_strategy != "no":
        wanted.append("validation")
    if config.do_predict:
        wanted.append("test")
    if config.task_name != "mnli":
        return wanted
    return wanted + [f"{each}_mismatched" for each in wanted if each != "train"]


def find_files(config: GlueConfig) -> dict[str, Path | None]:
    """Local file of each part the run reads; None where it comes from the hub.

    MNLI's mismatched rows may be absent where other files are named one by one.

    Raises:
        ValueError: naming the option, if a file is missing or the options contradict each other.
    """
    named = {split: getattr(config, SPLITS[split].option) for split in SPLITS}
    given = [SPLITS[split].option for split, value in named.items() if value is not None]
    if config.task_name != "mnli" and (odd := [each for each in given if "mismatched" in each]):
        raise ValueError(f"--{odd[0]} is for --task_name mnli, not {config.task_name}")
    if config.data_dir is not None:
        if given:
            raise ValueError(f"--data_dir and --{given[0]} both name the rows; give one")
        return {split: _in_directory(config, split) for split in split_names(config)}
    files: dict[str, Path | None] = {}
    for split in split_names(config):
        value, option = named[split], SPLITS[split].option
        if not given:
            files[split] = None
        elif value is not None:
            files[split] = _existing(value, option)
        elif not split.endswith("_mismatched"):
            raise ValueError(
                f"--{option} is needed with --{given[0]}; give it, or {SPLITS[split].way_out}"
            )
    return files


def read_splits(config: GlueConfig) -> dict[str, TaskSplit]:
    """The rows of each part the run reads, as many as it takes; see :func:`read_split`."""
    splits = {}
    for name, path in find_files(config).items():
        limits = {"train": config.max_train_samples, "validation": config.max_eval_samples}
        most = limits.get(name.removesuffix("_mismatched"))
        splits[name] = read_split(path, config, name, first=most)
    return splits


def read_split(
    path: Path | None, config: GlueConfig, split: str, *, first: int | None = None
) -> TaskSplit:
    """The rows, no more than the ``first`` so many, of a local file, or of the hub's data set.

    Rows of a test need no label.

    Raises:
        ValueError: naming file, line and reason, at the first row that cannot be used (with
            ``--bad_rows skip``: if none can); in one line, if the hub's cannot be loaded.
    """
    if path is None:
        rows, source = _read_hub(config, split)
    else:
        rows = read_tsv(path, config.task_name) if path.suffix == ".tsv" else iter_file(path)
        source = str(path)
    examples: list[Example] = []
    skipped: list[str] = []
    for raw in rows:
        if first is not None and len(examples) == first:
            break
        try:
            examples.append(parse_row(raw, config.task, labelled=not split.startswith("test")))
        except RowError as error:
            if config.bad_rows == "stop":
                raise
            skipped.append(str(error))
    if not examples:
        raise ValueError("; ".join([f"{source} has no usable row", *skipped[:1]]))
    return TaskSplit(examples, skipped, source)


def _read_hub(config: GlueConfig, split: str) -> tuple[Iterator[RawRow], str]:
    """The rows of one part of the hub's data set, and its place there."""
    from datasets import load_dataset

    plain = config.task_name != "mnli" or split == "train" or split.endswith("_mismatched")
    name = split if plain else f"{split}_matched"
    try:
        rows = load_dataset(HUB_NAME, config.task_name, split=name)
    except (OSError, ValueError, RuntimeError) as error:
        reason = str(error).strip().split("\n")[0]
        raise ValueError(
            f"{HUB_NAME} ({config.task_name}, {name}) could not be loaded from the hub: {reason}; "
            "give local files with --data_dir, or --train_file and --validation_file"
        ) from error
    place = f"{HUB_NAME}/{config.task_name}/{name}"
    return (RawRow(f"{place}:{number}", row) for number, row in enumerate(rows, start=1)), place


def read_tsv(path: Path, task_name: str) -> Iterator[RawRow]:
    """Rows of a tab-separated file; quotes are text. CoLA's own files have no header but in tests.

    Raises:
        ValueError: if the file cannot be read.
    """
    try:
        # Split at line feeds alone: other ends of lines occur inside GLUE's texts.
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    header: list[str] | None = None
    if task_name == "cola" and path.stem != "test":
        named = b"sentence" in lines[0].rstrip(b"\r").split(b"\t")
        header = None if named else ["source", "label", "star", "sentence"]
    for number, line in enumerate(lines, start=1):
        location, content = f"{path}:{number}", line.rstrip(b"\r")
        if not content:
            continue
        try:
            cells = content.decode("utf-8-sig" if number == 1 else "utf-8").split("\t")
        except UnicodeDecodeError as error:
            yield RawRow(location, {}, f"not UTF-8 (byte {error.start + 1} of the line)")
            continue
        if header is None:
            header = cells
        elif len(cells) != len(header):
            problem = f"row has {len(cells)} cells, expected {len(header)}: {', '.join(header)}"
            yield RawRow(location, {}, problem)
        else:
            yield RawRow(location, dict(zip(header, cells, strict=True)))


def parse_row(raw: RawRow, task: GlueTask, *, labelled: bool) -> Example:
    """The texts and the label of a row, under GLUE's own names or the hub's.

    Raises:
        RowError: naming the row's place and what is wrong with it.
    """
    if raw.problem is not None:
        raise RowError(raw.location, raw.problem)
    values, layouts = raw.values, ((task.tsv_texts, task.tsv_label), (task.texts, "label"))
    fits = [layout for layout in layouts if set(layout[0]) <= values.keys()]
    if not fits:
        wanted = " or ".join(", ".join(names) for names in dict.fromkeys(n for n, _ in layouts))
        raise RowError(raw.location, f"row lacks {wanted}; it has {', '.join(map(str, values))}")
    texts, label_name = next((fit for fit in fits if fit[1] in values), fits[0])
    for name in texts:
        if not isinstance(values[name], str):
            kind = type(values[name]).__name__
            raise RowError(raw.location, f"{name!r} must be text, found {kind}")
    own_texts = tuple(values[name] for name in texts)
    if not labelled:
        return Example(own_texts, None)
    if label_name not in values:
        raise RowError(raw.location, f"row lacks {label_name!r}; it has {', '.join(values)}")
    return Example(own_texts, _label(raw.location, label_name, values[label_name], task))


def _label(location: str, name: str, value: object, task: GlueTask) -> float:
    text = str(value).strip()
    if task.is_regression:
        try:
            number = float(text)
        except ValueError:
            number = float("nan")
        if not 0 <= number <= 5:
            raise RowError(location, f"{name!r} must be a number in [0, 5], found {value!r}")
        return number
    if text in task.labels:
        return task.labels.index(text)
    if text.isdecimal() and int(text) < len(task.labels):
        return int(text)
    allowed = ", ".join(f"{number} {each}" for number, each in enumerate(task.labels))
    raise RowError(location, f"{name!r} must be one of {allowed}; found {value!r}")


def _in_directory(config: GlueConfig, split: str) -> Path:
    assert config.data_dir is not None
    directory = Path(config.data_dir).expanduser()
    if not directory.is_dir():
        raise ValueError(f"--data_dir {config.data_dir} is not a directory")
    places = (directory, directory / config.task.folder, directory / config.task_name)
    stems = [s for s in SPLITS[split].stems if config.task_name == "mnli" or "matched" not in s]
    names = [stem + suffix for stem in stems for suffix in _SUFFIXES]
    files = [place / name for place in places for name in names if (place / name).is_file()]
    if not files:
        wanted = " or ".join(f"{stem}.tsv" for stem in stems)
        raise ValueError(
            f"--data_dir {config.data_dir} holds no {wanted}, nor does its {config.task.folder}/; "
            f"give it, or {SPLITS[split].way_out}"
        )
    return files[0]


def _existing(value: str, option: str) -> Path:
    path = Path(value).expanduser()
    if not path.is_file():
        raise ValueError(f"--{option} {value} is not a file")
    if path.suffix not in _SUFFIXES:
        raise ValueError(f"--{option} {value} must end in one of {' '.join(_SUFFIXES)}")
    return path
