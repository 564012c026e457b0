"""microsoft/LoRA's schedules: goldens of a run of its own code, and what they promise."""

import math

import pytest

from dschat_lora.algos.schedules import constant, cosine, cycle, linear

PEAK, WARMUP, TOTAL = 2e-4, 10, 100
# rate at update t (from 0), printed by the original code with these three numbers
LINEAR = {0: 0.0, 1: 2e-5, 5: 1e-4, 9: 1.8e-4, 10: 2e-4, 11: 1.9777778e-4, 50: 1.1111111e-4}
LINEAR |= {55: 1e-4, 99: 2.2222222e-6, 100: 0.0, 101: 0.0}
COSINE = {0: 0.0, 1: 2e-5, 9: 1.8e-4, 10: 1.9510565e-4, 50: 1e-4, 55: 8.4356553e-5}
COSINE |= {99: 4.9343963e-8, 100: 0.0, 101: 0.0}
CONSTANT = {0: 0.0, 1: 2e-5, 9: 1.8e-4, 10: 2e-4, 11: 2e-4, 99: 2e-4, 100: 2e-4, 101: 2e-4}
CYCLE = {0: 0.0, 1: 9.999999e-5, 9: 8.9999991e-4, 10: 1e-3, 11: 9.875e-4, 50: 5e-4, 55: 4.6e-4}
CYCLE |= {99: 1.0800001e-4, 100: 1e-4, 101: 1e-4}
TURNS = {"steps": (0, 10, 50, 100), "rates": (0.0, 1e-3, 5e-4, 1e-4)}


RATES = {
    "linear": (LINEAR, lambda t: PEAK * linear(t, warmup=WARMUP, total=TOTAL), 1e-7),
    "cosine": (COSINE, lambda t: PEAK * cosine(t, warmup=WARMUP, total=TOTAL), 1e-7),
    "constant": (CONSTANT, lambda t: PEAK * constant(t, warmup=WARMUP), 1e-7),
    "cycle": (CYCLE, lambda t: cycle(t, **TURNS), 2e-8),
}


@pytest.mark.parametrize(("golden", "rate_at", "tolerance"), RATES.values(), ids=RATES)
def test_rates_are_the_originals(golden, rate_at, tolerance):
    rates = {step: rate_at(step) for step in golden}
    assert rates == pytest.approx(golden, rel=tolerance, abs=1e-12)


def test_cosine_drops_where_the_warm_up_ends():
    before, after = (cosine(t, warmup=WARMUP, total=TOTAL) for t in (WARMUP - 1, WARMUP))
    assert before == 0.9
    assert after == pytest.approx((1 + math.cos(math.pi / 10)) / 2, rel=1e-15)


def test_only_the_cosine_begins_at_zero_without_warm_up():
    assert cosine(0, warmup=0, total=TOTAL) == 0
    assert linear(0, warmup=0, total=TOTAL) == constant(0, warmup=0) == 1


@pytest.mark.parametrize(
    ("steps", "rates"),
    [((0, 10), (1.0,)), ((5, 10), (1.0, 2.0)), ((0, 10, 10), (1.0, 2.0, 3.0)), ((), ())],
)
def test_a_cycle_that_cannot_be_drawn_is_refused(steps, rates):
    with pytest.raises(ValueError, match="as many rates as steps, which rise from 0"):
        cycle(0, steps=steps, rates=rates)
