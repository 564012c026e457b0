"""How reward functions are called, several at once, and dynamic sampling."""

import asyncio
import json
import math
import sys
import time

import pytest
import torch

from dschat_lora.rl.learn.dynamic_sampling import resample
from dschat_lora.rl.learn.experience import idle_groups
from dschat_lora.rl.options.algorithms import ALGORITHMS
from dschat_lora.rl.options.config import RewardsConfig
from dschat_lora.rl.response.response import Response
from dschat_lora.rl.score.scores import (
    EpisodeScorer,
    RewardFunction,
    RewardFunctions,
    RewardSum,
    Scores,
    load_function,
    load_scorer,
)
from dschat_lora.rl.score.user_functions import RewardError, TrainerState
from helpers.roles import Words

CPU = torch.device("cpu")
LENGTH = "helpers.scores:length"
HELLO = [{"role": "user", "content": "hello"}]
ROWS = [
    {"prompt": HELLO, "answer": "7 8"},
    {"messages": [*HELLO, {"role": "assistant", "content": "no"}], "answer": "3"},
    {"prompt": "plain", "level": 2},
]
RESPONSES = [
    Response((5, 6), (7, 8, 2), True, 0, json.dumps(ROWS[0]).encode()),
    Response((5,), (9,), False, 0, json.dumps(ROWS[1]).encode()),
    Response((2, 4), (3, 4, 5, 6), False, 1, json.dumps(ROWS[2]).encode()),
]


pytestmark = pytest.mark.usefixtures("one_rank")


def made(function, name="mine:score", **options):
    return RewardFunction("reward_function", name, function, Words(), **options)


def scored(function, **options):
    return made(function, **options)(RESPONSES)[:, 0].tolist()


def test_a_function_of_trls_gets_messages_columns_and_token_ids():
    got = {}

    def score(completions, prompts, completion_ids, answer, **kwargs):
        got.update(prompts=prompts, completions=completions, ids=completion_ids, answer=answer)
        got.update(level=kwargs["level"])
        return [0.0, 1.0, 2.0]

    assert scored(score) == [0.0, 1.0, 2.0]
    assert got["prompts"] == [HELLO, HELLO, "plain"]
    assert got["completions"] == [
        [{"role": "assistant", "content": "7 8"}],
        [{"role": "assistant", "content": "9"}],
        "3 4 5 6",
    ]
    assert got["ids"] == [[7, 8, 2], [9], [3, 4, 5, 6]]
    assert got["answer"] == ["7 8", "3", None]
    assert got["level"] == [None, None, 2]


def test_a_function_of_one_response_is_asked_about_each():
    asked = []

    def score(prompt, response, ended, answer=None):
        asked.append((prompt, response, ended, answer))
        return len(asked)

    assert scored(score) == [1.0, 2.0, 3.0]
    assert asked == [
        ("5 6", "7 8", True, "7 8"),
        ("5", "9", False, "3"),
        ("2 4", "3 4 5 6", False, None),
    ]


def test_coroutines_of_single_responses_run_at_once():
    waiting, most = 0, 0

    async def score(response):
        nonlocal waiting, most
        waiting += 1
        most = max(most, waiting)
        await asyncio.sleep(0)
        waiting -= 1
        return float(len(response))

    assert scored(score) == [3.0, 1.0, 7.0]
    assert most == 3


def test_a_call_may_have_the_responses_to_one_prompt():
    calls = []

    def score(responses):
        calls.append(responses)
        return [float(len(calls))] * len(responses)

    assert scored(score, batch="group") == [1.0, 1.0, 2.0]
    assert calls == [["7 8", "9"], ["3 4 5 6"]]


def test_a_failure_is_tried_again_as_often_as_asked(capsys):
    calls = []

    def score(responses):
        calls.append(1)
        if len(calls) < 3:
            raise ConnectionError("try later")
        return [1.0] * 3

    assert scored(score, retries=2) == [1.0] * 3
    assert capsys.readouterr().err.count("mine:score failed and is tried again") == 2
    calls.clear()
    with pytest.raises(RuntimeError, match="--reward_function mine:score failed"):
        scored(score, retries=1)


