"""Work of one process that the others wait for, whether it succeeds or fails."""

import pytest

pytestmark = pytest.mark.stage


def outcomes(fails):
    """What each process gets of work on rank 0, and of work that every node does first."""
    from dschat_lora.engine.distributed import local_first, on_rank_zero, sum_over_ranks

    def work():
        if fails:
            raise ValueError("no")
        return 7

    found = []
    for collective in (on_rank_zero, local_first):
        try:
            found.append(collective(work))
        except ValueError as error:
            found.append(str(error))
        except SystemExit as end:
            found.append(f"exit {end.code}")
    # Nobody is left behind in a collective of its own.
    return [*found, sum_over_ranks([1.0])[0]]


def test_result_of_rank_zero_comes_to_it_alone_and_the_others_wait(ranks):
    found = ranks(2).run("engine.test_rank_zero:outcomes", fails=False)
    assert found == [[7, 7, 2.0], [None, 7, 2.0]]


def test_failure_of_rank_zero_is_told_there_and_ends_the_others_quietly(ranks):
    found = ranks(2).run("engine.test_rank_zero:outcomes", fails=True)
    assert found == [["no", "no", 2.0], ["exit 2", "exit 2", 2.0]]
