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

    Only what is certain is refused: nothing where a file is too large to be read at start-up, where
    ``tokenizer`` is no local directory with a ``tokenizer.json``, or where rows are cut to fit. The
    tokenizer is read only if the first prompts are long enough in bytes.

    Raises:
        ValueError: naming the option, its value and the shortest prompt.
    """
    limit, file = config.max_seq_len, Path(tokenizer) / "tokenizer.json"
    if config.overlong not in ("split", "drop") or not file.is_file():
        return
    texts, shortest = [], 0
    for text in _prompts(config):
        if text is None or len(text.encode()) <= limit:
            return
        texts.append(text)
    if texts:
        from tokenizers import Tokenizer  # a vocabulary takes up to half a second to read

        encode = Tokenizer.from_file(str(file)).encode
        for text in texts:
            length = len(encode(text, add_special_tokens=False).ids)
            shortest = min(shortest or length, length)
            if length <= limit:
                return
        option = "max_prompt_seq_len" if kind == "prompts" else "max_seq_len"
        cut = ", or use --overlong truncate" if kind == "prompts" else ""
        raise ValueError(
            f"--{option} {limit}: none of the {len(texts):,} prompts of --data_path fits (the "
            f"shortest has {shortest:,} tokens); raise it{cut}"
        )


def _prompts(config: DataConfig) -> Iterator[str | None]:
    """The text of each row that is in all of its samples; None where that is not known."""
    options = row_options(config)
    for source in config_sources(config):
        if source.option == "eval_data_path":
            continue
        if not source.files:
            yield None
        for file in source.files:
            if file.stat().st_size > SMALL_FILE:
                yield None
            for raw in iter_file(file):
                try:
                    yield _prompt(parse_row(raw, options))
                except RowError:
                    continue  # one that is skipped, or refused by who reads it


def _prompt(row: ParsedRow) -> str | None:
    """What is asked first, without what a chat template adds."""
    value = row.values.get("messages", row.values.get("prompt"))
    if isinstance(value, str):
        return value
    texts = []
    for each in value if isinstance(value, list) else ():
        if not isinstance(each, dict):  # token ids
            return None
        if each["role"] == "assistant" or not isinstance(each.get("content"), str):
            break
        texts.append(each["content"])
    return "\n".join(texts) or None
