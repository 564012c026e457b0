"""Measures of a trained model on rows of data: perplexity, preferences, rewards."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from statistics import fmean, stdev
from typing import TypeVar

from dschat_lora.addons.evaluation.config import EvalConfig
from dschat_lora.addons.evaluation.judge import Judge, function_judge, model_judge, scorer_of
from dschat_lora.data.chat import make_chat
from dschat_lora.data.encoder import make_encoder
from dschat_lora.data.records import TextRecord, answers_of
from dschat_lora.data.samples import SequenceSample
from dschat_lora.data.tokenize import TokenRule, tokenize
from dschat_lora.generation.sampling import Sampling, undrawn_reason
from dschat_lora.report.log import jsonable
from dschat_lora.report.terminal import log_once, print_json
from dschat_lora.supervised.generate import (
    AnswerGenerator,
    prompt_ids,
    room_for_prompts,
    row_prompts,
)
from dschat_lora.supervised.inference import (
    LoadedPolicy,
    LossMeter,
    check_measured,
    last_record,
    load_policy,
    read_rows,
)
from dschat_lora.supervised.objectives import describe_perplexity

ROWS_AT_A_TIME = 1024
T = TypeVar("T")


@dataclass
class Pairs:
    """Comparison of the chosen with the rejected answer of pairs, by one number for each."""

    chosen: list[float] = field(default_factory=list)
    rejected: list[float] = field(default_factory=list)

    def summary(self, name: str) -> dict[str, float]:
        """Accuracy, ties counting half, the mean margin, and both means under ``name``."""
        if not self.chosen:
            return {}
        both = list(zip(self.chosen, self.rejected, strict=True))
        return {
            "pairs": len(both),
            "accuracy": fmean((c > r) + 0.5 * (c == r) for c, r in both),
            "margin": fmean(c - r for c, r in both),
            f"chosen_{name}": fmean(self.chosen),
            f"rejected_{name}": fmean(self.rejected),
        }


def evaluate_model(config: EvalConfig, *, scores: bool) -> dict[str, float]:
    """The measures; ``scores`` says whether the model is a reward model.

    Raises:
        ValueError: if rows have no answer, or none fits the model.
    """
    if config.tasks:
        from dschat_lora.addons.evaluation.harness import measure_tasks

        return measure_tasks(config)
    return score_rows(config) if scores else measure_policy(config)


def show_measures(measures: Mapping[str, float], *, as_json: bool) -> None:
    """Print the measures."""
    if as_json:
        print_json(jsonable(measures))
        return
    # Names of tasks have a space and stay as they are.
    named = {n if " " in n else n.replace("_", " "): value for n, value in measures.items()}
    width = max([22, *map(len, named)])
    for name, value in named.items():
        text = f"{value:,}" if isinstance(value, int) else f"{value:.6g}"
        log_once(f"{name:<{width}}  {text}")


def score_rows(config: EvalConfig) -> dict[str, float]:
    """Means of a reward model's scores, and how often it prefers the chosen answer."""
    scorer = scorer_of(config, config.model_name_or_path, config)
    chat = make_chat(scorer.tokenizer, config.loading.chat_template_kwargs)
    pairs, single, count, too_long = Pairs(), list[float](), 0, 0
    rows = read_rows(config, kind="samples", limit=config.limit, media=scorer.media)
    for chunk in chunks((answers_of(last_record(row, chat, "pairs")) for _, row in rows)):
        values = iter(scorer.scores([each for own in chunk for each in own]))
        for own in chunk:
            scores = [next(values) for _ in own]
            known = [score for score in scores if score is not None]
            count, too_long = count + 1, too_long + (len(known) < len(scores))
            if len(known) == 2:
                pairs.chosen.append(known[0])
                pairs.rejected.append(known[1])
            elif len(scores) == 1:
                single += known
    measures: dict[str, float] = {"rows": count, "too_long": too_long}
    if single:
        measures |= {"answers": len(single), "score": fmean(single)}
    return measures | pairs.summary("score")


def measure_policy(config: EvalConfig) -> dict[str, float]:
    """Perplexity of the answers, preferences by log-probability, scores of own answers.

    Of prompts alone, whose own answers are scored, there is no perplexity.
    """
    policy = load_policy(config.model, config)
    values, row = next(read_rows(config, kind=None, limit=1, media=policy.media))
    judge = None
    if name := config.judge_function:
        judge = function_judge("judge_function", name, policy.tokenizer, [*values])
    scored = own_scores(config, policy, judge)
    if row.kind == "prompt" and (config.reward_model is not None or judge is not None):
        if not scored:
            raise ValueError(
                "no answer was scored: the rows are too long, or the judge returned None"
            )
        return scored
    return measure_answers(config, policy) | scored


