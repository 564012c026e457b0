"""How reward functions are found and called, and several at once."""

import asyncio
import json
import math
import sys
import time

import pytest
import torch

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


def scored(function, option="reward_function", **options):
    return RewardFunction(option, "mine:score", function, Words(), **options)(RESPONSES)[:, 0]


def test_a_function_gets_texts_and_what_else_it_asks_for():
    got = {}

    def score(prompts, responses, *, ended, rows, token_ids, unused=3):
        got.update(locals())
        return [1, 2.5, -3]

    scores = scored(score)
    assert scores.tolist() == [1.0, 2.5, -3.0]
    assert scores.dtype == torch.float32
    assert got == {
        "got": got,
        "prompts": ["5 6", "5", "2 4"],
        "responses": ["7 8", "9", "3 4 5 6"],  # without the end of sequence
        "ended": [True, False, False],
        "rows": ROWS,
        "token_ids": [[7, 8, 2], [9], [3, 4, 5, 6]],
        "unused": 3,
    }


def test_a_function_that_takes_everything_gets_all_there_is():
    def greedy(**everything):
        own = {"prompts", "responses", "messages", "ended", "rows", "token_ids"}
        trls = {"completions", "completion_ids", "trainer_state", "log_extra", "log_metric"}
        assert set(everything) == own | trls | {"answer", "level"}
        return (0.5,) * 3

    assert scored(greedy).tolist() == [0.5] * 3


@pytest.mark.parametrize(
    "returned",
    [[1, None, 2.0], (True, None, "2"), [torch.ones(1), None, torch.full((1,), 2.0)]],
    ids=["list", "tuple", "column"],
)
def test_none_is_a_response_that_does_not_count(returned):
    scores = scored(lambda prompts, responses: returned)
    assert scores[1].isnan()
    assert scores[[0, 2]].tolist() == [1.0, 2.0]


@pytest.mark.parametrize("option", ["reward_function", "judge_function"])
@pytest.mark.parametrize(
    ("returned", "words"),
    [
        ([1.0, 2.0], "returned 2 scores for 3 responses; it must return a list"),
        ([1, math.inf, 0], "returned inf for the prompt '5'; scores are finite numbers, or None"),
    ],
)
def test_what_is_no_score_is_refused_by_name(returned, words, option):
    with pytest.raises(ValueError, match=f"--{option} mine:score {words}"):
        scored(lambda prompts, responses: returned, option)


@pytest.mark.stage
@pytest.mark.parametrize("count", [1, 2, 5])
def test_processes_share_the_responses_and_all_know_every_score(ranks, count):
    reports = ranks(2).run("helpers.iterations:score_by_length", count=count)
    assert [each["scores"] for each in reports] == [[float(n + 1) for n in range(count)]] * 2
    assert reports[0]["own"] == [n + 1 for n in range(0, count, 2)]
    assert reports[1]["own"] == [n + 1 for n in range(1, count, 2)]
    mean = sum(range(count + 1)) / min(count, 2)  # a call of each process that has responses
    logged = [{"calls": mean}, {"length": [n + 1 for n in range(count)]}]
    assert [list(each["logged"]) for each in reports] == [logged] * 2


def test_a_function_of_trls_gets_messages_columns_and_token_ids():
    got = {}

    def score(completions, prompts, completion_ids, answer, **kwargs):
        got.update(prompts=prompts, completions=completions, ids=completion_ids, answer=answer)
        got.update(level=kwargs["level"])
        return [0.0, 1.0, 2.0]

    assert scored(score).tolist() == [0.0, 1.0, 2.0]
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

    assert scored(score).tolist() == [1.0, 2.0, 3.0]
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

    assert scored(score).tolist() == [3.0, 1.0, 7.0]
    assert most == 3


