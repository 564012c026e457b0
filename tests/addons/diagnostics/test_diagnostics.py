"""Each warning of step 3 comes where its failure is, once, and nowhere else."""

import json
import math
import random

import pytest

from dschat_lora.addons.diagnostics.diagnostics import PATIENCE, WINDOW, Diagnostics
from dschat_lora.report.log import jsonable
from dschat_lora.rl.options.engines import EngineFacts

HERE = EngineFacts(exact=True, same_model=True)
ELSEWHERE = EngineFacts(in_process=False, same_model=True)
HEALTHY = {
    "kl": 0.4,
    "kl_standard_error": 0.1,
    "eos_rate": 0.8,
    "entropy": 2.0,
    "explained_variance": 0.3,
    "reward_std": 1.0,
    "ratio_error": 0.0,
    "sampler_error": 1e-6,
    "score_clip_fraction": 0.01,
    "reward": 1.0,
    "loss": 0.1,
    "response_length": 10.0,
}


EXACT = {"kl_standard_error": 0.0}


def diagnostics(dtype="fp32", samples_tokens=True, engine=HERE, **options):
    return Diagnostics(dtype, samples_tokens, engine, **options)


def said(looking, rows):
    """Warnings of each iteration."""
    return [looking.after_log(HEALTHY | row) for row in rows]


def times(count, **row):
    return [row] * count


def test_a_healthy_run_is_not_warned():
    # better in every respect, and as bad as is still in order
    rows = [
        {"kl": k / 10, "entropy": 2.0 - k / 25, "eos_rate": 0.8 - k / 120, "reward_std": 0.01}
        for k in range(45)
    ]
    assert said(diagnostics(), rows) == [[]] * 45


# name: (how it begins, how it goes on, word, iterations after the change until it is said)
CASES = {
    "negative divergence": ({}, {"kl": -0.5}, "divergence from the reference is negative", 4),
    "forgotten ends": ({}, {"eos_rate": 0.1}, "responses end with a stop token", 3),
    "cut off": ({"eos_rate": 0.35}, {"eos_rate": 0.2}, "71% of the last responses are cut off", 2),
    "collapsed entropy": ({}, {"entropy": 0.1}, "entropy has collapsed", 5),
    "longer responses": ({}, {"response_length": 30.0}, "have become longer by a factor of 2.2", 3),
    "shorter responses": ({}, {"response_length": 2.0}, "shorter by a factor of 2.8", 4),
    "equal rewards": ({}, {"reward_std": 0.0}, "got the same reward", 5),
    "no signal": (
        {"prompts": 2, "equal_prompts": 1},
        {"prompts": 2, "equal_prompts": 2},
        "iteration 6 teaches nothing: the responses to each of its 2 prompts got equal rewards",
        1,
    ),
    "clipped scores": ({}, {"score_clip_fraction": 0.5}, "are at --clip_reward_value", 3),
    "unlike sampler": ({}, {"sampler_error": 0.3}, "sampled from a different policy", 1),
    "unlike passes": ({}, {"ratio_error": 1e-3}, "do not see the same input", 1),
}


@pytest.mark.smoke
@pytest.mark.parametrize("name", CASES)
def test_a_failure_is_said_once_as_soon_as_the_window_shows_it(name):
    before, after, words, delay = CASES[name]
    warnings = said(diagnostics(), times(WINDOW, **before) + times(12, **after))
    when = [n - WINDOW + 1 for n, each in enumerate(warnings) if each]
    assert when == [delay]
    (text,) = warnings[WINDOW + delay - 1]
    assert words in text


@pytest.mark.parametrize("name", CASES)
def test_a_failure_that_passed_is_said_when_it_comes_again(name):
    before, after, _, _ = CASES[name]
    rows = times(WINDOW, **before) + times(8, **after) + times(8) + times(8, **after)
    warnings = said(diagnostics(), rows)
    assert sum(map(len, warnings)) == (1 if name == "no signal" else 2)


@pytest.mark.parametrize(
    ("figure", "dtype", "allowed", "much", "words"),
    [
        ("ratio_error", "fp32", 1e-6, 2e-6, "do not see the same input"),
        ("ratio_error", "fp16", 0.01, 0.011, "do not see the same input"),
        ("ratio_error", "bf16", 0.05, 0.051, "do not see the same input"),
        ("sampler_error", "fp32", 9e-5, 2e-4, "decode loop"),
        ("sampler_error", "bf16", 0.04, 0.06, "decode loop"),
    ],
)
def test_passes_may_differ_by_what_rounding_does(figure, dtype, allowed, much, words):
    assert said(diagnostics(dtype), [{figure: allowed}]) == [[]]
    ((text,),) = said(diagnostics(dtype), [{figure: much}])
    assert all(part in text for part in (f"{much:.2g}", dtype, words))
    assert said(diagnostics(dtype), [{figure: None}]) == [[]]
    assert len(said(diagnostics(dtype), [{figure: math.nan}])[0]) == 1


