"""The first samples of data, each with the row that it comes from."""

from collections.abc import Iterator
from dataclasses import dataclass

from dschat_lora.algos.sft import IGNORE_INDEX
from dschat_lora.config.data import DataConfig
from dschat_lora.data.encoder import Tokenizer, make_encoder
from dschat_lora.data.prepare import make_chat, token_rule
from dschat_lora.data.readers import RowError, iter_rows
from dschat_lora.data.records import to_records
from dschat_lora.data.rows import (
    DataKind,
    config_sources,
    is_learnt,
    parse_row,
    require_usable,
    row_options,
)
from dschat_lora.data.samples import AnySample, PairSample, Sample, Tokens
from dschat_lora.data.tokenize import tokenize


@dataclass(frozen=True)
class ShownSample:
    """Sequences of one sample: one, or of a pair the chosen and the rejected one."""

    row: str  # "file:line"
    sequences: dict[str, tuple[list[int], list[int]]]  # by name: tokens, and 1 where supervised


def preview(
    config: DataConfig, tokenizer: Tokenizer, *, eos_id: int, kind: DataKind
) -> Iterator[ShownSample]:
    """Samples as they are trained on, in the order of the rows; rows that cannot be used are none.

    Raises:
        ValueError: if a file cannot be read.
    """
    chat, encoder = make_chat(config, tokenizer, eos_id), make_encoder(tokenizer)
    rule, options = token_rule(config, eos_id, kind), row_options(config)
    for source in config_sources(config):
        for raw in iter_rows(source):
            try:
                row = require_usable(parse_row(raw, options), kind, options)
                records = to_records(row, chat, kind)
            except RowError:
                continue
            if not is_learnt(row, kind):
                continue
            for record, result in zip(records, tokenize(records, encoder, rule), strict=True):
                for sample in result.samples:
                    yield ShownSample(record.location, _sequences(sample))


def _sequences(sample: AnySample) -> dict[str, tuple[list[int], list[int]]]:
    if isinstance(sample, Sample):
        supervised = (sample.labels != IGNORE_INDEX).astype(int)
        return {"sample": (sample.input_ids.tolist(), supervised.tolist())}
    if isinstance(sample, PairSample):
        both = {"chosen": sample.chosen, "rejected": sample.rejected}
        return {name: _answer(ids, sample.prompt_length) for name, ids in both.items()}
    return {"prompt": _answer(sample.input_ids, len(sample.input_ids))}


def _answer(ids: Tokens, prompt_length: int) -> tuple[list[int], list[int]]:
    return ids.tolist(), [int(place >= prompt_length) for place in range(len(ids))]
