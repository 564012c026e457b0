"""Written texts with their references, as decode or the original's scripts leave them."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count, islice, takewhile
from pathlib import Path
from typing import Any

from dschat_lora.config.files import parse_json
from dschat_lora.experiments.nlg.config import EvaluateConfig, Filter

# The categories of WebNLG 2017 with texts to train on.
SEEN = {
    *("Airport", "Astronaut", "Building", "City", "ComicsCharacter", "Food", "Monument"),
    *("SportsTeam", "University", "WrittenWork"),
}


@dataclass(frozen=True)
class Prediction:
    """One line of the file that decode wrote."""

    text: str
    references: tuple[str, ...]
    category: str | None


def chosen_predictions(config: EvaluateConfig) -> dict[str, list[Prediction]]:
    """The texts that an evaluation is about, by their file.

    Raises:
        ValueError: naming the file and line, or what is empty.
    """
    if config.hypotheses is not None:
        return {config.hypotheses: _from_text_files(config)}
    return {name: read_predictions(name, config.filter) for name in config.predictions}


def read_predictions(name: str, wanted: Filter) -> list[Prediction]:
    """The lines of a file that decode wrote, those that ``--filter`` leaves.

    Raises:
        ValueError: as :func:`chosen_predictions`.
    """
    found = [_prediction(location, values) for location, values in json_lines(name, "predictions")]
    uncategorised = next((p for p in found if p.category is None), None)
    if wanted != "all" and uncategorised is not None:
        raise ValueError(
            f"--filter {wanted} needs the category of every meaning, which WebNLG's files "
            f"have and {name} lacks"
        )
    if wanted != "all":
        found = [each for each in found if (each.category in SEEN) == (wanted == "seen")]
    if not found:
        raise ValueError(f"--predictions {name} has no meaning for --filter {wanted}")
    return found


def json_lines(name: str, option: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Place and content of each line of a JSONL file; no object gives an empty one.

    Raises:
        ValueError: naming the file and line.
    """
    path = Path(name).expanduser()
    if not path.is_file():
        raise ValueError(f"--{option} {name} is no file; decode writes one")
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield f"{path}:{number}", _object(f"{path}:{number}", line)


def _from_text_files(config: EvaluateConfig) -> list[Prediction]:
    """Texts of ``--hypotheses``, a line each, with those of ``--references``."""
    assert config.references is not None, "one of the two kinds of files is given"
    assert config.hypotheses is not None, "they go together"
    if config.filter != "all":
        raise ValueError(f"--filter {config.filter} needs categories, which text files lack")
    texts = _lines_of(config.hypotheses, "hypotheses")
    references = _references(config.references, config.ref_num)
    if len(texts) != len(references):
        raise ValueError(
            f"--hypotheses {config.hypotheses} has {len(texts)} lines, --references "
            f"{config.references} references of {len(references)} texts"
        )
    if empty := [number for number, each in enumerate(references, start=1) if not each]:
        raise ValueError(f"--references {config.references}: text {empty[0]} has none")
    return [Prediction(text, each, None) for text, each in zip(texts, references, strict=True)]


def _references(name: str, number: int | None) -> list[tuple[str, ...]]:
    """References of each text, of one file by empty lines, or of numbered files by line."""
    if Path(name).expanduser().is_file():
        text = "\n".join(_lines_of(name, "references"))
        return [tuple(each.split("\n")) for each in re.split(r"\n\n+", text.strip("\n"))]
    numbered = (f"{name}{i}" for i in count())
    names = list(islice(numbered, number)) if number else list(takewhile(_is_file, numbered))
    if not names:
        raise ValueError(f"--references {name} is no file, nor are {name}0, {name}1, ...")
    columns = [_lines_of(each, "references") for each in names]
    if odd := [n for n, lines in zip(names, columns, strict=True) if len(lines) != len(columns[0])]:
        raise ValueError(f"--references {odd[0]} has other many lines than {names[0]}")
    return [tuple(filter(str.strip, each)) for each in zip(*columns, strict=True)]


def _is_file(name: str) -> bool:
    return Path(name).expanduser().is_file()


def _lines_of(name: str, option: str) -> list[str]:
    path = Path(name).expanduser()
    try:
        return path.read_text(encoding="utf-8-sig").removesuffix("\n").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--{option} {name} cannot be read: {error}") from error


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


def _prediction(location: str, values: dict[str, Any]) -> Prediction:
    text, references = values.get("prediction"), values.get("references")
    category = values.get("category")
    if not isinstance(text, str) or not isinstance(references, list):
        raise ValueError(f"{location}: a line has 'prediction' (text) and 'references' (a list)")
    if not references or not all(isinstance(r, str) and r.strip() for r in references):
        raise ValueError(f"{location}: 'references' must be one text or more, none empty")
    return Prediction(text, tuple(references), category if isinstance(category, str) else None)
