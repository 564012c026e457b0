import multiprocessing
import os
import signal
import time
from pathlib import Path

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


def refuse_to_live(number):
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_killed_worker_is_one_line():
    with pytest.raises(ChildProcessError, match="killed, perhaps out of memory; --prepro"):
        list(map_in_order(refuse_to_live, range(4), workers=2))


def wait_long(number):
    time.sleep(60)


def first_of_many(connection):
    def tasks():
        yield from range(3)
        connection.send([child.pid for child in multiprocessing.active_children()])
        yield 3

    list(map_in_order(wait_long, tasks(), workers=2))


def test_workers_end_with_a_process_that_is_killed():
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    parent = context.Process(target=first_of_many, args=(sender,))
    parent.start()
    workers = receiver.recv()
    parent.kill()
    parent.join()
    deadline = time.monotonic() + 10
    while any(map(is_running, workers)) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(workers) == 2
    assert not any(map(is_running, workers))


def is_running(process):
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def handler(number):
    time.sleep(0.05)  # so that each worker has a task
    return signal.getsignal(signal.SIGINT) == signal.SIG_IGN


def test_ctrl_c_is_left_to_the_first_process():
    assert all(map_in_order(handler, range(3), workers=2))