def test_a_call_may_have_the_responses_to_one_prompt():
    calls = []

    def score(responses):
        calls.append(responses)
        return [float(len(calls))] * len(responses)

    assert scored(score, batch="group").tolist() == [1.0, 1.0, 2.0]
    assert calls == [["7 8", "9"], ["3 4 5 6"]]


def test_a_failure_is_tried_again_as_often_as_asked(capsys):
    calls = []

    def score(responses):
        calls.append(1)
        if len(calls) < 3:
            raise ConnectionError("try later")
        return [1.0] * 3

    assert scored(score, retries=2).tolist() == [1.0] * 3
    assert capsys.readouterr().err.count("mine:score failed and is retried") == 2
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
    assert "failed for 1 of 8 responses and is retried" in capsys.readouterr().err
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

    assert scored(score, timeout=0.2, retries=1).tolist() == [1.0] * 3
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
    assert scored(score, timeout=5.0).tolist() == [0.0] * 3
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


def summed(functions, weights, *others, responses=RESPONSES):
    """The scores of functions and of other scorers."""
    taken = tuple(name for each in others for name in each.names)
    scorers = (RewardFunctions(functions, taken=(*taken, "reward_model")), *others)
    return RewardSum(scorers, weights, str)(responses, TrainerState())


def test_scores_are_weighted_and_added_to_the_reward_models():
    functions = (
        made(lambda responses: [1, 2, 3], "a:right"),
        made(lambda responses: [10, None, 30], "b:short"),
        made(lambda responses: [5, 5, 5], "c:right"),
    )
    weights = {"right": 2.0, "short": 0.5, "right_2": -1.0}
    scores = summed(functions, weights)
    assert list(scores.by_name) == ["right", "short", "right_2"]
    assert scores.by_name["short"][0].item() == 10.0
    assert scores.total.tolist() == [2.0, -1.0, 16.0]
    assert scores.weights == weights
    model = Given(reward_model=[1, 1, 2])
    total = summed(functions, {"reward_model": 3.0, **weights}, model).total
    assert total.tolist() == [2.0 + 5.0 - 5.0 + 3.0, 4.0 - 5.0 + 3.0, 6.0 + 15.0 - 5.0 + 6.0]


def test_an_environment_s_reward_keeps_its_name_beside_a_function_of_that_name():
    rewards = [1.0, 2.0, None]
    responses = [each.rewarded(reward) for each, reward in zip(RESPONSES, rewards, strict=True)]
    scores = summed(
        (made(lambda responses: [1, 1, 1], "a:play"),),
        {"play_2": 5.0, "play": 1.0},
        EpisodeScorer("play"),
        responses=responses,
    )
    assert list(scores.by_name) == ["play_2", "play"]
    assert scores.total.tolist() == [6.0, 7.0, 5.0]


def test_whatever_a_function_does_wrong_is_one_error_with_its_cause():
    functions = RewardFunctions((made(lambda responses: [1.0]),))
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
    weights = load_scorer(config, Words(), has_model=True).weights
    assert weights == {"reward_model": 3.0, "ended": 0.5, "length": 2.0}


# ---------------------------------------------------------------------------- scorers


class Two:
    """Two rewards; what it was asked is kept."""

    names = ("sizes", "groups")

    def __init__(self, given=None):
        self.given, self.asked = given, []

    def __call__(self, responses, state):
        self.asked.append((responses, state.global_step))
        if self.given is not None:
            return self.given
        sizes = torch.tensor([len(each.token_ids) for each in responses])
        return {"sizes": sizes, "groups": [each.group or None for each in responses]}


