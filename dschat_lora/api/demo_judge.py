"""Judges of answers: the function of ``dschat-lora eval``, and the toy world's rule of the demo."""

import json
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev

from dschat_lora.addons.evaluation.measure import Judge
from dschat_lora.addons.evaluation.score import score_files
from dschat_lora.algos.seeds import stream_seed
from dschat_lora.assets.toy_world import judge
from dschat_lora.config.bundled import BUNDLED_DATA
from dschat_lora.config.groups import ModelConfig
from dschat_lora.config.stages import ScoreConfig
from dschat_lora.data.chat import make_chat
from dschat_lora.data.encoder import make_encoder
from dschat_lora.data.readers import iter_file
from dschat_lora.data.records import TextRecord, to_records
from dschat_lora.data.rows import parse_row
from dschat_lora.data.samples import SequenceSample
from dschat_lora.data.tokenize import TokenRule, tokenize
from dschat_lora.engine.distributed import device
from dschat_lora.generation.generate import decode
from dschat_lora.generation.sampling import Sampling
from dschat_lora.lora.model import adapters_disabled
from dschat_lora.models.loading import PreTrainedModel, Tokenizer
from dschat_lora.report.terminal import prints_on_stderr
from dschat_lora.rl.response.response import Response
from dschat_lora.rl.score.scores import load_function
from dschat_lora.supervised.generate import Answer
from dschat_lora.supervised.inference import LossMeter, load_policy

MAX_NEW_TOKENS = 48
MAX_SEQ_LEN = 128
BATCH_SIZE = 100
DRAWS = 4  # sampled answers to a prompt


def make_judge(option: str, name: str, tokenizer: Tokenizer, columns: Sequence[str]) -> Judge:
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

    found = {}
    model, tokenizer = load(sft)
    with adapters_disabled(model):
        found["base"] = judge_model(model, tokenizer)
    found["SFT"] = judge_model(model, tokenizer)
    if policy is not None:
        found["PPO"] = judge_model(*load(policy))
    return found


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
    path = directory / "scores.jsonl"
    score_files(
        ScoreConfig(
            model_name_or_path=str(directory),
            data_path=(str(BUNDLED_DATA["test"]),),
            output_path=str(path),
            per_device_eval_batch_size=BATCH_SIZE,
        )
    )
    right: dict[str, list[bool]] = defaultdict(list)
    for row in map(json.loads, path.read_text(encoding="utf-8").splitlines()):
        right[row["flaw"]].append(row["chosen_score"] > row["rejected_score"])
    return {flaw: sum(each) / len(each) for flaw, each in sorted(right.items())}
