"""A check before a run that not every prompt is too long, without torch or transformers."""

from collections.abc import Iterator
from pathlib import Path

from dschat_lora.config.data import DataConfig
from dschat_lora.data.readers import iter_file
from dschat_lora.data.rows import (
    SMALL_FILE,
    DataKind,
    ParsedRow,
    RowError,
    config_sources,
    parse_row,
    row_options,
)


def check_some_prompt_fits(config: DataConfig, tokenizer: str, kind: DataKind = "samples") -> None:
    """Refuse data in which every prompt alone has more tokens than a row may take.

    Only what is certain is refused, and soon known: nothing where files are too large to be read at
    start-up, where ``tokenizer`` is no local directory with a ``tokenizer.json``, where a
    conversation has several questions, of which a chat template may leave some out, or where rows
    are cut to fit. The tokenizer is read only if the first prompt is long enough in bytes.

    Raises:
        ValueError: naming the option, its value and the shortest prompt.
    """
    limit, file = config.max_seq_len, Path(tokenizer) / "tokenizer.json"
    if config.overlong not in ("split", "drop") or not file.is_file():
        return
    lengths: list[int] = []
    for text in _prompts(config):
        if text is None or len(text.encode()) <= limit:
            return
        if not lengths:
            from tokenizers import Tokenizer  # a vocabulary takes up to half a second to read

            reader = Tokenizer.from_file(str(file))
            reader.no_padding()  # files may ask for both
            reader.no_truncation()
        lengths.append(len(reader.encode(text, add_special_tokens=False).ids))
        if lengths[-1] <= limit:
            return
    if lengths:
        option = "max_prompt_seq_len" if kind == "prompts" else "max_seq_len"
        cut = ", or use --overlong truncate" if kind == "prompts" else ""
        raise ValueError(
            f"--{option} {limit}: none of the {len(lengths):,} prompts of --data_path fits (the "
            f"shortest has {min(lengths):,} tokens); raise it{cut}"
        )


def _prompts(config: DataConfig) -> Iterator[str | None]:
    """The prompt of each row; None where it is not known as text."""
    options = row_options(config)
    sources = [each for each in config_sources(config) if each.option != "eval_data_path"]
    files = [file for source in sources for file in source.files]
    whole = all(source.files for source in sources)
    if not whole or sum(file.stat().st_size for file in files) > SMALL_FILE:
        yield None
    for file in files:
        for raw in iter_file(file):
            try:
                row = parse_row(raw, options)
            except RowError:
                continue  # one that is skipped, or refused by who reads it
            yield _prompt(row)


def _prompt(row: ParsedRow) -> str | None:
    """The text of the prompt, of a conversation that of its only question."""
    value = row.values.get("messages", row.values.get("prompt"))
    if isinstance(value, list) and all(isinstance(each, dict) for each in value):
        questions = [each.get("content") for each in value if each["role"] == "user"]
        value = questions[0] if len(questions) == 1 else None
    return value if isinstance(value, str) else None
