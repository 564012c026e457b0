"""Functions that score, and what becomes of scores before they teach."""

import json
import math
import random
import statistics

import pytest
import torch

from dschat_lora.algos.advantages import RunningMoments
from dschat_lora.rl.options.config import RewardsConfig
from dschat_lora.rl.response.response import Response
from dschat_lora.rl.score.scores import RewardFunction, load_function, rescale_values, shape
from helpers.roles import Words

CPU = torch.device("cpu")
RESPONSES = [
    Response((5, 6), (7, 8, 2), True, 0, json.dumps({"answer": "ja"}).encode()),
    Response((5,), (9,), False, 1),
    Response((2, 4), (3, 4, 5, 6), False, 2, json.dumps({"answer": "no"}).encode()),
]


alone = pytest.mark.usefixtures("one_rank")


def scored(function, responses=RESPONSES, option="reward_function"):
    return RewardFunction(option, "mine:score", function, Words())(responses)[:, 0]


@alone
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
        "rows": [{"answer": "ja"}, {}, {"answer": "no"}],
        "token_ids": [[7, 8, 2], [9], [3, 4, 5, 6]],
        "unused": 3,
    }


@alone
def test_a_function_gets_nothing_it_does_not_ask_for():
    def score(prompts, responses):
        return [0.0] * len(prompts)

    def greedy(**everything):
        own = {"prompts", "responses", "messages", "ended", "rows", "token_ids"}
        trls = {"completions", "completion_ids", "trainer_state", "log_extra", "log_metric"}
        assert set(everything) == own | trls | {"answer"}
        return (0.5,) * 3

    assert scored(score).tolist() == [0.0] * 3
    assert scored(greedy).tolist() == [0.5] * 3


@alone
@pytest.mark.parametrize(
    "found",
    [[1, None, 2.0], (True, None, "2"), [torch.ones(1), None, torch.full((1,), 2.0)]],
    ids=["list", "tuple", "column"],
)
def test_none_is_a_response_that_does_not_count(found):
    scores = scored(lambda prompts, responses: found)
    assert scores[1].isnan()
    assert scores[[0, 2]].tolist() == [1.0, 2.0]


@alone
@pytest.mark.parametrize(
    ("found", "words"),
    [
        ([1.0, 2.0], "returned 2 scores for 3 responses; it must return a list"),
        ([], "returned 0 scores for 3 responses"),
        (torch.ones(4), "returned 4 scores for 3 responses"),
        (None, "returned a NoneType for 3 responses"),
        (1.0, "returned a float for 3 responses"),
        (torch.tensor(1.0), "returned a Tensor for 3 responses"),
        ({1: 2, 3: 4, 5: 6}, "returned a dict for 3 responses"),
        ("abc", "returned a str for 3 responses"),
        ([1, math.inf, 0], "returned inf for the prompt '5'; scores are finite numbers, or None"),
        ([1.0, -math.inf, 0.0], "returned -inf for the prompt '5'; scores are finite"),
        ([1, math.nan, 2], "returned nan for the prompt '5'; scores are finite numbers, or None"),
        (torch.tensor([1.0, math.nan, 2.0]), r"returned tensor\(nan\) for the prompt '5'"),
        ([1.0, "good", 0.0], "returned 'good' for the prompt '5'; scores are finite"),
        ([1.0, [1, 2], 0.0], r"returned \[1, 2\] for the prompt '5'; scores are finite"),
        ([1.0, 10**400, 0.0], "returned 10000000000.*; scores are finite"),
        (torch.ones(3, 2), r"returned tensor\(\[1., 1.\]\) for the prompt '5 6'; scores are"),
    ],
)
def test_what_is_no_score_is_refused_by_name(found, words):
    with pytest.raises(ValueError, match=f"--reward_function mine:score {words}"):
        scored(lambda prompts, responses: found)


@alone
def test_a_judge_is_named_by_its_own_option():
    with pytest.raises(ValueError, match="--judge_function mine:score returned 0 scores"):
        scored(lambda prompts, responses: [], option="judge_function")
    with pytest.raises(ValueError, match="--judge_function mine:score returned inf"):
        scored(lambda prompts, responses: [math.inf] * 3, option="judge_function")


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


# ---------------------------------------------------------------------------- loading