@pytest.mark.parametrize(
    ("before", "after", "count"),
    [
        # four standard errors of a mean of five iterations: 4 * 0.1 / sqrt(5) = 0.179
        ({"kl": -0.17}, {"kl": -0.17}, 0),
        ({"kl": -0.19}, {"kl": -0.19}, 1),
        # what is nearly nothing is rounding
        (EXACT | {"kl": -0.9e-4}, EXACT | {"kl": -0.9e-4}, 0),
        (EXACT | {"kl": -1.1e-4}, EXACT | {"kl": -1.1e-4}, 1),
        # ends that were rare from the start, as the first warning says
        ({"eos_rate": 0.19}, {"eos_rate": 0.0}, 1),
        ({"eos_rate": 0.2}, {"eos_rate": 0.11}, 1),
        ({"eos_rate": 0.2}, {"eos_rate": 0.1}, 2),
        ({"eos_rate": 0.31}, {"eos_rate": 0.31}, 0),
        # entropy that never was there, that fell by less, and that is no number
        ({"entropy": 0.0}, {"entropy": 0.0}, 0),
        ({}, {"entropy": 0.21}, 0),
        ({"entropy": math.nan}, {"entropy": math.nan}, 0),
        ({"entropy": None}, {"entropy": None}, 0),
    ],
)
def test_what_is_a_failure_and_what_is_none(before, after, count):
    assert sum(map(len, said(diagnostics(), times(WINDOW, **before) + times(9, **after)))) == count


def test_other_than_plain_sampling_may_give_a_negative_divergence_and_a_mismatch():
    assert said(diagnostics(samples_tokens=False), times(9, kl=-5.0)) == [[]] * 9
    elsewhere = diagnostics(samples_tokens=False, engine=ELSEWHERE)
    assert said(elsewhere, times(2, **APART)) == [[], []]


@pytest.mark.parametrize("change", [{"entropy": 0.01}, {"response_length": 900.0}])
def test_entropy_and_lengths_of_distillation_become_the_teachers(change):
    rows = times(WINDOW) + times(WINDOW, **change)
    assert any(said(diagnostics(), rows))
    taught = diagnostics(learns_from_rewards=False)
    assert not any(said(taught, rows))


def test_a_critic_has_time_to_learn():
    warnings = said(diagnostics(), times(PATIENCE + 5, explained_variance=-0.2))
    assert [n + 1 for n, each in enumerate(warnings) if each] == [PATIENCE]
    assert "critic explains -20% of the returns after 20 iterations" in warnings[PATIENCE - 1][0]
    assert said(diagnostics(), times(30, explained_variance=0.06)) == [[]] * 30
    assert sum(map(len, said(diagnostics(), times(30, explained_variance=0.05)))) == 1
    assert said(diagnostics(), times(30, explained_variance=None)) == [[]] * 30


def test_nothing_but_the_ratio_is_judged_before_the_window_is_full():
    bad = {"kl": -9.0, "reward_std": 0.0, "ratio_error": 0.0}
    warnings = said(diagnostics(), times(WINDOW, **bad))
    assert [len(each) for each in warnings] == [0, 0, 0, 0, 2]


# ---------------------------------------------------------------------------- the judge


def judged(*rows, error=0.1):
    looking = diagnostics()
    return [
        looking.after_evaluation({"reward": r, "judge": j, "judge_standard_error": error})
        for r, j in rows
    ]


def test_the_judge_and_the_held_out_reward_are_compared_prompt_by_prompt():
    first = {"reward": 1.0, "judge": 5.0, "judge_standard_error": 0.5}
    looking = [diagnostics(), diagnostics()]
    later = {"reward": 2.0, "judge": 4.0, "judge_standard_error": 0.5}
    pairs = [{}, {"judge_change_standard_error": 0.4}]
    for each in looking:
        each.after_evaluation(first)
    warnings = [
        len(x.after_evaluation(later | pair)) for x, pair in zip(looking, pairs, strict=True)
    ]
    assert warnings == [0, 1]


