"""Written texts with their references: as decode leaves them, and as the original's scorers do.

The scorers are e2e-metrics' ``measure_scores.py`` and GenerationEval's ``eval.py``.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count, islice, takewhile
from pathlib import Path
from typing import Any

from dschat_lora.addons.nlg.config import EvaluateConfig, Filter, FormatConfig
from dschat_lora.config.files import parse_json
from dschat_lora.config.plurals import counted
from dschat_lora.config.staging import write_whole
from dschat_lora.report.directory import read_object
from dschat_lora.report.terminal import log_once

# The categories of WebNLG 2017 with texts to train on.
SEEN = {
    *("Airport", "Astronaut", "Building", "City", "ComicsCharacter", "Food", "Monument"),
    *("SportsTeam", "University", "WrittenWork"),
}
# Options of eval.py and measure_scores.py, and of this package.
_SHORT = {"-R": "--references", "-H": "--hypotheses", "-nr": "--ref_num", "-m": "--metrics"}


@dataclass(frozen=True)
class Prediction:
    """One line of the file that decode wrote."""

    text: str
    references: tuple[str, ...]
    category: str | None


def scorer_arguments(argv: Sequence[str]) -> list[str]:
    """A command line of GenerationEval's ``eval.py`` or e2e-metrics' ``measure_scores.py``.

    ``-R``, ``-H``, ``-nr`` and ``-m bleu,meteor,ter`` of the first, and of the second two files in
    turn, references and texts. Its ``-p`` asks for what is always so.
    """
    words = [_SHORT.get(word, word) for word in argv if word != "-p"]
    if words[:1] and not words[0].startswith("-"):
        words = ["--references", words[0], *words[1:]]
        if words[2:3] and not words[2].startswith("-"):
            words.insert(2, "--hypotheses")
    if "--metrics" in words[:-1]:
        at = words.index("--metrics") + 1
        words[at : at + 1] = words[at].replace("-", "_").split(",")
    return words


def chosen_predictions(config: EvaluateConfig) -> dict[str, list[Prediction]]:
    """The texts that an evaluation is about, by their file.

    Raises:
        ValueError: naming the file and line, or what is empty.
    """
    if config.hypotheses is None:
        return {name: read_predictions(name, config.filter) for name in config.predictions}
    assert config.references is not None, "they go together"
    if config.filter != "all":
        raise ValueError(f"--filter {config.filter} needs categories, which text files lack")
    texts = _lines_of(config.hypotheses, "hypotheses")
    references = _references(config.references, config.ref_num)
    if len(texts) != len(references):
        raise ValueError(
            f"--hypotheses {config.hypotheses} has {counted(len(texts), 'line')}, --references "
            f"{config.references} references of {counted(len(references), 'text')}"
        )
    if empty := [number for number, each in enumerate(references, start=1) if not each]:
        raise ValueError(f"--references {config.references}: text {empty[0]} has none")
    pairs = zip(texts, references, strict=True)
    return {config.hypotheses: [Prediction(text, each, None) for text, each in pairs]}


def _references(name: str, number: int | None) -> list[tuple[str, ...]]:
    """References of each text, of one file by empty lines, or of numbered files by line."""
    if Path(name).expanduser().is_file():
        text = "\n".join(_lines_of(name, "references"))
        return [tuple(each.split("\n")) for each in re.split(r"\n\n+", text.strip("\n"))]
    numbered = (f"{name}{i}" for i in count())
    names = list(
        islice(numbered, number)
        if number
        else takewhile(lambda each: Path(each).expanduser().is_file(), numbered)
    )
    if not names:
        raise ValueError(f"neither --references {name} nor {name}0, {name}1, ... is a file")
    columns = [_lines_of(each, "references") for each in names]
    if odd := [n for n, lines in zip(names, columns, strict=True) if len(lines) != len(columns[0])]:
        raise ValueError(f"--references {odd[0]} has a different number of lines than {names[0]}")
    return [tuple(filter(str.strip, each)) for each in zip(*columns, strict=True)]


def _lines_of(name: str, option: str) -> list[str]:
    path = Path(name).expanduser()
    try:
        return path.read_text(encoding="utf-8-sig").removesuffix("\n").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--{option} {name} cannot be read: {error}") from error


def read_predictions(name: str, wanted: Filter) -> list[Prediction]:
    """The lines of a file that decode wrote, those that ``--filter`` leaves.

    Raises:
        ValueError: as :func:`chosen_predictions`.
    """
    predictions = []
    for location, values in json_lines(name, "predictions"):
        text, references = values.get("prediction"), values.get("references")
        category = values.get("category")
        if not isinstance(text, str) or not isinstance(references, list):
            raise ValueError(
                f"{location}: a line has 'prediction' (text) and 'references' (a list)"
            )
        if not references or not all(isinstance(r, str) and r.strip() for r in references):
            raise ValueError(f"{location}: 'references' must be one text or more, none empty")
        known = category if isinstance(category, str) else None
        predictions.append(Prediction(text, tuple(references), known))
    if wanted != "all":
        if any(each.category is None for each in predictions):
            raise ValueError(
                f"--filter {wanted} needs the category of every meaning, which WebNLG's files "
                f"have and {name} lacks"
            )
        is_seen = wanted == "seen"
        predictions = [each for each in predictions if (each.category in SEEN) == is_seen]
    if not predictions:
        raise ValueError(f"--predictions {name} has no meaning for --filter {wanted}")
    return predictions


def json_lines(name: str, option: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Place and content of each line of a JSONL file; no object gives an empty one.

    Raises:
        ValueError: naming the file and line.
    """
    path = Path(name).expanduser()
    if not path.is_file():
        raise ValueError(f"--{option} {name} is not a file; decode writes it")
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield f"{path}:{number}", _object(f"{path}:{number}", line)


