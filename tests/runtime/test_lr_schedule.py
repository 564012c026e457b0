"""The learning rate over the steps, against closed forms and transformers."""

import math

import pytest
import torch
from transformers import get_scheduler

from dschat_lora.runtime.loop import rate_factor

NAMES = (
    *("linear", "cosine", "cosine_with_restarts", "polynomial"),
    *("constant", "constant_with_warmup"),
)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("warmup", "steps"), [(0, 7), (3, 10), (1, 1), (5, 3)])
def test_factors_are_those_of_transformers_digit_for_digit(name, warmup, steps):
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    expected = get_scheduler(name, optimizer, warmup, steps).lr_lambdas[0]
    mine = rate_factor(name, num_warmup_steps=warmup, num_steps=steps)
    # The last update is at step - 1.
    assert [mine(step) for step in range(steps)] == [expected(step) for step in range(steps)]


def test_linear_rises_over_the_warm_up_and_falls_to_zero():
    factor = rate_factor("linear", num_warmup_steps=2, num_steps=6)
    expected = [0.0, 0.5, 1.0, 0.75, 0.5, 0.25, 0.0]
    assert [factor(step) for step in range(7)] == pytest.approx(expected)


def test_cosine_is_half_a_wave():
    factor = rate_factor("cosine", num_warmup_steps=0, num_steps=8)
    expected = [(1 + math.cos(math.pi * step / 8)) / 2 for step in range(9)]
    assert [factor(step) for step in range(9)] == pytest.approx(expected)


@pytest.mark.parametrize("name", ["constant", "constant_with_warmup"])
def test_constant_stays_at_its_peak(name):
    factor = rate_factor(name, num_warmup_steps=0, num_steps=5)
    assert [factor(step) for step in range(5)] == [1.0] * 5


@pytest.mark.parametrize("name", ["cosine_with_restarts", "polynomial"])
def test_every_scheduler_of_the_options_starts_at_its_peak_and_falls(name):
    factor = rate_factor(name, num_warmup_steps=0, num_steps=10)
    values = [factor(step) for step in range(10)]
    assert values[0] == pytest.approx(1.0)
    assert values == sorted(values, reverse=True)


def test_a_run_of_no_steps_has_a_schedule_too():
    assert rate_factor("cosine", num_warmup_steps=0, num_steps=0)(0) == 1.0
