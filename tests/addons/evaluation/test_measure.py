"""dschat-lora eval, against a slow loop and PEFT."""

import json
import math

import peft
import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from dschat_lora.assets import BUNDLED_MODEL
from helpers.step1 import write_jsonl
from helpers.trained import NEW_TOKENS, PAIRS, PROMPTS, greedy, home, stock_policy, verb

__all__ = ["home", "verb"]


@pytest.fixture(scope="module")
def stock(home):
    return stock_policy(home)


@torch.no_grad()
def slow_logprob(model, tokenizer, prompt, answer):
    """Sum of log-probabilities of the answer and its end, and their number, one token a time."""
    ids = tokenizer(prompt + answer)["input_ids"] + [tokenizer.eos_token_id]
    start = len(tokenizer(prompt)["input_ids"])
    logits = model(input_ids=torch.tensor([ids])).logits[0].double()
    total = 0.0
    for place in range(start, len(ids)):
        row = logits[place - 1]
        total += float(row[ids[place]] - row.logsumexp(-1))
    return total, len(ids) - start


@pytest.mark.smoke
def test_eval_of_a_language_model_is_that_of_a_slow_loop(verb, stock):
    found = json.loads(verb("eval", "sft", "pairs.jsonl", "--json"))
    chosen = [slow_logprob(*stock, row["prompt"], row["chosen"]) for row in PAIRS]
    rejected = [slow_logprob(*stock, row["prompt"], row["rejected"]) for row in PAIRS]
    total, tokens = (sum(each) for each in zip(*chosen, strict=True))
    wins = [c[0] > r[0] for c, r in zip(chosen, rejected, strict=True)]
    assert 0 < sum(wins) < 3  # the measure tells something
    assert found["tokens"] == tokens
    assert found["perplexity"] == pytest.approx(math.exp(-total / tokens), rel=1e-4)
    assert found["accuracy"] == pytest.approx(sum(wins) / 3)
    assert found["chosen_logprob"] == pytest.approx(total / 3, rel=1e-4)
    margins = [c[0] - r[0] for c, r in zip(chosen, rejected, strict=True)]
    assert found["margin"] == pytest.approx(sum(margins) / 3, rel=1e-3)


@pytest.fixture(scope="module")
def judge(home):
    """Scores of texts by the run ``reward`` in PEFT, one at a time."""
    base = AutoModelForSequenceClassification.from_pretrained(BUNDLED_MODEL, num_labels=1)
    model = peft.PeftModel.from_pretrained(base, home / "reward" / "adapter").eval()
    tokenizer = AutoTokenizer.from_pretrained(home / "reward" / "adapter")

    @torch.no_grad()
    def score(text):
        ids = tokenizer(text)["input_ids"] + [tokenizer.eos_token_id]
        return float(model(input_ids=torch.tensor([ids])).logits[0, 0])

    return score


JUDGE = """
def length(prompts, responses, answer):
    return [len(text) + len(number) for text, number in zip(responses, answer)]

def some(response, answer):
    return None if answer == "4" else float(answer)

def text(responses):
    return ["good"] * len(responses)
"""


@pytest.fixture
def sums(home):
    """Prompts alone, each with a column that a judge reads."""
    (home / "judges.py").write_text(JUDGE)
    rows = [{"prompt": prompt, "answer": n} for prompt, n in zip(PROMPTS, "475", strict=False)]
    write_jsonl(home / "sums.jsonl", rows)
    return rows


def test_judge_scores_the_models_own_answers_with_mean_and_standard_error(verb, stock, sums):
    options = ["--judge_function", "judges:length", "--max_new_tokens", NEW_TOKENS, "--json"]
    found = json.loads(verb("eval", "sft", "sums.jsonl", *options))
    model, tokenizer = stock
    answers = [greedy(model, tokenizer, row["prompt"]) for row in sums]
    scores = [len(tokenizer.decode(ids, skip_special_tokens=True)) + 1 for ids in answers]
    mean = sum(scores) / len(scores)
    spread = sum((each - mean) ** 2 for each in scores) / (len(scores) - 1)
    assert found["judge"] == pytest.approx(mean)
    assert found["judge_standard_error"] == pytest.approx((spread / len(scores)) ** 0.5)
    assert found["answers"] == len(scores)
    assert "perplexity" not in found


def test_answer_that_the_judge_leaves_out_does_not_count(verb, sums):
    options = ["--judge_function", "judges:some", "--max_new_tokens", 2, "--json"]
    found = json.loads(verb("eval", "sft", "sums.jsonl", *options))
    scores = [float(row["answer"]) for row in sums if row["answer"] != "4"]
    assert found["answers"] == len(scores)
    assert found["judge"] == pytest.approx(sum(scores) / len(scores))


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ("sft sums.jsonl --judge_function judges:none", "judges has no function none"),
        ("reward pairs.jsonl --judge_function judges:length", "is a reward model"),
        ("sft pairs.jsonl --judge_function judges:length", "judges:length requires answer"),
        ("sft sums.jsonl --judge_function judges:text", "returned 'good' for the prompt"),
    ],
)
def test_judge_that_cannot_be_used_is_named(verb, sums, argv, words):
    assert words in verb.refused("eval", *argv.split(), "--max_new_tokens", 2)


def test_eval_of_a_reward_model_is_that_of_peft(verb, judge):
    found = json.loads(verb("eval", "reward", "pairs.jsonl", "--json"))
    chosen = [judge(row["prompt"] + row["chosen"]) for row in PAIRS]
    rejected = [judge(row["prompt"] + row["rejected"]) for row in PAIRS]
    assert found["chosen_score"] == pytest.approx(sum(chosen) / 3, abs=1e-4)
    assert found["rejected_score"] == pytest.approx(sum(rejected) / 3, abs=1e-4)
    wins = [c > r for c, r in zip(chosen, rejected, strict=True)]
    assert found["accuracy"] == pytest.approx(sum(wins) / 3)


@pytest.mark.smoke
def test_eval_scores_the_models_own_answers(verb, stock, judge):
    found = json.loads(
        verb(
            *("eval", "sft", "pairs.jsonl", "--reward_model", "reward", "--json"),
            *("--max_new_tokens", NEW_TOKENS),
        )
    )
    answers = [stock[1].decode(greedy(*stock, p), skip_special_tokens=True) for p in PROMPTS]
    expected = [judge(prompt + text) for prompt, text in zip(PROMPTS, answers, strict=True)]
    assert found["reward"] == pytest.approx(sum(expected) / 3, abs=1e-4)