MODULE = """
number = 3


def score(prompts, responses, rows):
    return [len(each) for each in responses]


def open_to_all(prompts, responses, *more, **others):
    return []


def optional(prompts, responses, weight=2.0):
    return []


def prompts_alone(prompts):
    return []


def asks_for_more(prompts, responses, answers):
    return []


def asks_for_more_by_name(prompts, responses, *, answers, **others):
    return []


class Scorer:
    def __call__(self, prompts, responses):
        return []


scorer = Scorer()
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    """A module of functions in the working directory."""
    (tmp_path / "t1_my_rewards.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    return "t1_my_rewards"


@pytest.mark.parametrize("name", ["score", "open_to_all", "optional", "scorer"])
def test_a_function_is_found_beside_the_user(module, name):
    function = load_function("reward_function", f"{module}:{name}", Words())
    assert function.name == f"{module}:{name}"
    assert function.option == "reward_function"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("nothing", "t1_my_rewards has no function nothing"),
        ("number", "t1_my_rewards has no function number"),
        ("prompts_alone", r"must take responses, completions or messages .* it takes \(prompts\)"),
    ],
)
def test_a_function_that_cannot_be_called_is_refused(module, name, words):
    with pytest.raises(ValueError, match=f"--judge_function {module}:{name}.*{words}"):
        load_function("judge_function", f"{module}:{name}", Words())


@pytest.mark.parametrize("name", ["asks_for_more", "asks_for_more_by_name"])
def test_a_column_that_the_data_lacks_is_refused_by_name(module, name):
    function = load_function("judge_function", f"{module}:{name}", Words())
    function.check_columns(["answers", "prompt"])
    words = f"--judge_function {module}:{name} asks for answers; .* data: answer, prompt"
    with pytest.raises(ValueError, match=words):
        function.check_columns(["prompt", "answer"])


def test_a_module_that_is_not_there_is_refused():
    with pytest.raises(ValueError, match="--reward_function t1_gone:f cannot be imported: No mod"):
        load_function("reward_function", "t1_gone:f", Words())


# ---------------------------------------------------------------------------- teaching


def taught(scores, ended=None, moments=None, **options):
    """(scores that teach, moments after) with everything off that is not named."""
    config = RewardsConfig(**{"clip_reward_value": 0.0, "reward_scaling": "none"} | options)
    ended = torch.ones(len(scores), dtype=torch.bool) if ended is None else torch.tensor(ended)
    scores, before = torch.tensor(scores), moments or RunningMoments()
    found = shape(scores, ended, [1] * len(scores), before, config, longest=9)
    return found.rewards, found.moments


def test_scores_teach_as_they_are_where_nothing_is_asked():
    found, moments = taught([3.0, math.nan, -70.0])
    assert found.tolist() == [3.0, 0.0, -70.0]  # 0 where no score is
    assert moments == RunningMoments()


def test_clip_is_of_either_sign_and_comes_before_the_penalty():
    scores, ended = [9.0, -9.0, 1.0, 9.0], [True, True, False, False]
    found, _ = taught(scores, ended, clip_reward_value=2.0, missing_eos_penalty=3.0)
    assert found.tolist() == [2.0, -2.0, -2.0, -1.0]


def test_running_scale_divides_by_the_deviation_of_all_scores_so_far():
    first, second = [1.0, 4.0, math.nan, 2.0], [10.0, -6.0]
    found, moments = taught(first, reward_scaling="running")
    spread = statistics.stdev([1.0, 4.0, 2.0])
    expected = torch.tensor([x / spread for x in first]).nan_to_num(0.0)
    torch.testing.assert_close(found, expected)
    found, moments = taught(second, moments=moments, reward_scaling="running")
    every = [1.0, 4.0, 2.0, *second]
    torch.testing.assert_close(found, torch.tensor([x / statistics.stdev(every) for x in second]))
    assert moments.count == 5
    assert moments.mean == pytest.approx(statistics.mean(every))


def test_initial_scale_takes_in_iterations_until_it_has_64_scores():
    rng = random.Random(5)
    iterations = [[rng.gauss(3, 2) for _ in range(n)] for n in (63, 20, 30)]
    first, second, third = iterations
    seen, moments = [], RunningMoments()
    for scores in (first, second):
        seen += scores
        found, moments = taught([*scores, math.nan], moments=moments, reward_scaling="initial")
        mean, spread = statistics.mean(seen), statistics.stdev(seen)
        expected = torch.tensor([*((x - mean) / spread for x in scores), 0.0])
        torch.testing.assert_close(found, expected)
    assert moments.count == 83
    found, after = taught(third, moments=moments, reward_scaling="initial")
    torch.testing.assert_close(found, torch.tensor([(x - mean) / spread for x in third]))
    assert after == moments
    values = rescale_values(moments, torch.tensor([[7.0, mean]]))
    torch.testing.assert_close(values, torch.tensor([[(7.0 - mean) / spread, 0.0]]))


def test_initial_scale_of_64_scores_is_theirs_for_ever():
    found, moments = taught([0.0, 2.0] * 32, reward_scaling="initial")
    # mean 1, and 64 squared distances of 1 over 63
    torch.testing.assert_close(found[:2], torch.tensor([-1.0, 1.0]) * (63 / 64) ** 0.5)
    assert taught([9.0], moments=moments, reward_scaling="initial")[1] == moments


def test_initial_scale_waits_for_a_score():
    _, moments = taught([math.nan, math.nan], reward_scaling="initial")
    assert moments == RunningMoments()
    found, _ = taught([1.0, 3.0], moments=moments, reward_scaling="initial")
    torch.testing.assert_close(found, torch.tensor([-1.0, 1.0]) / 2**0.5)


@pytest.mark.parametrize(
    ("scaling", "ended", "clip", "penalty", "expected"),
    [
        ("running", [False, True], 1.2, 0.5, [-0.5, 1.2]),
        ("initial", [False, False], 0.5, 0.25, [-0.75, 0.25]),
    ],
)
def test_scores_are_scaled_then_clipped_then_lowered(scaling, ended, clip, penalty, expected):
    # deviation 10 by hand: (0 - 10)^2 + (20 - 10)^2 = 200, over 2 - 1, is 14.14 squared
    options = {"clip_reward_value": clip, "missing_eos_penalty": penalty}
    found, _ = taught([0.0, 20.0], ended, reward_scaling=scaling, **options)
    torch.testing.assert_close(found, torch.tensor(expected))


def test_equal_scores_are_not_scaled():
    found, _ = taught([3.0, 3.0], reward_scaling="running")
    assert found.tolist() == [3.0, 3.0]