@pytest.mark.parametrize("waits", [False, True])
def test_only_the_calls_that_failed_are_made_again(waits, capsys):
    """One failure of eight: nine calls, each with its own log; a second one ends it."""
    responses = [Response((5,), (n,), True, n, b"{}") for n in range(3, 11)]
    calls, failing = [], [1]

    def score(response, log_metric):
        calls.append(response)
        log_metric("calls", 1.0)
        if calls.count("6") <= failing[0] and response == "6":
            raise ConnectionError("try later")
        return float(response)

    async def later(response, log_metric):
        await asyncio.sleep(0)
        return score(response, log_metric)

    asked = made(later if waits else score, retries=1)
    assert asked(responses)[:, 0].tolist() == [float(n) for n in range(3, 11)]
    assert sorted(map(int, calls)) == [3, 4, 5, 6, 6, 7, 8, 9, 10]
    assert asked.log.metrics == [("calls", 1.0)] * 8
    assert "failed for 1 of 8 responses and is tried again" in capsys.readouterr().err
    calls.clear()
    failing[0] = 2
    with pytest.raises(RuntimeError, match="--reward_function mine:score failed"):
        asked(responses)
    assert len(calls) == 9


def test_what_came_within_the_time_is_not_asked_for_again():
    calls = []

    async def score(response):
        calls.append(response)
        await asyncio.sleep(30 if calls.count("9") == 1 and response == "9" else 0)
        return 1.0

    assert scored(score, timeout=0.2, retries=1) == [1.0] * 3
    assert sorted(calls) == ["3 4 5 6", "7 8", "9", "9"]


def test_after_an_error_that_ends_the_run_nothing_is_asked():
    calls = []

    def score(response):
        calls.append(response)
        sys.exit()

    async def later(response):
        sys.exit()

    for function in (score, later):
        with pytest.raises(RuntimeError, match="--reward_function mine:score called sys.exit"):
            scored(function)
    assert calls == ["7 8"]


def test_a_call_that_takes_too_long_is_an_error():
    begun = []

    def slow(response):
        begun.append(response)
        time.sleep(0.1)

    with pytest.raises(RuntimeError, match="0.02 seconds of --reward_timeout for 3 responses"):
        scored(slow, timeout=0.02)

    def score(responses):
        time.sleep(0.2)
        return [0.0] * 3

    words = "mine:score took more than the 0.01 seconds of --reward_timeout for 3 responses"
    with pytest.raises(RuntimeError, match=words):
        scored(score, timeout=0.01)
    assert scored(score, timeout=5.0) == [0.0] * 3
    assert begun == ["7 8"]  # no further one

    def fails(responses):
        raise KeyError("gone")

    with pytest.raises(KeyError, match="gone"):  # within the time
        scored(fails, timeout=5.0)


# ---------------------------------------------------------------------------- several


class Given:
    """Scores that are given by name; None: none."""

    def __init__(self, **scores):
        self.names, self.scores = tuple(scores), scores

    def check_columns(self, columns):
        pass

    def __call__(self, responses, state):
        by_name = {name: values_of(scores) for name, scores in self.scores.items()}
        return Scores(torch.zeros(len(responses)), by_name)


def values_of(scores):
    return torch.tensor([math.nan if score is None else float(score) for score in scores])


def summed(functions, weights, *others, gates=(), responses=RESPONSES):
    """The scores of functions, of which the last ones are ``gates``, and of other scorers."""
    taken = tuple(name for each in others for name in each.names)
    scorers = (RewardFunctions((*functions, *gates), taken=(*taken, "reward_model")), *others)
    names = scorers[0].names[len(functions) :]
    return RewardSum(scorers, weights, names, str)(responses, TrainerState())


def test_scores_are_weighted_and_added_to_the_reward_models():
    functions = (
        made(lambda responses: [1, 2, 3], "a:right"),
        made(lambda responses: [10, None, 30], "b:short"),
        made(lambda responses: [5, 5, 5], "c:right"),
    )
    weights = {"right": 2.0, "short": 0.5, "right_2": -1.0}
    found = summed(functions, weights)
    assert list(found.by_name) == ["right", "short", "right_2"]
    assert found.by_name["short"][0].item() == 10.0
    assert found.total.tolist() == [2.0, -1.0, 16.0]
    assert found.weights == weights
    model = Given(reward_model=[1, 1, 2])
    total = summed(functions, {"reward_model": 3.0, **weights}, model).total
    assert total.tolist() == [2.0 + 5.0 - 5.0 + 3.0, 4.0 - 5.0 + 3.0, 6.0 + 15.0 - 5.0 + 6.0]


