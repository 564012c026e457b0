"""The first samples of data, each with the row that it comes from."""

from collections.abc import Iterator
from dataclasses import dataclass

from dschat_lora.algos.sft import IGNORE_INDEX
from dschat_lora.config.data import DataConfig
from dschat_lora.data.chat import make_chat
from dschat_lora.data.encoder import Tokenizer, make_encoder
from dschat_lora.data.prepare import token_rule
from dschat_lora.data.readers import iter_rows
from dschat_lora.data.row_reader import RowCounts, RowReader
from dschat_lora.data.rows import DataKind, config_sources, row_options
from dschat_lora.data.samples import AnySample, PairSample, Sample, Tokens, UnpairedSample
from dschat_lora.data.tokenize import tokenize
from dschat_lora.data.unpaired import answers_of_row


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
    chat = make_chat(tokenizer, config.chat_template_kwargs, eos_id=eos_id)
    reader = RowReader(row_options(config), chat, kind, skips=True)
    rule, encoder = token_rule(config, eos_id, kind), make_encoder(tokenizer)
    for source in config_sources(config):
        for raw in iter_rows(source):
            records, _ = reader.records(raw, RowCounts())
            if kind == "unpaired":
                # Its own answer stands for that to another prompt, which is not shown.
                answers = answers_of_row(records)
                records = tuple(each._replace(mismatched=each.completion) for each in answers)
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
    if isinstance(sample, UnpairedSample):
        name = "good answer" if sample.label else "bad answer"
        return {name: _answer(sample.input_ids, sample.prompt_length)}
    return {"prompt": _answer(sample.input_ids, len(sample.input_ids))}


def _answer(ids: Tokens, prompt_length: int) -> tuple[list[int], list[int]]:
    return ids.tolist(), [int(place >= prompt_length) for place in range(len(ids))]
