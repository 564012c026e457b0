"""What functions and models give as scores: whatever is a number, and no more."""

import math
import sys
from dataclasses import dataclass, replace
from decimal import Decimal
from fractions import Fraction
from functools import reduce

import numpy as np
import pytest
import torch

from dschat_lora.rl.response.response import Response
from dschat_lora.rl.score.scores import RewardFunction, RewardSum, ScoreError, Scores
from dschat_lora.rl.score.user_functions import TrainerState
from helpers.roles import Words

NAN, INF = math.nan, math.inf
RESPONSES = [Response((5, n), (7, n, 2), True, n) for n in (3, 4, 6)]
UNDRAWN = replace(RESPONSES[0], undrawn=True)


def score_of(returned):
    return RewardFunction("reward_function", "mine:score", lambda responses: returned, Words())


SCORES = {
    "numbers": ([1, 2.5, -3], [1.0, 2.5, -3.0]),
    "bools": ([True, False, True], [1.0, 0.0, 1.0]),
    "array": (np.arange(3) / 2, [0.0, 0.5, 1.0]),
    "array of fp16": (np.ones(3, dtype=np.float16), [1.0] * 3),
    "tensor": (torch.tensor([1, 2, 3]), [1.0, 2.0, 3.0]),
    "tensor with gradient": (torch.ones(3, requires_grad=True) * 2, [2.0] * 3),
    "tensors with gradient": ([torch.tensor(1.5, requires_grad=True)] * 3, [1.5] * 3),
    "fractions": ([Fraction(1, 4), Decimal("0.5"), np.float32(2)], [0.25, 0.5, 2.0]),
    "largest": ([3.4e38, -3.4e38, 1e-300], [3.4e38, -3.4e38, 1e-300]),
}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(("returned", "expected"), SCORES.values(), ids=SCORES)
def test_whatever_is_a_number_is_a_score(returned, expected):
    assert score_of(returned).own_scores(RESPONSES) == expected


NESTED = reduce(lambda inner, _: [inner], range(3000), [])
NO_SCORES = {
    "beyond fp32": ([1.0, 1e300, 1.0], "returned 1e+300 for the prompt '5 4'"),
    "just beyond fp32": ([3.5e38] * 3, "returned 3.5e+38 for"),
    "negative infinity": ([0.0, 0.0, -INF], "returned -inf for the prompt '5 6'"),
    "NaN for some": ([1.0, NAN, 1.0], "returned nan for the prompt '5 4'"),
    "NaN in an array": (np.array([1.0, NAN, 1.0]), "returned nan for"),
    "NaN in a tensor": (torch.tensor([NAN] * 3), "returned tensor(nan) for"),
    "integer without end": ([10**400] * 3, "returned 1000000"),
    "text": (["good"] * 3, "returned 'good' for"),
    "text of NaN": (["nan"] * 3, "returned 'nan' for"),
    "half an emoji": (["\ud83d"] * 3, "returned '\\ud83d' for"),
    "lists": ([[1.0]] * 3, "returned [1.0] for"),
    "lists without end": ([NESTED] * 3, "returned [[[[[[[...]]]]]]] for"),
    "rows of an array": (np.ones((3, 2)), "returned [1.0, 1.0] for"),
    "rows of a tensor": (torch.ones(3, 2), "returned tensor([1., 1.]) for"),
    "complex numbers": ([1j] * 3, "returned 1j for"),
    "dicts": ([{}] * 3, "returned {} for"),
    "one text": ("abc", "returned a str for 3 responses"),
    "bytes": (b"abc", "returned a bytes for"),
    "generator": ((n for n in range(3)), "returned a generator for"),
    "map": (map(float, range(3)), "returned a map for"),
    "dict": ({1: 1, 2: 2, 3: 3}, "returned a dict for"),
    "set": ({1, 2, 3}, "returned a set for"),
    "nothing": (None, "returned a NoneType for"),
    "number": (1.0, "returned a float for"),
    "number of an array": (np.float64(1), "returned a float for"),
    "number of a tensor": (torch.tensor(1.0), "returned a Tensor for"),
    "too few": ([1.0], "returned 1 scores for 3 responses"),
    "too many": ([1.0] * 4, "returned 4 scores for"),
    "none": ([], "returned 0 scores for"),
}


@pytest.mark.parametrize(("returned", "words"), NO_SCORES.values(), ids=NO_SCORES)
def test_whatever_is_no_score_is_named_in_one_short_line(returned, words):
    with pytest.raises(ValueError, match=r"^[^\n]{,400}$") as caught:
        score_of(returned).own_scores(RESPONSES)
    assert str(caught.value).startswith(f"--reward_function mine:score {words}")


@pytest.mark.parametrize("options", [{}, {"retries": 1}, {"timeout": 5.0}])
def test_function_that_ends_the_program_does_not_end_the_run_as_if_it_were_done(options):
    def score(responses):
        sys.exit(0)

    function = RewardFunction("reward_function", "mine:score", score, Words(), **options)
    with pytest.raises(RuntimeError, match="--reward_function mine:score called sys.exit"):
        function.own_scores(RESPONSES)


@dataclass(frozen=True)
class Given:
    """Scores that are given by name."""

    scores: dict

    def __call__(self, responses, state):
        by_name = {name: torch.tensor(values) for name, values in self.scores.items()}
        return Scores(torch.zeros(len(responses)), by_name)


@pytest.mark.parametrize(
    ("rewards", "words"),
    [
        ({"reward_model": [1.0, NAN, 2.0]}, "the reward model gives nan for"),
        ({"mine": [NAN, 1.0, 2.0]}, None),
        ({"mine": [NAN, 0.0, 1.0], "reward_model": [1.0] * 3}, None),
        ({"mine": [NAN] * 3, "reward_model": [0.0, INF, 0.0]}, "the reward model gives inf for"),
        ({"mine": [0.0, -3e38, 0.0]}, "the weighted sum of rewards gives -inf for"),
    ],
)
def test_score_is_no_number_by_the_model_and_left_out_by_a_function(rewards, words):
    scorer = RewardSum((Given(rewards),), dict.fromkeys(rewards, 2.0), Words().decode)
    if words is None:
        scorer(RESPONSES, TrainerState())
        return
    # Left out, whatever its score is.
    assert scorer([UNDRAWN] * 3, TrainerState()).total.isnan().all()
    with pytest.raises(ScoreError) as caught:
        scorer(RESPONSES, TrainerState())
    assert str(caught.value.__cause__).startswith(words)