def test_a_judge_that_disagrees_with_the_reward_is_reported_once():
    falling = judged((1.0, 5.0), (2.0, 4.81), (3.0, 4.0), (4.0, 3.0))
    assert [len(each) for each in falling] == [0, 0, 1, 0]
    _, (text,) = judged((1.0, 5.0), (2.0, 4.0))
    assert "reward rose on held-out prompts (1 to 2) while the judge's score fell (5 to 4)" in text


@pytest.mark.parametrize(
    "rows",
    [
        [(1.0, 5.0), (2.0, 6.0)],
        [(1.0, 5.0), (0.5, 3.0)],
        [(1.0, 5.0), (1.0, 3.0)],
        [(1.0, 5.0), (2.0, 4.81)],
        [(1.0, None), (2.0, 3.0)],
        [(1.0, 5.0), (2.0, None)],
        [(1.0, 5.0)],
        [(1.0, 5.0), (math.nan, 1.0)],
        [(1.0, 5.0), (2.0, math.nan)],
    ],
)
def test_a_judge_that_agrees_or_is_not_there_is_no_news(rows):
    assert judged(*rows)[-1] == []


def test_a_judge_of_one_response_alone_proves_nothing():
    assert judged((1.0, 5.0), (2.0, 6.0), (3.0, 4.0), error=math.nan) == [[]] * 3


def test_the_latest_evaluation_is_compared_with_the_first():
    # a fall that ends below the first is one, whatever came between
    warnings = judged((1.0, 5.0), (2.0, 9.0), (3.0, 6.0), (4.0, 4.0))
    assert [len(each) for each in warnings] == [0, 0, 0, 1]


# ---------------------------------------------------------------------------- resuming


@pytest.mark.parametrize("stop", [1, 4, 6, 9, 12])
def test_a_resumed_run_is_warned_as_if_it_had_gone_on(stop):
    rows = times(WINDOW) + times(8, entropy=0.0, reward_std=0.0) + times(6) + times(9, kl=-1.0)
    whole = diagnostics()
    whole.after_evaluation({"reward": 1.0, "judge": 5.0, "judge_standard_error": 0.1})
    expected = said(whole, rows)
    part = diagnostics()
    part.after_evaluation({"reward": 1.0, "judge": 5.0, "judge_standard_error": 0.1})
    warnings = said(part, rows[:stop])
    resumed = diagnostics()
    resumed.restore(json.loads(json.dumps(part.state())))
    warnings += said(resumed, rows[stop:])
    assert warnings == expected
    assert sum(map(len, expected)) >= 3
    late = {"reward": 2.0, "judge": 1.0, "judge_standard_error": 0.1}
    assert resumed.after_evaluation(late) == whole.after_evaluation(late) != []
    assert resumed.state() == whole.state()


def test_a_state_keeps_no_more_than_the_windows():
    looking = diagnostics()
    said(looking, times(40))
    state = looking.state()
    assert len(state["first"]) == len(state["latest"]) == WINDOW
    assert "loss" not in state["latest"][0]


def test_figures_that_were_no_numbers_come_back_as_they_were():
    looking = diagnostics()
    said(looking, times(WINDOW, kl=math.nan))
    looking.after_evaluation({"reward": 1.0, "judge": math.nan, "judge_standard_error": math.inf})
    again = diagnostics()
    again.restore(json.loads(json.dumps(jsonable(looking.state()))))
    assert math.isnan(again.latest[-1]["kl"])
    assert math.isinf(again.evaluations[0]["judge_standard_error"])
    assert again.after_evaluation({"reward": 2.0, "judge": 0.0, "judge_standard_error": 0.1}) == []
    assert again.after_log(HEALTHY) == []


APART = {"rollout_kl": 0.02, "rollout_ratio_max": 7.0, "sampler_error": 0.1}


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (APART, "0.02 nats per token from the trained one, with a ratio of up to 7: the grad"),
        (APART | {"importance_weight": 0.9}, "weights become noisy; use the same dtypes"),
        ({"importance_masked": 0.3}, "mis leaves out 30% of the tokens: raise"),
        ({"rollout_kl": 0.005, "rollout_ratio_max": 2.0, "importance_masked": 0.1}, None),
    ],
)
def test_an_engine_that_draws_from_another_policy_is_warned_of(row, words):
    looking = diagnostics(engine=ELSEWHERE)
    warnings = said(looking, times(2, **row))
    assert [len(each) for each in warnings] == [words is not None, 0]
    assert words is None or words in warnings[0][0]


