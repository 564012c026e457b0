"""Scores of given answers by a reward model, one line for each row of data."""

import json

from dschat_lora.addons.evaluation.config import ScoreConfig
from dschat_lora.addons.evaluation.measure import chunks
from dschat_lora.config.plurals import counted
from dschat_lora.data.chat import make_chat
from dschat_lora.data.records import answers_of
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
    chat = make_chat(scorer.tokenizer, config.loading.chat_template_kwargs)
    read = read_rows(config, kind="samples", media=scorer.media)
    answered = ((row, answers_of(last_record(parsed, chat, "pairs"))) for row, parsed in read)
    with output_file(config.output_path) as file:
        for chunk in chunks(answered, ROWS_AT_A_TIME):
            values = iter(scorer.scores([each for _, own in chunk for each in own]))
            for row, own in chunk:
                scores = [next(values) for _ in own]
                names = ("score",) if len(own) == 1 else ("chosen_score", "rejected_score")
                line = row | dict(zip(names, scores, strict=True))
                # Columns that are no JSON, such as the dates of a parquet file, as text.
                file.write(json.dumps(jsonable(line), ensure_ascii=False, default=str) + "\n")
                count += 1
                too_long += None in scores
                if len(scores) == 2 and None not in scores:
                    chosen, rejected = (float(score or 0.0) for score in scores)
                    pairs += 1
                    right += float(chosen > rejected) + 0.5 * float(chosen == rejected)
    if pairs:
        note(f"accuracy {right / pairs:.1%} over {counted(pairs, 'pair')}")
    if too_long:
        limit = scorer.max_seq_len
        note(f"no score (null) for {counted(too_long, 'row')} of more than {limit:,} tokens")
    where = f" to {config.output_path}" if config.output_path else ""
    note(f"{counted(count, 'row')} scored{where}")
