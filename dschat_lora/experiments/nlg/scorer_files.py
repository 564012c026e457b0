"""Files that the original's scorers read: those of e2e-metrics, and of GenerationEval."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from dschat_lora.checkpoint.staging import write_whole
from dschat_lora.config.groups import require_numbers
from dschat_lora.config.options import option
from dschat_lora.experiments.nlg.config import Filter, Profile
from dschat_lora.experiments.nlg.predictions import Prediction, json_lines, read_predictions
from dschat_lora.report.directory import read_object
from dschat_lora.report.terminal import log_once
from dschat_lora.runtime.checks import check_can_be_made, check_file_can_be_made

_END = "<|endoftext|>"


@dataclass(frozen=True)
class FormatConfig:
    """Write predictions and their references as the original's scorers read them."""

    # names of gpt2_decode.py
    spellings: ClassVar[Mapping[str, str]] = {"sample_file": "predictions", "ref_type": "profile"}

    predictions: str = option(help="JSONL file that decode, or the original's gpt2_beam.py, wrote")
    output_ref_file: str = option(
        help="references: a file for e2e, else a directory of reference0, reference1, ..."
    )
    output_pred_file: str = option(help="written texts, one a line")
    input_file: str | None = option(
        None,
        help="the original's test_formatted.jsonl, whose rows the predictions' `id` counts; they "
        "hold their references themselves when absent",
    )
    vocab: str | None = option(
        None,
        help="directory of GPT-2's encoder.json or vocab.json, for predictions that are token ids "
        "alone",
    )
    profile: Profile = option("e2e", help="e2e: as e2e-metrics; webnlg, dart: as GenerationEval")
    ref_num: int = option(4, help="files of references for webnlg and dart; the first fills gaps")
    tokenize: bool = option(False, help="split at every sign that is no letter or digit")
    lower: bool = option(False, help="write in lower case")
    filter: Filter = option("all", help="of WebNLG: seen or unseen categories, or all")
    dry_run: bool = option(False, help="check options and files, and stop")

    def __post_init__(self) -> None:
        require_numbers(self, ">= 1", "ref_num")


def check_format(config: FormatConfig) -> FormatConfig:
    """The config, if its files can be read and made."""
    texts_of(config)
    check_file_can_be_made(config.output_pred_file, "output_pred_file")
    if config.profile == "e2e":
        check_file_can_be_made(config.output_ref_file, "output_ref_file")
    else:
        check_can_be_made(Path(config.output_ref_file).expanduser(), "output_ref_file")
    return config


def run_format(config: FormatConfig) -> None:
    """Write the files, or with ``--dry_run`` say what would be."""
    predictions = texts_of(config)
    log_once(f"{len(predictions):,} texts with their references, as of {config.profile}")
    if config.dry_run:
        return
    clean = cleaner(tokenize=config.tokenize, lower=config.lower)
    texts = [clean(each.text) for each in predictions]
    references = [[clean(text) for text in each.references] for each in predictions]
    write_whole(Path(config.output_pred_file).expanduser(), _lines(texts))
    path = Path(config.output_ref_file).expanduser()
    if config.profile == "e2e":
        write_whole(path, "".join(_lines(each) + "\n" for each in references))
        return
    path.mkdir(parents=True, exist_ok=True)
    for number in range(config.ref_num):
        column = [each[number] if number < len(each) else each[0] for each in references]
        write_whole(path / f"reference{number}", _lines(column))


def texts_of(config: FormatConfig) -> list[Prediction]:
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
    decode = _decoder(config)
    found = dict[str, str]()
    for location, values in json_lines(config.predictions, "predictions"):
        row = values.get("id")
        if not isinstance(row, int) or not 0 <= row < len(contexts):
            raise ValueError(
                f"{location}: 'id' must be a row of --input_file, in [0, {len(contexts)})"
            )
        found[contexts[row]] = _until_end(decode(location, values))
    if missing := [context for context in references if context not in found]:
        raise ValueError(f"--predictions {config.predictions} lacks a text for {missing[0]!r}")
    if not references:
        raise ValueError(f"--input_file {config.input_file} has no row for {config.filter}")
    return [Prediction(found[c], tuple(texts), None) for c, texts in references.items()]


def cleaner(*, tokenize: bool, lower: bool) -> Callable[[str], str]:
    """What the original makes of a text before it is scored; one line in any case."""

    def clean(text: str) -> str:
        text = text.lower() if lower else text
        if tokenize:
            text = " ".join(re.split(r"(\W)", text))
        return " ".join(text.split() if tokenize else text.splitlines())

    return clean


def _decoder(config: FormatConfig) -> Callable[[str, dict[str, Any]], str]:
    """The text of a line of predictions, by ``--vocab`` where it holds token ids alone."""
    tokens = None if config.vocab is None else _vocabulary(Path(config.vocab).expanduser())

    def decode(location: str, values: dict[str, Any]) -> str:
        text, ids = values.get("prediction"), values.get("predict")
        if isinstance(text, str):
            return text
        if not isinstance(ids, list) or not all(type(token) is int for token in ids):
            raise ValueError(f"{location}: a line has 'predict', a list of token ids")
        if tokens is None:
            raise ValueError(f"{location}: of token ids --vocab, their tokenizer, makes the text")
        if unknown := [token for token in ids if token not in tokens]:
            raise ValueError(f"{location}: --vocab {config.vocab} has no token {unknown[0]}")
        return b"".join(tokens[token] for token in ids).decode("utf-8", errors="replace")

    return decode


def _vocabulary(directory: Path) -> dict[int, bytes]:
    """The bytes of each token of GPT-2's ``encoder.json`` or ``vocab.json``; none without one.

    Printable bytes stand for themselves there, the others in order for characters from 256 on.
    """
    found = (read_object(directory / name) for name in ("encoder.json", "vocab.json"))
    names = next(filter(None, found), {})
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    byte_of = {chr(byte): byte for byte in printable}
    byte_of |= {chr(256 + n): byte for n, byte in enumerate(others)}
    return {
        int(number): b"".join(
            bytes([byte_of[character]]) if character in byte_of else character.encode()
            for character in name
        )
        for name, number in names.items()
    }


def _until_end(text: str) -> str:
    return text.split(_END)[0].split("\n\n")[0].strip()


def _lines(texts: Sequence[str]) -> str:
    return "".join(text + "\n" for text in texts)