def test_where_a_gate_is_closed_nothing_else_is_worth_anything():
    functions = (made(lambda responses: [1, 2, None], "a:right"),)
    gates = (
        made(lambda responses: [1, 0, 1], "b:right"),
        made(lambda responses: [None, 3, -1], "c:kept"),
    )
    found = summed(functions, {"right": 2.0}, gates=gates)
    assert list(found.by_name) == ["right", "right_2", "kept"]
    assert found.total[:2].tolist() == [2.0, 0.0]
    assert found.total[2].isnan()
    weights = {"reward_model": 1.0, "right": 2.0}
    for model, expected in (([5, 5, 5], [7.0, 0.0, 0.0]), ([0, -9, -1], [2.0, -5.0, -1.0])):
        found = summed(functions, weights, Given(reward_model=model), gates=gates)
        assert found.total.tolist() == expected


def test_an_environment_s_reward_keeps_its_name_beside_a_function_of_that_name():
    rewards = [1.0, 2.0, None]
    responses = [each.rewarded(reward) for each, reward in zip(RESPONSES, rewards, strict=True)]
    found = summed(
        (made(lambda responses: [1, 1, 1], "a:play"),),
        {"play_2": 5.0, "play": 1.0},
        EpisodeScorer("play"),
        responses=responses,
    )
    assert list(found.by_name) == ["play_2", "play"]
    assert found.total.tolist() == [6.0, 7.0, 5.0]


def test_gates_are_named_as_functions_are():
    config = RewardsConfig(reward_gate="helpers.scores:ended", reward_function=LENGTH)
    found = load_scorer(config, Words(), has_model=False)
    assert found.names == ("length", "ended")
    assert found.gates == ("ended",)
    with pytest.raises(ValueError, match="--reward_gate must be module:function"):
        RewardsConfig(reward_gate=("x",))


@pytest.mark.parametrize("found", [[1.0], [math.nan] * 3])
def test_whatever_a_function_does_wrong_is_one_error_with_its_cause(found):
    functions = RewardFunctions((made(lambda responses: found),))
    with pytest.raises(RewardError) as caught:
        functions(RESPONSES, TrainerState())
    assert "--reward_function mine:score returned" in str(caught.value.__cause__)


def test_weights_are_of_the_functions_and_last_of_the_model():
    names = ("helpers.scores:ended", LENGTH)
    ones = {"reward_model": 1.0, "ended": 1.0, "length": 1.0}
    config = RewardsConfig(reward_function=names)
    assert load_scorer(config, Words(), has_model=True).weights == ones
    del ones["reward_model"]
    assert load_scorer(config, Words(), has_model=False).weights == ones
    config = RewardsConfig(reward_function=names, reward_weights=(0.5, 2.0, 3.0))
    found = load_scorer(config, Words(), has_model=True).weights
    assert found == {"reward_model": 3.0, "ended": 0.5, "length": 2.0}
    with pytest.raises(ValueError, match="--reward_weights has 1 weights for 2 functions"):
        RewardsConfig(reward_function=names, reward_weights=(1.0,))


# ---------------------------------------------------------------------------- scorers


class Two:
    """Two rewards; what it was asked is kept."""

    names = ("sizes", "groups")

    def __init__(self, found=None):
        self.found, self.asked = found, []

    def __call__(self, responses, state):
        self.asked.append((responses, state.global_step))
        if self.found is not None:
            return self.found
        sizes = torch.tensor([len(each.token_ids) for each in responses])
        return {"sizes": sizes, "groups": [each.group or None for each in responses]}


def test_a_scorer_sees_responses_as_text_tokens_and_rows_and_scores_by_name():
    mine = Two()
    functions = RewardFunctions((made(mine, "a:two"), made(lambda responses: [7, 8, 9], "b:sizes")))
    assert functions.names == ("sizes", "groups", "sizes_2")
    functions.check_columns(())
    found = functions(RESPONSES, TrainerState(global_step=3)).by_name
    assert {name: values.tolist() for name, values in found.items() if name != "groups"} == {
        "sizes": [3.0, 1.0, 4.0],
        "sizes_2": [7.0, 8.0, 9.0],
    }
    assert found["groups"].isnan().tolist() == [True, True, False]
    ((responses, step),) = mine.asked
    first = responses[0]
    assert step == 3
    assert (first.prompt, first.text, first.token_ids) == ("5 6", "7 8", [7, 8, 2])
    assert (first.row, first.group, first.ended) == (ROWS[0], 0, True)
    assert first.messages == [*HELLO, {"role": "assistant", "content": "7 8"}]


def test_a_name_that_a_scorer_leaves_out_is_not_scored():
    found = made(Two({"groups": [1, 2, None]}))(RESPONSES)
    assert found[:, 0].isnan().all()
    assert found[:2, 1].tolist() == [1.0, 2.0]