# ------------------------------------------------------------------------------ guards


def evaluated(looking, reward, error=0.1):
    return looking.after_evaluation({"reward": reward, "reward_standard_error": error})


def test_a_reward_that_rises_in_training_alone_is_reported_against_the_best_evaluation():
    looking = diagnostics()
    assert evaluated(looking, 1.0) == []
    said(looking, times(WINDOW, reward=1.0))
    assert evaluated(looking, 2.0) == []
    said(looking, times(WINDOW, reward=1.5))
    # sqrt(2) * 0.1 is its error. One in 44 falls by 2 of these, one in 44 * 3 by 2.43 and one in
    # 44 * 6 by 2.67; three evaluations make 3 pairs, four make 6.
    assert evaluated(looking, 1.66) == []
    (text,) = evaluated(looking, 1.6)
    assert "rose in training (1 to 1.5) while it fell on held-out prompts (2 to 1.6)" in text
    assert looking.failed


@pytest.mark.parametrize(
    ("rewards", "held_out", "error"),
    [
        ((1.0, 1.0), (2.0, 1.0), 0.1),  # no rise in training
        ((1.0, 0.5), (2.0, 1.0), 0.1),
        ((1.0, 1.5), (2.0, 1.9), 0.1),  # noise
        ((1.0, 1.5), (1.0, 2.0), 0.1),
        ((1.0, 1.5), (2.0, 1.0), math.nan),  # of one prompt
        ((1.0, 1.5), (math.nan, 1.0), 0.1),
        ((1.0, 1.5), (2.0, math.nan), 0.1),
    ],
)
def test_held_out_rewards_that_prove_nothing_are_no_news(rewards, held_out, error):
    looking = diagnostics()
    for reward, held in zip(rewards, held_out, strict=True):
        said(looking, times(WINDOW, reward=reward))
        assert evaluated(looking, held, error) == []
    assert not looking.failed


def test_a_rise_since_before_training_is_one_since_its_first_iterations():
    looking = diagnostics()
    evaluated(looking, 2.0)
    said(looking, times(WINDOW, reward=1.0) + times(WINDOW, reward=1.2))
    (text,) = evaluated(looking, 1.0)
    assert "training (1 to 1.2)" in text


def test_a_budget_of_divergence_is_that_of_the_latest_iterations():
    looking = diagnostics(kl_budget=2.0)
    rows = [*times(4, kl=1.0), {"kl": 5.0}, *times(4, kl=3.0)]
    warnings = said(looking, rows)  # means: 1 ... 1.8, then 2.2
    assert [bool(each) for each in warnings] == [False] * 5 + [True] + [False] * 3
    assert "2.2 nats per response, is above --kl_budget 2" in warnings[5][0]
    assert said(diagnostics(), rows) == [[]] * 9


def test_without_guards_their_failures_are_not_warned_of_and_others_are():
    looking = diagnostics(guard="off", kl_budget=0.1)
    row = {"entropy": 0.01, "response_length": 99.0, "eos_rate": 0.0, "ratio_error": 0.5}
    warnings = [text for each in said(looking, times(WINDOW) + times(9, **row)) for text in each]
    assert len(warnings) == 1
    assert "do not see the same input" in warnings[0]
    assert not looking.failed


def test_only_what_is_guarded_counts_as_failed_and_only_until_the_next_iteration():
    looking = diagnostics()
    said(looking, [{"ratio_error": 0.5}])
    assert not looking.failed
    said(looking, times(WINDOW) + times(5, entropy=0.1))
    assert looking.failed
    evaluated(looking, 1.0)  # which follows it, and is in order
    assert looking.failed
    said(looking, [{"entropy": 0.1}])
    assert not looking.failed


def test_a_plateau_of_noise_is_no_fall():
    """Of 40 runs that learn nothing, 16 evaluations each, hardly one is warned."""
    noise, alarms = random.Random(0), 0
    for _ in range(40):
        looking = diagnostics()
        for _ in range(16):
            row = {"reward": noise.gauss(0, 0.1), "judge": noise.gauss(0, 0.1)}
            errors = {"reward_standard_error": 0.1, "judge_standard_error": 0.1}
            looking.after_evaluation(row | errors)
            looking.after_log(HEALTHY | {"reward": noise.gauss(0, 0.1)})
        alarms += bool({"judge", "held_out"} & {*looking.active}) or looking.failed
    assert alarms <= 4
