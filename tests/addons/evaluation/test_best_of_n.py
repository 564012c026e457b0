"""generate --keep: rows of one's own model for sft and dpo, chosen by a reward."""

import json
import random

import pytest

from dschat_lora.addons.evaluation.best_of_n import ScoredAnswer, choose_answers
from dschat_lora.data.readers import RawRow
from dschat_lora.data.rows import parse_row, require_usable
from helpers.step1 import write_jsonl
from helpers.trained import Verbs, write_trained

QUESTIONS = ["What is 2 plus 3?", "Name a fruit.", "What is the opposite of hot?"]
DRAWS = 4


def slow_choice(answers, keep, lowest):
    """The chosen answers, by loops over all pairs of answers."""
    first = [a for n, a in enumerate(answers) if all(a.text != b.text for b in answers[:n])]
    own = [next((b for b in answers if b.text == a.text and b.ended), a) for a in first]
    good = [a for a in own if a.ended and not a.score < lowest]
    if keep == "all":
        return [(a,) for a in good]
    for best in good:
        if any(other.score > best.score for other in good):
            continue
        for worst in own:
            if worst.score < best.score and not any(o.score < worst.score for o in own):
                return [(best,)] if keep == "best" else [(best, worst)]
        return []
    return []


@pytest.mark.parametrize("keep", ["best", "pair", "all"])
def test_chosen_answers_are_those_of_a_slow_loop(keep):
    draw = random.Random(5)
    found = []
    for _ in range(400):
        answers = [
            ScoredAnswer(draw.choice("abcd"), draw.choice([-1.0, 0.5, 2.0]), draw.random() < 0.7)
            for _ in range(draw.randint(0, 5))
        ]
        lowest = draw.choice([float("-inf"), 0.5, 2.0])
        found.append(choose_answers(answers, keep, lowest))
        assert found[-1] == slow_choice(answers, keep, lowest)
    assert {bool(each) for each in found} == {True, False}


def test_an_answer_that_was_cut_off_is_rejected_but_never_learnt():
    cut, good, bad = (
        ScoredAnswer(*each) for each in (("a", 3, False), ("b", 2, True), ("c", 1, True))
    )
    assert choose_answers([cut, bad, good], "pair") == [(good, bad)]
    low = cut._replace(score=0)
    assert choose_answers([low, bad, good], "pair") == [(good, low)]
    assert choose_answers([cut], "all") == []


def test_of_equal_texts_one_that_has_ended_is_learnt():
    cut, ended, other = (
        ScoredAnswer("a", 5, False),
        ScoredAnswer("a", 5, True),
        ScoredAnswer("b", 1, True),
    )
    assert choose_answers([cut, ended, other], "pair") == [(ended, other)]


REWARDS = """
def vowels(responses):
    return [float(sum(text.count(each) for each in "aeiou")) for text in responses]

def same(response):
    return 1.0

def of_answer(response, answer):
    return None if answer == "none" else float(len(response))
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A run ``run`` that says different things, and prompts of several forms."""
    directory = write_trained(tmp_path_factory.mktemp("best"))
    (directory / "sft").rename(directory / "run")
    (directory / "reward").rename(directory / "judge")
    (directory / "my_vowels.py").write_text(REWARDS)
    asked = [{"role": "user", "content": QUESTIONS[0]}]
    rows = [
        {"prompt": f"\n\nHuman: {QUESTIONS[1]}\n\nAssistant:"},
        {"prompt": asked},
        {"messages": [*asked, {"role": "assistant", "content": "No."},
                      {"role": "user", "content": QUESTIONS[2]},
                      {"role": "assistant", "content": "Cold."}]},
        {"prompt": asked},
    ]  # fmt: skip
    write_jsonl(directory / "prompts.jsonl", rows)
    return directory


@pytest.fixture
def verb(home, monkeypatch, capsys):
    """``verb(words)``: output and error of ``dschat-lora`` in the home."""
    monkeypatch.syspath_prepend(str(home))
    verbs = Verbs(home, monkeypatch, capsys)
    return lambda words, code=0: verbs.run(*words.split(), code=code)


SAMPLED = f"--do_sample --num_return_sequences {DRAWS} --max_new_tokens 40 --seed 2"


def rows_of(text):
    return [json.loads(line) for line in text.splitlines()]


@pytest.fixture
def drawn(verb):
    """The answers to each prompt of the file, as ``generate`` writes them without a reward."""
    found = rows_of(verb(f"generate run --data_path prompts.jsonl --json {SAMPLED}").out)
    return [found[n : n + DRAWS] for n in range(0, len(found), DRAWS)]


def vowels(text):
    return float(sum(each in "aeiou" for each in text))


