"""Signals end a process at once or, while training, when the loop has saved what was learnt."""

import os
import signal

import pytest

from dschat_lora.engine.distributed import rank
from dschat_lora.runtime.signals import SIGNALS, Interrupts, Stopped, StopRequested, name_of

CODES = [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGHUP, 129)]
every_signal = pytest.mark.parametrize(("number", "code"), CODES)


@pytest.fixture(autouse=True)
def one_process(monkeypatch):
    """Collectives of a single process that has joined no group."""
    monkeypatch.setattr("dschat_lora.runtime.signals.max_over_ranks", lambda value: value)


@pytest.fixture(autouse=True)
def default_handlers():
    """Those of a process in the foreground: a shell lets its background jobs ignore SIGINT."""
    defaults = dict.fromkeys(SIGNALS, signal.SIG_DFL)
    before = {
        number: signal.signal(number, handler)
        for number, handler in (defaults | {signal.SIGINT: signal.default_int_handler}).items()
    }
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def receive(*numbers):
    for number in numbers:
        os.kill(os.getpid(), number)


def exit_code(function):
    """The code with which a function ends the process."""
    with pytest.raises(SystemExit) as ended:
        function()
    return ended.value.code


@every_signal
def test_training_goes_on_to_the_end_of_the_block(number, code):
    reached = []

    def train():
        with interrupts.deferred():
            assert interrupts.received == 0
            receive(number)
            reached.append(interrupts.received)
        reached.append("after")

    interrupts = Interrupts()
    assert exit_code(train) == code
    assert reached == [number]


def test_block_without_a_signal_ends_as_any_other_and_gives_the_handlers_back():
    before = [signal.getsignal(number) for number in SIGNALS]
    with Interrupts().deferred():
        assert all(signal.getsignal(n) != b for n, b in zip(SIGNALS, before, strict=True))
    # Those of the system: where a process is blocked in a collective, one of ours would wait.
    assert [signal.getsignal(number) for number in SIGNALS] == before


def test_signal_of_another_rank_ends_this_one_too(monkeypatch):
    monkeypatch.setattr("dschat_lora.runtime.signals.max_over_ranks", lambda value: 15.0)

    def train():
        with Interrupts().deferred():
            pass

    assert exit_code(train) == 143


def test_second_ctrl_c_ends_the_process_at_once():
    reached = []

    def train():
        with interrupts.deferred():
            receive(signal.SIGINT)
            reached.append("once")
            receive(signal.SIGINT)
            reached.append("twice")

    interrupts = Interrupts()
    assert exit_code(train) == 130
    assert reached == ["once"]


def test_second_ctrl_c_counts_after_another_signal_too():
    reached = []

    def train():
        with interrupts.deferred():
            receive(signal.SIGTERM, signal.SIGINT)
            reached.append("once")
            receive(signal.SIGINT)
            reached.append("twice")

    interrupts = Interrupts()
    assert exit_code(train) == 130
    assert reached == ["once"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_other_signals_that_are_repeated_do_not_cut_the_saving_short(number):
    reached = []

    def train():
        with interrupts.deferred():
            receive(number, number, signal.SIGINT)
            reached.append(interrupts.received)

    interrupts = Interrupts()
    assert exit_code(train) == 128 + number
    assert reached == [number]  # the first counts


def test_error_in_training_is_not_replaced_by_the_signal():
    def train():
        with interrupts.deferred():
            receive(signal.SIGTERM)
            raise KeyError("inside")

    interrupts = Interrupts()
    with pytest.raises(KeyError, match="inside"):
        train()
    assert interrupts.received == signal.SIGTERM


def test_signal_that_is_ignored_stays_ignored_as_nohup_asks():
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    interrupts = Interrupts()
    with interrupts.deferred():
        receive(signal.SIGHUP)
        assert interrupts.received == 0
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN


def test_end_of_a_saved_run_is_one_of_the_process():
    assert issubclass(Stopped, SystemExit)
    assert Stopped(143).code == 143
    assert [name_of(number) for number in (2, 15)] == ["SIGINT", "SIGTERM"]


def asks_to_stop(received_on):
    interrupts = Interrupts()
    interrupts.received = signal.SIGTERM if rank() in received_on else 0
    try:
        interrupts.check()
    except StopRequested:
        return True
    return False


@pytest.mark.stage
@pytest.mark.parametrize(("received_on", "stops"), [([], False), ([1], True), ([0, 1], True)])
def test_every_rank_is_asked_to_stop_where_one_received_a_signal(ranks, received_on, stops):
    results = ranks(2).run("test_signals:asks_to_stop", received_on=received_on)
    assert results == [stops, stops]
