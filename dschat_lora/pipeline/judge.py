"""The judge of ``dschat-lora eval``: a reward function of step 3 on a model's own answers."""

import math
from collections.abc import Sequence

from dschat_lora.models.loading import Tokenizer
from dschat_lora.report.terminal import prints_on_stderr
from dschat_lora.rl.batch import Response
from dschat_lora.rl.rewards import load_function
from dschat_lora.supervised.measure import Judge, OwnAnswer


def make_judge(name: str, tokenizer: Tokenizer, columns: Sequence[str]) -> Judge:
    """The function of ``--judge_function``, for data with these columns.

    Raises:
        ValueError: if it cannot be used.
    """
    function = load_function("judge_function", name, tokenizer)
    function.check_columns(columns)

    def judge(answers: Sequence[OwnAnswer]) -> list[float | None]:
        responses = [
            Response(each.prompt, each.tokens, each.ended, number, each.columns)
            for number, each in enumerate(answers)
        ]
        with prints_on_stderr():  # the standard output has nothing but the measures
            scores = function.own_scores(responses)
        return [None if math.isnan(each) else each for each in scores]

    return judge