def _object(location: str, line: bytes) -> dict[str, Any]:
    try:
        values = parse_json(line.decode("utf-8-sig"))
        json.dumps(values, ensure_ascii=False).encode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{location}: not UTF-8 (byte {error.start + 1} of the line)") from error
    except UnicodeEncodeError as error:
        half = error.object[error.start]
        raise ValueError(f"{location}: {half!a} is half a character (a lone surrogate)") from error
    except ValueError as error:
        reason = getattr(error, "msg", error)
        raise ValueError(f"{location}: not valid JSON ({reason})") from error
    return values if isinstance(values, dict) else {}


def run_format(config: FormatConfig) -> None:
    """Write the files that the original's scorers read, or with ``--dry_run`` say what would be."""
    predictions = predictions_to_format(config)
    log_once(f"{counted(len(predictions), 'text')} with their references, as of {config.profile}")
    if config.dry_run:
        return
    clean = cleaner(tokenize=config.tokenize, lower=config.lower)
    references = [[clean(text) for text in each.references] for each in predictions]

    def write(path: Path, texts: Sequence[str]) -> None:
        write_whole(path, "".join(text + "\n" for text in texts))

    write(Path(config.output_pred_file).expanduser(), [clean(each.text) for each in predictions])
    path = Path(config.output_ref_file).expanduser()
    if config.profile == "e2e":
        write(path, [line for each in references for line in (*each, "")])
        return
    path.mkdir(parents=True, exist_ok=True)
    for number in range(config.ref_num):
        column = [each[number] if number < len(each) else each[0] for each in references]
        write(path / f"reference{number}", column)


def predictions_to_format(config: FormatConfig) -> list[Prediction]:
    """The predictions with their references.

    Raises:
        ValueError: naming the file and line, or what is missing.
    """
    if config.input_file is None:
        return read_predictions(config.predictions, config.filter)
    contexts, references = [], dict[str, list[str]]()
    for location, values in json_lines(config.input_file, "input_file"):
        context, completion = values.get("context"), values.get("completion")
        if not isinstance(context, str) or not isinstance(completion, str):
            raise ValueError(f"{location}: a line has 'context' and 'completion', both text")
        contexts.append(context)
        if config.filter == "all" or bool(values.get("cate")) == (config.filter == "seen"):
            references.setdefault(context, []).append(_until_end(completion))
    tokens = None if config.vocab is None else _vocabulary(Path(config.vocab).expanduser())
    texts_of = dict[str, str]()
    for location, values in json_lines(config.predictions, "predictions"):
        row = values.get("id")
        if not isinstance(row, int) or not 0 <= row < len(contexts):
            raise ValueError(
                f"{location}: 'id' must be a row of --input_file, in [0, {len(contexts)})"
            )
        texts_of[contexts[row]] = _until_end(_written_text(location, values, tokens, config.vocab))
    if missing := [context for context in references if context not in texts_of]:
        raise ValueError(f"--predictions {config.predictions} lacks a text for {missing[0]!r}")
    if not references:
        raise ValueError(f"--input_file {config.input_file} has no row for {config.filter}")
    return [Prediction(texts_of[c], tuple(texts), None) for c, texts in references.items()]


def cleaner(*, tokenize: bool, lower: bool) -> Callable[[str], str]:
    """What the original makes of a text before it is scored; one line in any case."""

    def clean(text: str) -> str:
        text = text.lower() if lower else text
        if tokenize:
            text = " ".join(re.split(r"(\W)", text))
        return " ".join(text.split() if tokenize else text.splitlines())

    return clean


def _written_text(
    location: str, values: Mapping[str, object], letters: Mapping[int, str] | None, name: str | None
) -> str:
    """The text of a line of predictions, by ``--vocab`` where it holds token ids alone."""
    text, ids = values.get("prediction"), values.get("predict")
    if isinstance(text, str):
        return text
    if not isinstance(ids, list) or not all(type(token) is int for token in ids):
        raise ValueError(f"{location}: a line has 'predict', a list of token ids")
    if letters is None:
        raise ValueError(f"{location}: of token ids --vocab, their tokenizer, makes the text")
    if unknown := [token for token in ids if token not in letters]:
        raise ValueError(f"{location}: --vocab {name} has no token {unknown[0]}")
    from tokenizers.decoders import ByteLevel  # only where it is needed

    return str(ByteLevel().decode([letters[token] for token in ids]))


def _vocabulary(directory: Path) -> dict[int, str]:
    """The letters of each token of GPT-2's ``encoder.json`` or ``vocab.json``; none without one."""
    vocabularies = (read_object(directory / name) for name in ("encoder.json", "vocab.json"))
    return {int(number): name for name, number in next(filter(None, vocabularies), {}).items()}


def _until_end(text: str) -> str:
    return text.split("<|endoftext|>")[0].split("\n\n")[0].strip()