def measure_answers(config: EvalConfig, policy: LoadedPolicy) -> dict[str, float]:
    """Perplexity of the answers, and preferences by log-probability."""
    chat = make_chat(policy.tokenizer, config.loading.chat_template_kwargs)
    limit = min(each for each in (policy.positions, config.max_seq_len, 2**31) if each)
    meter, pairs = LossMeter(policy.model, policy.tokenizer), Pairs()
    size = config.per_device_eval_batch_size
    losses_of = partial(sample_losses, policy=policy, meter=meter, limit=limit, batch_size=size)
    loss, tokens, rows, too_long = 0.0, 0, 0, 0
    read = read_rows(config, kind="samples", limit=config.limit, media=policy.media)
    for chunk in chunks(last_record(row, chat, "samples") for _, row in read):
        firsts = losses_of(chunk)
        paired = [i for i, record in enumerate(chunk) if record.rejected is not None]
        others = losses_of([answers_of(chunk[i])[1] for i in paired])
        seconds = dict(zip(paired, others, strict=True))
        for i, first in enumerate(firsts):
            second = seconds.get(i)
            rows, too_long = rows + 1, too_long + (first is None)
            if first is not None:
                loss, tokens = loss + first[0], tokens + first[1]
            if first is not None and second is not None:
                pairs.chosen.append(-first[0])
                pairs.rejected.append(-second[0])
    if not tokens:
        data = " ".join(config.data_path)
        raise ValueError(f"--data_path {data} has no row with an answer within {limit} tokens")
    measures: dict[str, float] = {"rows": rows, "too_long": too_long, "tokens": tokens}
    measures |= {"loss": loss / tokens, **describe_perplexity(loss / tokens, {})}
    return measures | pairs.summary("logprob")


def sample_losses(
    records: Sequence[TextRecord],
    *,
    policy: LoadedPolicy,
    meter: LossMeter,
    limit: int,
    batch_size: int,
) -> list[tuple[float, int] | None]:
    """Loss in nats and supervised tokens of each record; None for those that are too long.

    Raises:
        ValueError: naming a row whose loss is not finite.
    """
    rule = TokenRule(int(policy.tokenizer.eos_token_id), limit, "drop", False)
    tokenized = tokenize(records, make_encoder(policy.tokenizer), rule)
    samples = {i: t.sample for i, t in enumerate(tokenized) if isinstance(t.sample, SequenceSample)}
    losses: list[tuple[float, int] | None] = [None] * len(records)
    order = sorted(samples, key=lambda i: len(samples[i].input_ids))
    for first in range(0, len(order), batch_size):
        chunk = order[first : first + batch_size]
        for i, loss in zip(chunk, meter.losses([samples[i] for i in chunk]), strict=True):
            losses[i] = loss
    check_measured(records, [each and each[0] for each in losses], "the loss")
    return losses


def own_scores(config: EvalConfig, policy: LoadedPolicy, judge: Judge | None) -> dict[str, float]:
    """Scores of the model's own greedy answers by reward model and judge; empty without either."""
    if config.reward_model is None and judge is None:
        return {}
    scorer = None if config.reward_model is None else model_judge(config, config.reward_model)
    chat = make_chat(policy.tokenizer, config.loading.chat_template_kwargs)
    room = room_for_prompts(policy, config.max_new_tokens, config.max_seq_len)
    generate = AnswerGenerator(
        policy,
        Sampling(config.max_new_tokens, do_sample=False),
        batch_size=config.per_device_eval_batch_size,
    )
    rewards, judged, ended = list[float](), list[float](), list[bool]()
    for chunk in chunks(row_prompts(config, chat, limit=config.limit)):
        ids = prompt_ids(chunk, policy, room)
        kept = [(record, each) for record, each in zip(chunk, ids, strict=True) if each is not None]
        answers = generate([prompt for _, prompt in kept], seeds=[[0]] * len(kept))
        if any(own.undrawn for (own,) in answers):
            raise ValueError(f"the model's answers cannot be scored: {undrawn_reason(())}")
        shown = [(record, own[0]) for (record, _), own in zip(kept, answers, strict=True)]
        if scorer is not None:
            rewards += [score for score in scorer(shown) if score is not None]
        if judge is not None:
            judged += [score for score in judge(shown) if score is not None]
        ended += [own[0].ended for own in answers]
    if not rewards and not judged:
        return {}
    measures = {"answers": len(rewards or judged), **mean_and_error("reward", rewards)}
    return measures | mean_and_error("judge", judged) | {"eos_rate": fmean(ended)}


def mean_and_error(name: str, scores: Sequence[float]) -> dict[str, float]:
    """The mean and, of two or more, its standard error: the sample deviation over sqrt(n)."""
    if not scores:
        return {}
    measures = {name: fmean(scores)}
    if len(scores) > 1:
        measures[f"{name}_standard_error"] = stdev(scores) / math.sqrt(len(scores))
    return measures


def chunks(items: Iterator[T], size: int = ROWS_AT_A_TIME) -> Iterator[list[T]]:
    """Lists of ``size`` items, the last perhaps shorter."""
    while chunk := list(islice(items, size)):
        yield chunk
