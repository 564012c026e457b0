"""Rows to train on, of answers of one's own model that a reward chooses."""

import json
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from dschat_lora.addons.evaluation.judge import Judge, function_judge, model_judge
from dschat_lora.addons.evaluation.options import KeepOptions
from dschat_lora.config.data import parse_columns
from dschat_lora.config.plurals import counted
from dschat_lora.config.verbs import GenerateConfig
from dschat_lora.data.chat import Span
from dschat_lora.data.layouts import message
from dschat_lora.data.readers import RawRow
from dschat_lora.data.records import TextRecord
from dschat_lora.data.rows import RowOptions, parse_row
from dschat_lora.report.log import jsonable
from dschat_lora.report.terminal import note
from dschat_lora.supervised.generate import Answer, answer_prompts, room_for_prompts
from dschat_lora.supervised.inference import load_policy, output_file, read_rows


class ScoredAnswer(NamedTuple):
    """An answer with its score by a reward."""

    text: str
    score: float
    ended: bool  # by an end token, and not by the limit


def choose_answers(
    answers: Sequence[ScoredAnswer], keep: str, min_reward: float = -math.inf
) -> list[tuple[ScoredAnswer, ...]]:
    """The answers of each row to write; of a pair the chosen and the rejected one.

    ``best`` is best-of-n sampling and ``all`` with ``min_reward`` rejection sampling (both in
    arXiv:2307.09288, section 3.2.3); ``pair`` is the best and the worst answer. The first of equal
    scores or texts counts, of texts the first that has ended. There is no best one where all scores
    are equal. What is to be learnt has ended by itself, as training adds the end; what is rejected
    need not.

    Args:
        answers: all of one prompt, in the order of their draws.
        keep: "best", "pair" or "all".
        min_reward: lowest score of what is to be learnt.
    """
    distinct: dict[str, ScoredAnswer] = {}
    for each in answers:
        known = distinct.setdefault(each.text, each)
        if each.ended and not known.ended:
            distinct[each.text] = each
    good = [each for each in distinct.values() if each.ended and each.score >= min_reward]
    if keep == "all" or not good:
        return [(each,) for each in good]
    best = max(good, key=lambda each: each.score)
    worst = min(distinct.values(), key=lambda each: each.score)
    if best.score == worst.score:
        return []
    return [(best,) if keep == "best" else (best, worst)]


def write_kept_answers(config: GenerateConfig, options: KeepOptions) -> None:
    """Write rows of the answers that ``--keep`` chooses, none twice.

    Raises:
        ValueError: as of :func:`generate_answers`, and for a reward that cannot be used.
        OSError: if the output cannot be written.
    """
    assert options.keep is not None
    policy = load_policy(config.model)
    room = room_for_prompts(policy, config.max_new_tokens, config.max_seq_len)
    if name := options.reward_function:
        columns, _ = next(read_rows(config, kind=None, limit=1), ({}, None))
        judge = function_judge("reward_function", name, policy.tokenizer, [*columns])
    else:
        judge = model_judge(config, str(options.reward_model))
    lowest = -math.inf if options.min_reward is None else options.min_reward
    seen: set[bytes] = set()
    count = too_long = unkept = repeated = 0
    with output_file(config.output_path) as file:
        for answered in answer_prompts(config, policy, room):
            of_prompts = _scores_of_draws(judge, answered)
            for (record, answers), scores in zip(answered, of_prompts, strict=True):
                scored = [
                    ScoredAnswer(answer.text, score, answer.ended)
                    for answer, score in zip(answers or (), scores, strict=True)
                    if score is not None
                ]
                kept = choose_answers(scored, options.keep, lowest)
                for own in kept:
                    spans = (*record.context, Span(own[0].text, target=True))
                    rejected = own[1].text if len(own) == 2 else None
                    pair = record._replace(spans=spans, rejected=rejected)
                    if (digest := pair.digest("pairs")) in seen:
                        repeated += 1
                        continue
                    seen.add(digest)
                    row = _row(config, count, record, own)
                    row |= {
                        "model": config.model_name_or_path,
                        "reward": options.reward_model or options.reward_function,
                        "seed": config.seed,
                        "scores": scores,
                    }
                    file.write(json.dumps(jsonable(row), ensure_ascii=False) + "\n")
                count, too_long = count + 1, too_long + (answers is None)
                unkept += answers is not None and not kept
            file.flush()
    if too_long:
        note(f"no answer to {counted(too_long, 'prompt')} of more than {room:,} tokens")
    if unkept:
        wanted = ["ended by itself"]
        wanted += [] if options.min_reward is None else [f"scored {lowest:g}"]
        wanted += [] if options.keep == "all" else ["was better than another"]
        note(f"no row for {counted(unkept, 'prompt')}: no answer {' and '.join(wanted)}")
    if repeated:
        note(f"left out {counted(repeated, 'duplicate row')}")
    where = f" to {config.output_path}" if config.output_path else ""
    note(f"{counted(len(seen), 'row')} of {counted(count, 'prompt')} written{where}")


def _scores_of_draws(
    judge: Judge, answered: Sequence[tuple[TextRecord, list[Answer] | None]]
) -> list[list[float | None]]:
    """Scores of the answers to each prompt; None too for empty ones, which readers refuse."""
    shown = [
        (record, answer)
        for record, answers in answered
        for answer in answers or ()
        if not answer.undrawn and answer.text.strip()
    ]
    scores = judge(shown) if shown else ()
    by_answer = {id(answer): score for (_, answer), score in zip(shown, scores, strict=True)}
    return [[by_answer.get(id(answer)) for answer in answers or ()] for _, answers in answered]


def _row(
    config: GenerateConfig, number: int, record: TextRecord, own: Sequence[ScoredAnswer]
) -> dict[str, Any]:
    """A row with the prompt in its own form, text or messages, and the answers with scores."""
    if number < len(config.prompts):
        text = config.prompts[number]
        values: dict[str, Any] = {"prompt": [message("user", text)] if config.chat else text}
    else:
        options = RowOptions(parse_columns(config.columns), unpaired="all")
        row = parse_row(RawRow(record.location, json.loads(record.columns)), options)
        values = {} if row.is_encoded else row.values
    prompt = values.get("prompt", [])
    answered = next((values[n] for n in ("messages", "completion", "chosen") if n in values), None)
    if isinstance(prompt, list) and isinstance(answered, list):
        messages = [*prompt, *answered]
        last = max(n for n, each in enumerate(messages) if each["role"] == "assistant")
        prompt = messages[:last]
    prompt = prompt or record.prompt
    names = ("completion",) if len(own) == 1 else ("chosen", "rejected")
    answers = [
        each.text if isinstance(prompt, str) else [message("assistant", each.text)] for each in own
    ]
    labels = ("score",) if len(own) == 1 else ("chosen_score", "rejected_score")
    return {
        "prompt": prompt,
        **dict(zip(names, answers, strict=True)),
        **{name: values[name] for name in ("tools", "chat_template_kwargs") if name in values},
        **dict(zip(labels, (each.score for each in own), strict=True)),
    }