@pytest.mark.parametrize(
    ("found", "words"),
    [
        ([1, 2, 3], "returned a list; it must return scores of the responses by its names sizes, "),
        ({"size": [1, 2, 3]}, r"returned \['size'\]; it must"),
        ({"sizes": [1, 2]}, "returned 2 scores for 3 responses"),
        ({"sizes": [1, 2, "x"]}, "returned 'x' for the prompt"),
    ],
)
def test_what_a_scorer_may_not_return_is_refused(found, words):
    with pytest.raises(ValueError, match=f"--reward_function mine:score {words}"):
        made(Two(found))(RESPONSES)


def test_weights_of_a_scorer_are_of_its_names_and_checked_once_it_is_known(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "two_rewards.py").write_text(
        "class Two:\n    names = ('a', 'b')\n"
        "    def __call__(self, responses, state):\n        return {}\n"
    )
    names = ("two_rewards:Two", LENGTH)
    config = RewardsConfig(reward_function=names, reward_weights=(1.0, 2.0, 3.0))
    found = load_scorer(config, Words(), has_model=False)
    assert found.weights == {"a": 1.0, "b": 2.0, "length": 3.0}
    config = RewardsConfig(reward_function=names, reward_weights=(1.0,) * 5)
    with pytest.raises(ValueError, match="--reward_weights has 5 weights for 3 functions"):
        load_scorer(config, Words(), has_model=True)
    with pytest.raises(ValueError, match="--judge_function two_rewards:Two gives 2 rewards"):
        load_function("judge_function", "two_rewards:Two", Words())


# ---------------------------------------------------------------------------- dynamic sampling


def group_of(number, place):
    """Two responses to a prompt, which name it."""
    return [Response((number,), (number, k), True, place) for k in range(2)]


def resampled(prompts, further, rewards, *, tries=9):
    """The prompts of each place at the end, and what was done; ``rewards`` by prompt."""
    rounds = []

    def generate(numbers, number):
        rounds.append((number, list(numbers)))
        return [r for place, prompt in enumerate(numbers) for r in group_of(prompt, place)]

    def score(responses):
        values = torch.tensor([rewards[r.prompt[0]][r.tokens[1]] for r in responses])
        return Scores(values, {"f": 2 * values})

    first = [r for place, prompt in enumerate(prompts) for r in group_of(prompt, place)]
    found = resample(
        first,
        algorithm=ALGORITHMS["dapo"],
        further=iter(further),
        tries=tries,
        generate=generate,
        score=score,
    )
    assert [r.group for r in found.responses] == [n // 2 for n in range(len(first))]
    torch.testing.assert_close(found.scores.total, score(found.responses).total, equal_nan=True)
    torch.testing.assert_close(found.scores.by_name["f"], 2 * found.scores.total, equal_nan=True)
    return [r.prompt[0] for r in found.responses[::2]], found.metrics, rounds


REWARDS = {
    **dict.fromkeys((1, 2, 11, 13), (0.0, 1.0)),
    **dict.fromkeys((3, 4, 10, 12), (1.0, 1.0)),
    5: (math.nan, 1.0),
}


def test_a_group_is_idle_where_no_two_responses_that_count_differ():
    nan, dapo = math.nan, ALGORITHMS["dapo"]
    rewards = torch.tensor([1.0, 1.0, 0.0, 1.0, nan, nan, nan, 2.0, 3.0, 3.0, nan, 4.0])
    groups = [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 6]
    assert idle_groups(dapo, groups, rewards, {}, {}) == [0, 2, 3, 4, 5, 6]
    assert idle_groups(dapo, [4, 4, 4], torch.tensor([0.0, nan, 1.0]), {}, {}) == []


def test_equal_groups_are_replaced_by_further_prompts_until_none_is_left():
    prompts, metrics, rounds = resampled([1, 3, 2, 4], [10, 11, 12, 13], REWARDS)
    assert prompts == [1, 11, 2, 13]
    assert rounds == [(1, [10, 11]), (2, [12]), (3, [13])]
    assert metrics == {"resampling_tries": 3, "resampled_prompts": 2, "resampled_responses": 8}


def test_no_more_prompts_are_asked_than_tries_allow_or_there_are():
    assert resampled([3, 4], [10, 12, 11, 13], REWARDS, tries=1)[0] == [3, 4]
    prompts, metrics, _ = resampled([3, 5], [11], REWARDS)
    assert prompts == [11, 5]
    assert metrics["resampling_tries"] == 1
    prompts, metrics, rounds = resampled([1, 2], [11], REWARDS)  # these differ
    assert (prompts, rounds) == ([1, 2], [])
    assert set(metrics.values()) == {0}
