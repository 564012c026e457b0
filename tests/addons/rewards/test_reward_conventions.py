"""Reward functions written for verl and OpenRLHF, and servers that score, by their signatures."""

import json

import pytest
import torch

from dschat_lora.addons.rewards.conventions import of_openrlhf, of_verl
from dschat_lora.rl.options.config import RewardsConfig
from dschat_lora.rl.response.response import Response
from dschat_lora.rl.score.scores import RewardFunction, RewardFunctions, load_scorer
from dschat_lora.rl.score.user_functions import RewardError, TrainerState
from helpers.roles import Words

ROWS = [
    {
        "prompt": "2+2",
        "data_source": "gsm8k",
        "reward_model": {"ground_truth": "7 8"},
        "label": "4",
    },
    {"prompt": "3+3", "ground_truth": "9", "extra_info": {"level": 2}, "answer": "6"},
]
RESPONSES = [
    Response((5, 6), (7, 8, 2), True, 0, json.dumps(ROWS[0]).encode()),
    Response((3,), (4, 5), False, 1, json.dumps(ROWS[1]).encode()),
]

pytestmark = pytest.mark.usefixtures("one_rank")


def made(function, **options):
    function = of_verl(function, Words()) or of_openrlhf(function, Words())
    return RewardFunction("reward_function", "mine:score", function, Words(), **options)


def test_verls_function_gets_its_four_arguments_and_may_return_a_dict():
    asked = []

    def compute_score(data_source, solution_str, ground_truth, extra_info=None):
        asked.append((data_source, solution_str, ground_truth, extra_info))
        right = solution_str == ground_truth
        return {"score": 2.0 * right, "acc": right, "pred": solution_str}

    function = made(compute_score)
    function.check_columns(())
    assert function(RESPONSES)[:, 0].tolist() == [2.0, 0.0]
    assert asked == [("gsm8k", "7 8", "7 8", None), (None, "4 5", "9", {"level": 2})]
    assert function.log.take(RESPONSES) == ({"acc": 0.5}, {"pred": ["7 8", "4 5"]})
    assert RewardFunctions((function,)).logs
    plain = made(lambda data_source, solution_str, ground_truth, extra_info: len(solution_str))
    assert plain(RESPONSES)[:, 0].tolist() == [3.0, 3.0]


def test_openrlhfs_function_gets_lists_of_one_and_returns_a_dict_of_tensors():
    asked = []

    def reward_func(queries, prompts, labels, **kwargs):
        asked.append((queries, prompts, labels))
        reward = torch.tensor([float(len(query)) for query in queries])
        return {"rewards": reward, "scores": reward, "extra_logs": {"size": reward.mean().item()}}

    function = made(reward_func)
    function.check_columns(())
    assert function(RESPONSES)[:, 0].tolist() == [8.0, 4.0]
    assert asked == [(["5 67 8 2"], ["5 6"], ["4"]), (["34 5"], ["3"], ["6"])]
    assert function.log.take(RESPONSES) == ({"size": 6.0}, {})
    assert made(lambda queries, prompts, labels: [1.5])(RESPONSES)[:, 0].tolist() == [1.5, 1.5]


def test_only_the_calls_of_openrlhfs_function_that_failed_are_made_again():
    calls = []

    async def reward_func(queries, prompts, labels, log_metric, level=None):
        calls.append((labels, level))
        log_metric("calls", 1.0)
        if len(calls) == 1:
            raise ConnectionError("try later")
        return {"rewards": [1.0]}

    function = made(reward_func, retries=1)
    assert function(RESPONSES)[:, 0].tolist() == [1.0, 1.0]
    assert calls == [(["4"], None), (["6"], None), (["4"], None)]
    assert function.log.metrics == [("calls", 1.0)] * 2


def test_what_else_a_function_asks_for_must_be_there_or_have_a_default():
    function = made(lambda solution_str, level, answer=None, **more: float(level["n"] + len(more)))
    with pytest.raises(ValueError, match="mine:score requires level; available are"):
        function.check_columns(["answer"])
    function.check_columns(["level"])
    row = json.dumps({"level": {"n": 1}}).encode()
    assert function([Response((5,), (6,), True, 0, row)])[0, 0] > 10  # all else there is


def test_a_dict_without_scores_is_refused_by_name():
    functions = RewardFunctions((made(lambda solution_str: {"reward": 1.0}),))
    with pytest.raises(RewardError) as caught:
        functions(RESPONSES, TrainerState())
    assert "returned {'reward': 1.0} for the prompt" in str(caught.value.__cause__)


def test_a_server_is_asked_once_for_all_responses(server):
    def answer(data):
        return {"rewards": [float(len(q)) for q in data["query"]], "extra_logs": {"n": 2}}

    url, asked = server(answer, "/get_reward")
    scores = load_scorer(RewardsConfig(reward_function=(url,)), Words(), has_model=False)(
        RESPONSES, TrainerState()
    )
    assert scores.by_name["get_reward"].tolist() == [8.0, 4.0]
    body = {"query": ["5 67 8 2", "34 5"], "prompts": ["5 6", "3"], "labels": ["4", "6"]}
    assert [(path, sent) for path, _, sent in asked] == [("/get_reward", body)]
    assert (scores.metrics, scores.columns) == ({"n": 2.0}, {})


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ([1, 2], "returned a list, and no JSON object"),
        (b"<html>", "returned no scores"),
        ({}, "dict"),
    ],
)
def test_a_server_that_gives_no_scores_is_named(server, answer, words):
    url, _ = server(lambda data: answer, "/get_reward")
    functions = load_scorer(RewardsConfig(reward_function=(url,)), Words(), has_model=False)
    with pytest.raises(RewardError) as caught:
        functions(RESPONSES, TrainerState())
    texts = [str(caught.value.__cause__), str(caught.value.__cause__.__cause__)]
    assert any(url in text and words in text for text in texts)
