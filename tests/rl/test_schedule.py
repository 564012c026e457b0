"""How many iterations and steps a run has, and how far it has come."""

import itertools
import json
import math
from collections import Counter

import pytest

from dschat_lora.config.prompts import PromptConfig
from dschat_lora.report.log import jsonable
from dschat_lora.rl.draw.source import PromptOrder
from dschat_lora.rl.loop.schedule import RlhfProgress, RlhfSchedule
from dschat_lora.runtime.loop import check_repeats

PLANS = list(
    itertools.product(
        (1, 3, 7, 16), (1, 3, 4, 20), (1, 2), (1, 3, 8), (1, 2), (0, 1, 2), (0, 1, 17)
    )
)


@pytest.mark.thorough
def test_iterations_are_as_many_as_counting_them_one_by_one_finds():
    sizes = {
        (prompts, each): [len(PromptOrder(prompts, each, 0)(i)) for i in range(60)]
        for prompts, each, *_ in PLANS
    }
    for prompts, each, k, rows, passes, epochs, max_steps in PLANS:
        plan = RlhfSchedule(PromptOrder(prompts, each, 0), k, rows, passes, epochs, max_steps)
        steps = [passes * math.ceil(size * k / rows) for size in sizes[prompts, each]]
        per_epoch = sum(steps[: math.ceil(prompts / each)])
        wanted = max_steps if max_steps and epochs else epochs * per_epoch
        assert plan.num_steps == wanted
        counted = made = 0
        while made < wanted:
            assert plan.steps_before(counted) == made
            made += steps[counted]
            counted += 1
        assert plan.num_iterations == counted


def test_rows_are_counted_by_epochs_of_iterations():
    # Two epochs of five iterations, which have two steps each and the last one has one.
    plan = RlhfSchedule(PromptOrder(18, 4, 0), 2, 4, 1, 9, 18)
    for name, used in (("a", 2), ("b", 6)):
        data = {
            "data_path": ("a:1", "b:3"),
            "max_repeats": [used if n == name else 0 for n in "ab"],
        }
        times = {"a": 0.375, "b": 2.25}
        check_repeats(PromptConfig(**data), times, plan)
        data["max_repeats"] = [max(0, each - 1) for each in data["max_repeats"]]
        with pytest.raises(ValueError, match=f"would use rows of {name} {used} times"):
            check_repeats(PromptConfig(**data), times, plan)


@pytest.mark.parametrize(("prompts", "each"), [(7, 3), (6, 3), (2, 5)])
def test_an_epoch_answers_every_prompt_once_in_an_order_of_its_own(prompts, each):
    order = PromptOrder(prompts, each, seed=3)
    epochs = [
        [n for i in range(order.iterations_per_epoch) for n in order(first + i)]
        for first in (0, order.iterations_per_epoch)
    ]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(prompts))
    if prompts > 3:  # of fewer, two random orders may well be one
        assert epochs[0] != epochs[1]
    for iteration in range(5):
        assert order.size(iteration) == len(order(iteration))


def test_what_may_replace_prompts_is_every_other_prompt_once_in_an_order_of_each_key():
    block = PromptOrder(9, 4, seed=3, samples="abcdefghi").block(1)
    others = ["".join(block.others("further prompts", 3, iteration)) for iteration in (1, 1, 2)]
    assert sorted(others[0] + "".join(block)) == sorted("abcdefghi")
    assert others[0] == others[1] != others[2]


def test_sizes_count_the_iterations_before_one_by_their_prompts():
    for prompts, each in ((7, 3), (6, 3), (2, 5)):
        order = PromptOrder(prompts, each, seed=3)
        for number in range(9):
            counted = Counter(len(order(iteration)) for iteration in range(number))
            assert +Counter(order.sizes(number)) == counted


def test_a_mixture_passes_over_each_source_as_often_as_a_pass_has_its_rows():
    order = PromptOrder(6, 3, seed=3, times={"a": 0.5, "b": 2.0})
    assert order.passes(3) == {"epoch": 1.5, "epochs/a": 0.75, "epochs/b": 3.0}


def test_progress_that_is_no_number_comes_back_as_it_was():
    progress = RlhfProgress(kl_spent=math.nan, moments={"count": 2.0, "mean": math.inf, "m2": 1.0})
    again = RlhfProgress()
    again.restore(json.loads(json.dumps(jsonable(progress.state()))))
    assert math.isnan(again.kl_spent)
    assert again.moments == {"count": 2.0, "mean": math.inf, "m2": 1.0}
