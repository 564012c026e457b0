"""Random streams depend on what they are for, and on nothing else."""

import numpy as np
import pytest
import torch

from dschat_lora.algos.seeds import stream_entropy, stream_seed
from dschat_lora.config.groups import OptimConfig, RunConfig
from dschat_lora.data.loader import StepLoader
from dschat_lora.supervised.loop import make_train_schedule, seeded_windows

KEYS = [
    ("dropout", 1, 2, 0), ("dropout", 1, 0, 2), ("dropout", 2, 1, 0), ("dropout", 12, 0),
    ("dropout", 1, 20), ("dropout", "1", 20), ("dropout", 1, 2), ("epoch", 1, 2), ("epoch1", 2),
    ("epoch", "1, 2"), (), (0,), ("",),
]  # fmt: skip


def test_same_key_gives_the_same_number_on_every_machine_and_in_every_version():
    # What b2sum -l 64 says of the text ('dropout', 1234, 7, 0), its last bit dropped. Written
    # down, because checkpoints of another version count on it.
    assert stream_seed("dropout", 1234, 7, 0) == 4962686991103292489
    assert stream_entropy("epoch", 1234, 0) == 205841966229234758768251386579995325265


def test_every_part_of_the_key_counts():
    assert len({stream_seed(*key) for key in KEYS}) == len(KEYS)
    assert len({stream_entropy(*key) for key in KEYS}) == len(KEYS)


@pytest.mark.parametrize("size", [1, 4, 16, 32])
def test_bits_are_as_many_as_asked_for(size):
    numbers = [stream_entropy("test", i, size=size) for i in range(400)]
    assert max(numbers) < 256**size
    for bit in (0, 8 * size - 1):
        assert 150 < sum(number >> bit & 1 for number in numbers) < 250


def test_seeds_suit_every_generator():
    seeds = [stream_seed("test", i) for i in range(1000)]
    assert min(seeds) >= 0
    assert 2**62 < max(seeds) < 2**63
    assert all(0.4 < sum(seed >> bit & 1 for seed in seeds) / 1000 < 0.6 for bit in (0, 62))
    torch.manual_seed(max(seeds))
    np.random.default_rng(max(seeds))


class Steps:
    """Stands for a loader: each micro-batch is the number of its step."""

    steps_per_epoch = 4
    steps = StepLoader.steps

    def epoch(self, number, start_step=0):
        for step in range(start_step, self.steps_per_epoch):
            yield [(number, step)]


def drawn(start, steps, seed=1):
    """(window, the first number that dropout would draw) of each step."""
    with torch.random.fork_rng():
        plan = make_train_schedule(OptimConfig(max_steps=steps), RunConfig(), Steps.steps_per_epoch)
        windows = []
        for window in seeded_windows(Steps(), plan, start=start, seed=seed):
            windows.append((window, float(torch.rand(()))))
            torch.rand(len(windows))  # as many as a step likes
        return windows


def test_windows_go_through_the_epochs_and_end_with_the_plan():
    windows = [window for window, _ in drawn(0, 10)]
    assert windows == [[divmod(step, 4)] for step in range(10)]


@pytest.mark.parametrize("start", range(11))
def test_resumed_run_draws_what_it_would_have_drawn(start):
    assert drawn(start, 10) == drawn(0, 10)[start:]


def test_steps_and_seeds_draw_different_numbers():
    numbers = [number for seed in (1, 2) for _, number in drawn(0, 10, seed)]
    assert len(set(numbers)) == 20


def drawn_by_rank():
    return [number for _, number in drawn(0, 3)]


@pytest.mark.stage
def test_ranks_draw_different_numbers(ranks):
    first, second = ranks(2).run("test_seeds:drawn_by_rank")
    assert first == drawn_by_rank()
    assert not set(first) & set(second)
