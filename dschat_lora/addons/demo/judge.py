"""Judgement of the demo's models: answers by the toy world's rule, and scores of pairs."""

import json
import math
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev

from dschat_lora.algos.seeds import stream_seed
from dschat_lora.assets.toy_world import judge
from dschat_lora.config.bundled import BUNDLED_DATA
from dschat_lora.config.groups import ModelConfig
from dschat_lora.data.chat import make_chat
from dschat_lora.data.encoder import make_encoder
from dschat_lora.data.readers import iter_file
from dschat_lora.data.records import answers_of, to_records
from dschat_lora.data.rows import parse_row
from dschat_lora.data.samples import SequenceSample
from dschat_lora.data.tokenize import TokenRule, tokenize
from dschat_lora.engine.distributed import device
from dschat_lora.generation.generate import decode
from dschat_lora.generation.sampling import Sampling
from dschat_lora.lora.model import adapters_disabled
from dschat_lora.models.loading import PreTrainedModel, Tokenizer
from dschat_lora.supervised.inference import LossMeter, last_record, load_policy
from dschat_lora.supervised.scorer import LoadedRewardModel

MAX_NEW_TOKENS = 48
MAX_SEQ_LEN = 128
BATCH_SIZE = 100
DRAWS = 4  # sampled answers to a prompt


@dataclass(frozen=True)
class Share:
    """A mean over prompts, with its standard error."""

    mean: float
    error: float

    def __str__(self) -> str:
        return f"{self.mean:.3f} +- {self.error:.3f}"


@dataclass(frozen=True)
class Judgement:
    """Results of a model on the test rows."""

    perplexity: float  # of the chosen answers
    greedy: dict[str, Share]  # by criterion of the rule: score, correct, polite, ends
    sampled: dict[str, Share]  # at temperature 1


def evaluate_by_rule(sft: Path, policy: Path | None = None) -> dict[str, Judgement]:
    """Judgements of the base, the base with SFT's adapter, and with that of a later policy.

    ``sft`` is the directory of SFT's run, ``policy`` one with a later adapter.
    """

    def load(directory: Path) -> tuple[PreTrainedModel, Tokenizer]:
        options = ModelConfig(model_name_or_path=str(directory), dtype="fp32")
        policy = load_policy(options)
        return policy.model, policy.tokenizer

    judged = {}
    model, tokenizer = load(sft)
    with adapters_disabled(model):
        judged["base"] = judge_model(model, tokenizer)
    judged["SFT"] = judge_model(model, tokenizer)
    if policy is not None:
        judged["PPO"] = judge_model(*load(policy))
    return judged


def judge_model(model: PreTrainedModel, tokenizer: Tokenizer) -> Judgement:
    """Results of the model on the test rows."""
    return Judgement(
        perplexity=perplexity(model, tokenizer),
        greedy=rule_scores(model, tokenizer, Sampling(MAX_NEW_TOKENS, do_sample=False), draws=1),
        sampled=rule_scores(model, tokenizer, Sampling(MAX_NEW_TOKENS), draws=DRAWS),
    )


def rule_scores(
    model: PreTrainedModel, tokenizer: Tokenizer, sampling: Sampling, *, draws: int
) -> dict[str, Share]:
    """Shares of answers to the test prompts that pass, ``draws`` a prompt, over prompts."""
    rows = BUNDLED_DATA["test"].read_text(encoding="utf-8").splitlines()
    prompts = [json.loads(row)["prompt"] for row in rows]
    eos = int(tokenizer.eos_token_id)
    marks: dict[str, list[float]] = defaultdict(list)
    for first in range(0, len(prompts), BATCH_SIZE):
        batch = prompts[first : first + BATCH_SIZE]
        answers = decode(
            model,
            tokenizer(batch)["input_ids"],
            sampling,
            seeds=[
                [stream_seed("judging", first + n, draw) for draw in range(draws)]
                for n in range(len(batch))
            ],
            eos_ids=[eos],
            pad_id=int(tokenizer.pad_token_id),
            device=device(),
        )
        for prompt, own in zip(batch, answers, strict=True):
            verdicts = [
                judge(prompt, tokenizer.decode(ids, skip_special_tokens=True), ids[-1] == eos)
                for ids in own
            ]
            for name in ("score", "correct", "polite", "ends"):
                marks[name].append(fmean(float(getattr(v, name)) for v in verdicts))
    return {
        name: Share(fmean(values), stdev(values) / math.sqrt(len(values)))
        for name, values in marks.items()
    }


def perplexity(model: PreTrainedModel, tokenizer: Tokenizer) -> float:
    """Perplexity of the chosen answers of the test rows, per token."""
    chat = make_chat(tokenizer)
    rows = map(parse_row, iter_file(BUNDLED_DATA["test"]))
    records = [record for row in rows for record in to_records(row, chat)]
    rule = TokenRule(int(tokenizer.eos_token_id), MAX_SEQ_LEN, "error", False)
    tokenized = tokenize(records, make_encoder(tokenizer), rule)
    samples = [each.sample for each in tokenized if isinstance(each.sample, SequenceSample)]
    meter, total, count = LossMeter(model, tokenizer), 0.0, 0
    for first in range(0, len(samples), BATCH_SIZE):
        for loss, targets in meter.losses(samples[first : first + BATCH_SIZE]):
            total, count = total + loss, count + targets
    return math.exp(total / count)


def accuracy_by_flaw(directory: Path) -> dict[str, float]:
    """Accuracy of a run's reward model on test pairs, by the flaw of the rejected answer."""
    scorer = LoadedRewardModel(
        ModelConfig(model_name_or_path=str(directory)), batch_size=BATCH_SIZE
    )
    chat = make_chat(scorer.tokenizer)
    rows = [*iter_file(BUNDLED_DATA["test"])]
    records = [last_record(parse_row(row), chat, "pairs") for row in rows]
    scores = iter(scorer.scores([each for record in records for each in answers_of(record)]))
    right: dict[str, list[bool]] = defaultdict(list)
    for row, chosen, rejected in zip(rows, scores, scores, strict=True):
        right[row.values["flaw"]].append((chosen or 0.0) > (rejected or 0.0))
    return {flaw: sum(each) / len(each) for flaw, each in sorted(right.items())}
