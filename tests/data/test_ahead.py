"""Windows that a thread makes while the ones before are trained on."""

import threading
from itertools import islice

import pytest
import torch

from dschat_lora.config.groups import OptimConfig, RunConfig
from dschat_lora.data import ahead
from dschat_lora.data.ahead import one_ahead, pinned_window
from dschat_lora.supervised import loop
from dschat_lora.supervised.loop import make_train_schedule, seeded_windows
from helpers.runs import loader
from helpers.tiny import ragged_samples


def noting(count, made, fails_at=None):
    for number in range(count):
        if number == fails_at:
            raise ValueError(f"window {number} cannot be made")
        made.append((number, threading.current_thread().name))
        yield number


def test_items_come_in_order_and_are_made_by_a_thread_that_ends():
    made = []
    assert list(one_ahead(noting(5, made))) == [0, 1, 2, 3, 4]
    assert [number for number, _ in made] == [0, 1, 2, 3, 4]
    assert all(name.startswith("batches") for _, name in made)
    assert not any(each.name.startswith("batches") for each in threading.enumerate())


def test_one_item_is_made_ahead_and_no_more():
    made, asked = [], threading.Semaphore(0)

    def items():
        for number in noting(9, made):
            asked.release()
            yield number

    coming = one_ahead(items())
    assert list(islice(coming, 3)) == [0, 1, 2]
    assert all(asked.acquire(timeout=10) for _ in range(4))
    assert [number for number, _ in made] == [0, 1, 2, 3]
    coming.close()
    assert len(made) == 4


def test_what_fails_is_raised_where_its_item_is_due():
    coming = one_ahead(noting(9, [], fails_at=2))
    assert list(islice(coming, 2)) == [0, 1]
    with pytest.raises(ValueError, match="window 2 cannot be made"):
        next(coming)
    assert not any(each.name.startswith("batches") for each in threading.enumerate())


@pytest.mark.parametrize("start", [0, 5])
def test_windows_made_ahead_are_those_of_the_schedule_with_the_same_numbers_drawn(
    monkeypatch, start
):
    monkeypatch.setattr(loop, "pinned_window", lambda window: window)
    source = loader(ragged_samples(24), micro=2, accumulation=2)
    plan = make_train_schedule(OptimConfig(max_steps=9), RunConfig(), source.steps_per_epoch)

    def drawn(made_ahead):
        for window in seeded_windows(source, plan, start=start, seed=3, ahead=made_ahead):
            yield window.counts, [b.input_ids.tolist() for b in window], float(torch.rand(()))

    with torch.random.fork_rng():
        found = list(drawn(True))
        assert found == list(drawn(False))
    assert len(found) == 9 - start


def test_every_tensor_of_a_window_is_pinned(monkeypatch):
    pinned = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda own: pinned.append(own) or own.clone())
    source = loader(ragged_samples(8), micro=2, accumulation=2, packing=True)
    window = next(source.steps(0))
    moved = pinned_window(window)
    assert moved.counts == window.counts
    for ours, theirs in zip(moved, window, strict=True):
        tensors = [v for v in vars(theirs).values() if isinstance(v, torch.Tensor)]
        tensors += [v for v in vars(theirs.spans).values() if isinstance(v, torch.Tensor)]
        assert len(tensors) > 6
        assert all(any(each is own for own in pinned) for each in tensors)
        assert ours.input_ids is not theirs.input_ids
        assert torch.equal(ours.input_ids, theirs.input_ids)
        assert torch.equal(ours.spans.query_ends, theirs.spans.query_ends)


def test_a_stream_is_not_read_by_the_thread(monkeypatch):
    """Its state is that of the window that was taken last."""

    class Stream:
        steps_per_epoch, taken, reads_ahead = 3, 0, True

        def steps(self, start):
            for number in range(start, 3):
                self.taken = number + 1
                yield [number]

    monkeypatch.setattr(ahead, "ThreadPoolExecutor", None)
    stream = Stream()
    plan = make_train_schedule(OptimConfig(), RunConfig(), 3)
    for number, _ in enumerate(seeded_windows(stream, plan, seed=1, ahead=True), 1):
        assert stream.taken == number
