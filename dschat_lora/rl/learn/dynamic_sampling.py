"""DAPO's dynamic sampling: prompts whose responses teach nothing are replaced."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import NamedTuple

from torch import Tensor

from dschat_lora.data.samples import PromptSample
from dschat_lora.rl.learn.experience import idle_groups
from dschat_lora.rl.options.algorithms import Algorithm
from dschat_lora.rl.response.response import Response
from dschat_lora.rl.score.scores import Scores


class Resampled(NamedTuple):
    """An iteration's responses after :func:`resample`, with their scores."""

    responses: list[Response]
    scores: Scores
    metrics: dict[str, float]  # for the log


def resample(
    responses: list[Response],
    *,
    algorithm: Algorithm,
    further: Iterator[PromptSample],
    tries: int,
    generate: Callable[[Sequence[PromptSample], int], list[Response]],
    score: Callable[[Sequence[Response]], Scores],
) -> Resampled:
    """Replace groups that teach the algorithm nothing by those of further prompts that do.

    Section 3.2 of arXiv:2503.14476. Each round asks as many ``further`` prompts as groups are to be
    replaced; what is left after ``tries`` of them, or when no prompt is, stays. ``responses`` are
    group after group, all of one size; ``generate`` takes prompts and the round, counted from 1.
    Call on every rank.
    """
    size = sum(each.group == 0 for each in responses)
    scores = score(responses)

    def idle(drawn: Sequence[Response], of: Scores) -> list[int]:
        groups = [each.group for each in drawn]
        return idle_groups(algorithm, groups, of.total, of.by_name, of.weights)

    missing, responses = idle(responses, scores), list(responses)
    round_ = replaced = generated = 0
    while round_ < tries and (asked := list(islice(further, len(missing)))):
        round_ += 1
        further_ones = generate(asked, round_)
        their_scores = score(further_ones)
        generated += len(further_ones)
        equal = set(idle(further_ones, their_scores))
        for group in (g for g in range(len(asked)) if g not in equal):
            place = missing.pop(0)
            to = slice(place * size, (place + 1) * size)
            of = slice(group * size, (group + 1) * size)
            responses[to] = [replace(each, group=place) for each in further_ones[of]]
            scores = _put(scores, to, their_scores, of)
            replaced += 1
    counts = {"resampling_tries": round_, "resampled_prompts": replaced}
    return Resampled(responses, scores, {**counts, "resampled_responses": generated})


def _put(scores: Scores, to: slice, others: Scores, of: slice) -> Scores:
    """``scores`` with those ``others`` in place."""

    def put(own: Tensor, other: Tensor) -> Tensor:
        own = own.clone()
        own[to] = other[of]
        return own

    names, size = scores.by_name, len(scores.total)
    columns = {}
    for name in {**scores.columns, **others.columns}:
        columns[name] = list(scores.columns.get(name, [None] * size))
        columns[name][to] = others.columns.get(name, [None] * len(others.total))[of]
    return replace(
        scores,
        total=put(scores.total, others.total),
        by_name={name: put(names[name], others.by_name[name]) for name in names},
        columns=columns,
    )