@pytest.mark.smoke
def test_best_and_worst_of_the_draws_are_written_with_the_prompt_as_given(verb, home, drawn):
    words = f"generate run --data_path prompts.jsonl {SAMPLED} --reward_function my_vowels:vowels"
    said = verb(f"{words} --keep pair --output_path pairs.jsonl").err
    pairs = rows_of((home / "pairs.jsonl").read_text())
    best = rows_of(verb(f"{words} --keep best").out)
    expected = []
    for number, own in enumerate(drawn):
        scores = [vowels(each["response"]) if each["response"].strip() else None for each in own]
        answers = [
            ScoredAnswer(each["response"], score, each["ended"])
            for each, score in zip(own, scores, strict=True)
            if score is not None
        ]
        for chosen, rejected in slow_choice(answers, "pair", float("-inf")):
            expected.append((number, chosen, rejected, scores))
    assert len(expected) >= 2
    assert len(pairs) == len(best) == len(expected)
    assert f"{len(pairs)} rows of 4 prompts written to pairs.jsonl" in said
    given = rows_of((home / "prompts.jsonl").read_text())
    for (number, chosen, rejected, scores), pair, row in zip(expected, pairs, best, strict=True):
        prompt = given[number].get("prompt") or given[number]["messages"][:3]
        texts = [chosen.text, rejected.text]
        if number:
            texts = [[{"role": "assistant", "content": text}] for text in texts]
        assert [pair["prompt"], pair["chosen"], pair["rejected"]] == [prompt, *texts]
        assert [row["prompt"], row["completion"]] == [prompt, texts[0]]
        assert (pair["chosen_score"], pair["rejected_score"]) == (chosen.score, rejected.score)
        assert row["score"] == chosen.score
        for each in (pair, row):
            assert each["scores"] == scores
            assert (each["model"], each["seed"]) == ("run", 2)
            assert each["reward"] == "my_vowels:vowels"
        for each, kind, name in (
            (row, "samples", "prompt-completion"),
            (pair, "pairs", "preference"),
        ):
            assert require_usable(parse_row(RawRow("x", each)), kind).kind == name


def test_rows_without_a_winner_are_left_out_and_counted_and_none_is_written_twice(verb):
    words = f"generate run --prompts {'Hi ' * 2} --chat {SAMPLED}"
    found = verb(f"{words} --keep best --reward_function my_vowels:same")
    assert found.out == ""
    line = "no row for 2 prompts: no answer ended by itself and was better than another"
    assert line in found.err
    greedy = "generate run --prompts Hi Hi --chat --max_new_tokens 60 --keep all"
    found = verb(f"{greedy} --reward_function my_vowels:same")
    (row,) = rows_of(found.out)
    assert row["prompt"] == [{"role": "user", "content": "Hi"}]
    assert "left out 1 duplicate row\n" in found.err
    found = verb(f"{greedy} --reward_function my_vowels:same --min_reward 1.5")
    assert found.out == ""
    assert "no row for 2 prompts: no answer ended by itself and scored 1.5" in found.err


@pytest.mark.smoke
def test_a_reward_model_scores_as_score_does(verb, home):
    verb(f"generate run {QUESTIONS[1].split()[0]} {SAMPLED} --keep all --reward_model judge "
         "--output_path all.jsonl")  # fmt: skip
    rows = rows_of((home / "all.jsonl").read_text())
    assert len(rows) > 1
    for row, scored in zip(rows, rows_of(verb("score judge all.jsonl").out), strict=True):
        assert row["score"] == pytest.approx(scored["score"], abs=1e-4)


@pytest.mark.stage
def test_sft_and_dpo_train_on_the_rows_of_a_builtin_reward(verb, home):
    words = f"generate run --data_path prompts.jsonl {SAMPLED} --reward_function builtin:length=12"
    verb(f"{words} --keep best --output_path best4.jsonl")
    verb(f"{words} --keep pair --output_path pairs4.jsonl")
    assert len(rows_of((home / "best4.jsonl").read_text())) > 1
    more = "--eval_ratio 0 --max_steps 1 --per_device_train_batch_size 2"
    verb(f"sft --lora_dim 2 --data_path best4.jsonl --output_dir sft {more}")
    verb(f"dpo --model_name_or_path run --data_path pairs4.jsonl --output_dir dpo {more}")
    for name in ("sft", "dpo"):
        assert (home / name / "adapter" / "adapter_config.json").is_file()


def test_reward_that_asks_for_a_column_that_is_not_there_is_refused_in_one_line(verb):
    words = "generate run Hi --keep all --reward_function my_vowels:of_answer"
    (line,) = verb(words, code=2).err.splitlines()
    assert "of_answer requires answer" in line
