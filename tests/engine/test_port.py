"""A port that another run holds."""

import socket

import pytest

pytestmark = pytest.mark.stage


def summed_ranks():
    from dschat_lora.engine.distributed import rank, sum_over_ranks

    return sum_over_ranks([rank() + 1.0])[0]


@pytest.mark.parametrize("size", [1, 2])
def test_processes_meet_although_the_wanted_port_is_taken(fresh_ranks, size):
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        busy = str(other.getsockname()[1])
        sums = fresh_ranks(size, MASTER_PORT=busy).run("engine.test_port:summed_ranks", timeout=60)
    assert sums == [size * (size + 1) / 2] * size


def test_a_second_launch_by_one_parent_does_not_meet_at_the_first_ones_port(fresh_ranks, tmp_path):
    # Rank 1 comes while what the first run's rank 0 noted may still lie about.
    for delay in ("0", "4"):
        environment = {"TMPDIR": str(tmp_path), "DELAY_OF_RANK_0": delay}
        started = fresh_ranks(2, **environment)
        assert started.run("engine.test_port:summed_ranks", timeout=40) == [3.0, 3.0]
        started.stop()
        assert not list(tmp_path.glob("dschat_lora-*"))
