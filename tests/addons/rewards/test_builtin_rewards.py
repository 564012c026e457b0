"""Rewards that come along, each by its definition."""

import inspect

import pytest

from dschat_lora.addons.rewards.builtin import BUILTINS, builtin_function
from dschat_lora.rl.options.config import RewardsConfig
from dschat_lora.rl.score.scores import load_scorer
from helpers.roles import Words


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("name", "response", "row", "expected"),
    [
        ("exact_match", " 42\n", {"answer": 42}, 1.0),
        ("exact_match", "42.", {"answer": 42}, 0.0),
        ("exact_match=gold", "Paris", {"gold": "Paris"}, 1.0),
        ("regex=^Yes\\b", "Yes, sir", {}, 1.0),
        ("regex=^Yes\\b", "Yesterday", {}, 0.0),
        ("number_equals", "it is 1,024 in all", {"answer": "#### 1024"}, 1.0),
        ("number_equals", "first 3, then -4.50", {"answer": "-4.5"}, 1.0),
        ("number_equals", "none", {"answer": "none"}, 0.0),
        ("length=4", "a b c d", {}, 1.0),
        ("length=8", "a b c d", {}, 0.5),
        ("length=2", "a b c d", {}, 0.0),
        ("json_valid", '{"a": [1, 2]}', {}, 1.0),
        ("json_valid", "{a: 1}", {}, 0.0),
        ("format_tags", "<think>so\nso</think>\n<answer>4</answer>", {}, 1.0),
        ("format_tags", "<answer>4</answer><think>so</think>", {}, 0.0),
        ("format_tags", "<think>a</think><think>b</think><answer>4</answer>", {}, 0.0),
        ("format_tags=plan", "x <plan>1</plan>", {}, 0.0),
        ("repetition_penalty", "a b c a b c", {}, -0.25),  # 3 of 4 trigrams differ
        ("repetition_penalty=1", "a a a a", {}, -0.75),
        ("repetition_penalty", "a b", {}, 0.0),
        ("soft_overlong=5,2", "a b c", {}, 0.0),
        ("soft_overlong=5,2", "a b c d", {}, -0.5),
        ("soft_overlong=5,2", "a b c d e f", {}, -1.0),
        ("math_equal", "so it is $\\frac{1}{2}$", {"answer": "0.5"}, 1.0),
        ("math_equal", "\\boxed{2\\sqrt{3}}", {"answer": "\\sqrt{12}"}, 1.0),
        ("math_equal=gold", "x = 3", {"gold": 3}, 1.0),
        ("math_equal", "$x^2$", {"answer": "x^3"}, 0.0),
        ("math_equal", "no idea", {"answer": "4"}, 0.0),
    ],
)
def test_built_in_reward(name, response, row, expected):
    function = builtin_function(f"builtin:{name}")
    ids = list(range(len(response.split())))
    offered = {"response": response, "row": row, "token_ids": ids}
    taken = {name: offered[name] for name in inspect.signature(function).parameters}
    assert function(**taken) == pytest.approx(expected)


def test_every_built_in_is_one_that_the_table_tests():
    cases = next(m for m in test_built_in_reward.pytestmark if m.name == "parametrize").args[1]
    elsewhere = {"json_schema", "judge", "python_tests", "ifeval"}  # test_external_rewards.py
    assert {case[0].partition("=")[0] for case in cases} | elsewhere == set(BUILTINS)


def test_the_column_of_a_built_in_must_be_there():
    config = RewardsConfig(reward_function=("builtin:exact_match=gold",))
    function = load_scorer(config, Words(), has_model=False)
    function.check_columns(["gold"])
    with pytest.raises(ValueError, match="builtin:exact_match=gold requires gold; .*: answer"):
        function.check_columns(["answer"])
