"""Judges of answers: a reward model, or a function of the user."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from dschat_lora.config.verbs import ReadingConfig
from dschat_lora.data.chat import Span
from dschat_lora.data.encoder import Tokenizer
from dschat_lora.data.records import TextRecord
from dschat_lora.report.terminal import prints_on_stderr
from dschat_lora.rl.response.response import Response
from dschat_lora.rl.score.scores import load_function
from dschat_lora.supervised.generate import Answer
from dschat_lora.supervised.scorer import LoadedRewardModel

# Scores of answers to the prompts of records, None for one that is not to count.
Judge = Callable[[Sequence[tuple[TextRecord, Answer]]], Sequence[float | None]]


def function_judge(option: str, name: str, tokenizer: Tokenizer, columns: Sequence[str]) -> Judge:
    """The function that ``option`` names, for data with these columns.

    Raises:
        ValueError: if it cannot be used.
    """
    function = load_function(option, name, tokenizer)
    function.check_columns(columns)

    def scores_of(answers: Sequence[tuple[TextRecord, Answer]]) -> list[float | None]:
        responses = [
            Response(
                tuple(answer.prompt),
                tuple(answer.tokens),
                answer.ended,
                number,
                record.columns.encode(),
            )
            for number, (record, answer) in enumerate(answers)
        ]
        with prints_on_stderr():  # the standard output has nothing but what the verb says
            scores = function.own_scores(responses)
        return [None if math.isnan(each) else each for each in scores]

    return scores_of


def scorer_of(config: ReadingConfig, reward_model: str, verb: object = None) -> LoadedRewardModel:
    """The reward model, loaded as the model that is read; see :class:`LoadedRewardModel`."""
    model = replace(config.model, model_name_or_path=reward_model)
    size = config.per_device_eval_batch_size
    return LoadedRewardModel(model, batch_size=size, max_seq_len=config.max_seq_len, verb=verb)


def model_judge(config: ReadingConfig, reward_model: str) -> Judge:
    """The reward model as a judge; answers that are too long for it do not count."""
    scorer = scorer_of(config, reward_model)
    return lambda answers: scorer.scores(
        [
            record._replace(spans=(*record.context, Span(answer.text, target=True)))
            for record, answer in answers
        ]
    )
