import os
import time

import pytest

from dschat_lora.data.workers import map_in_order


def slow_square(number):
    """The first ones take longest."""
    time.sleep(0.02 * (number < 2))
    if number in (5, 7):
        raise ValueError(f"{number} is refused")
    return number**2, os.getpid()


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_results_are_in_order_whoever_finishes_first(workers):
    results = list(map_in_order(slow_square, range(5), workers=workers))
    assert [square for square, _ in results] == [0, 1, 4, 9, 16]
    assert len({process for _, process in results}) <= workers
    assert (os.getpid() in {process for _, process in results}) == (workers == 1)


def test_a_single_task_starts_no_process():
    assert list(map_in_order(slow_square, [3], workers=4)) == [(9, os.getpid())]
    assert list(map_in_order(slow_square, [], workers=4)) == []


@pytest.mark.parametrize("workers", [1, 2])
def test_the_first_error_is_raised_after_the_results_before_it(workers):
    results = map_in_order(slow_square, range(20), workers=workers)
    assert [next(results)[0] for _ in range(5)] == [0, 1, 4, 9, 16]
    with pytest.raises(ValueError, match="5 is refused"):
        next(results)


def test_only_a_few_tasks_wait_at_a_time():
    taken = []

    def tasks():
        for number in range(1000):
            taken.append(number)
            yield number + 100

    results = map_in_order(slow_square, tasks(), workers=2)
    next(results)
    assert len(taken) < 10
    results.close()