def test_a_scorer_sees_responses_as_text_tokens_and_rows_and_scores_by_name():
    mine = Two()
    functions = RewardFunctions((made(mine, "a:two"), made(lambda responses: [7, 8, 9], "b:sizes")))
    assert functions.names == ("sizes", "groups", "sizes_2")
    functions.check_columns(())
    by_name = functions(RESPONSES, TrainerState(global_step=3)).by_name
    assert by_name["sizes"].tolist() == [3.0, 1.0, 4.0]
    assert by_name["sizes_2"].tolist() == [7.0, 8.0, 9.0]
    assert by_name["groups"].isnan().tolist() == [True, True, False]
    ((responses, step),) = mine.asked
    first = responses[0]
    assert step == 3
    assert (first.prompt, first.text, first.token_ids) == ("5 6", "7 8", [7, 8, 2])
    assert (first.row, first.group, first.ended) == (ROWS[0], 0, True)
    assert first.messages == [*HELLO, {"role": "assistant", "content": "7 8"}]


def test_a_name_that_a_scorer_leaves_out_is_not_scored():
    scores = made(Two({"groups": [1, 2, None]}))(RESPONSES)
    assert scores[:, 0].isnan().all()
    assert scores[:2, 1].tolist() == [1.0, 2.0]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ([1, 2, 3], "returned a list; it must return scores of the responses by its names sizes, "),
        ({"size": [1, 2, 3]}, r"returned \['size'\]; it must"),
        ({"sizes": [1, 2]}, "returned 2 scores for 3 responses"),
        ({"sizes": [1, 2, "x"]}, "returned 'x' for the prompt"),
    ],
)
def test_what_a_scorer_may_not_return_is_refused(given, words):
    with pytest.raises(ValueError, match=f"--reward_function mine:score {words}"):
        made(Two(given))(RESPONSES)


# ---------------------------------------------------------------------------- loading


MODULE = """
number = 3
scorer = type("Scorer", (), {"__call__": lambda self, prompts, responses: []})()
def open_to_all(prompts, responses, *more, **others): return []
def optional(prompts, responses, weight=2.0): return []
def prompts_alone(prompts): return []
def asks_for_more(prompts, responses, answers): return []
def asks_by_name(prompts, responses, *, answers, **others): return []
class Two:
    names = ("a", "b")
    def __call__(self, responses, state): return {}
"""


@pytest.fixture
def load(tmp_path, monkeypatch):
    """``load(name, option)``: the function of a module in the working directory."""
    (tmp_path / "t1_my_rewards.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    return lambda name, option="judge_function": load_function(
        option, f"t1_my_rewards:{name}", Words()
    )


def test_a_function_is_found_beside_the_user(load):
    for name in ("open_to_all", "optional", "scorer"):
        function = load(name)
        assert (function.name, function.option) == (f"t1_my_rewards:{name}", "judge_function")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("nothing", "t1_my_rewards has no function nothing"),
        ("number", "t1_my_rewards has no function number"),
        ("prompts_alone", r"must take responses, completions or messages .* it takes \(prompts\)"),
        ("Two", "gives 2 rewards"),
    ],
)
def test_a_function_that_cannot_be_called_is_refused(load, name, words):
    with pytest.raises(ValueError, match=f"--judge_function t1_my_rewards:{name}.*{words}"):
        load(name)


@pytest.mark.parametrize("name", ["asks_for_more", "asks_by_name"])
def test_a_column_that_the_data_lacks_is_refused_by_name(load, name):
    function = load(name)
    function.check_columns(["answers", "prompt"])
    words = f"--judge_function t1_my_rewards:{name} requires answers; .* data: answer, prompt"
    with pytest.raises(ValueError, match=words):
        function.check_columns(["prompt", "answer"])


def test_weights_of_a_scorer_are_of_its_names_and_checked_once_it_is_known(load):
    names = ("t1_my_rewards:Two", LENGTH)
    config = RewardsConfig(reward_function=names, reward_weights=(1.0, 2.0, 3.0))
    scorer = load_scorer(config, Words(), has_model=False)
    assert scorer.weights == {"a": 1.0, "b": 2.0, "length": 3.0}
    config = RewardsConfig(reward_function=names, reward_weights=(1.0,) * 5)
    with pytest.raises(ValueError, match="--reward_weights has 5 weights for 3 functions"):
        load_scorer(config, Words(), has_model=True)
