"""Scores of given answers by a reward model, one line for each row of data."""

import json
from collections.abc import Iterator, Sequence
from typing import Any

from dschat_lora.addons.evaluation.config import ScoreConfig
from dschat_lora.data.chat import make_chat
from dschat_lora.data.records import TextRecord, answers_of
from dschat_lora.report.log import jsonable
from dschat_lora.report.terminal import note
from dschat_lora.supervised.inference import last_record, output_file, read_rows
from dschat_lora.supervised.scorer import LoadedRewardModel

ROWS_AT_A_TIME = 4096  # held in memory, sorted by length


def score_files(config: ScoreConfig) -> None:
    """Write each row with its score, or those of its two answers, and sum up for a person.

    Raises:
        ValueError: for a model without head, or a row that has no answer.
        OSError: if the output cannot be written.
    """
    scorer = LoadedRewardModel(
        config.model,
        batch_size=config.per_device_eval_batch_size,
        max_seq_len=config.max_seq_len,
        verb=config,
    )
    count = too_long = pairs = 0
    right = 0.0
    with output_file(config.output_path) as file:
        for rows, records in _chunks(config, scorer):
            values = iter(scorer.scores([each for own in records for each in own]))
            for row, own in zip(rows, records, strict=True):
                scores = [next(values) for _ in own]
                line = _described(row, scores)
                # Columns that are no JSON, such as the dates of a parquet file, as text.
                file.write(json.dumps(jsonable(line), ensure_ascii=False, default=str) + "\n")
                count += 1
                too_long += None in scores
                if len(scores) == 2 and None not in scores:
                    chosen, rejected = (float(score or 0.0) for score in scores)
                    pairs += 1
                    right += float(chosen > rejected) + 0.5 * float(chosen == rejected)
    if pairs:
        note(f"accuracy {right / pairs:.1%} over {pairs:,} pairs")
    if too_long:
        limit = scorer.max_seq_len
        note(f"{too_long:,} rows are longer than {limit:,} tokens: their score is null")
    where = f" to {config.output_path}" if config.output_path else ""
    note(f"{count:,} rows scored{where}")


def _described(row: dict[str, Any], scores: Sequence[float | None]) -> dict[str, Any]:
    if len(scores) == 1:
        return {**row, "score": scores[0]}
    chosen, rejected = scores
    return {**row, "chosen_score": chosen, "rejected_score": rejected}


def _chunks(
    config: ScoreConfig, scorer: LoadedRewardModel
) -> Iterator[tuple[list[dict[str, Any]], list[tuple[TextRecord, ...]]]]:
    """Rows as read, and for each the one or two answers to score."""
    chat = make_chat(scorer.tokenizer, config.loading.chat_template_kwargs)
    rows: list[dict[str, Any]] = []
    records: list[tuple[TextRecord, ...]] = []
    for values, row in read_rows(config, kind="samples", media=scorer.media):
        rows.append(values)
        records.append(answers_of(last_record(row, chat, "pairs")))
        if len(rows) == ROWS_AT_A_TIME:
            yield rows, records
            rows, records = [], []
    if rows:
        yield rows, records
