"""Work of one process that the others wait for, whether it succeeds or fails."""

import pytest

from dschat_lora.engine import distributed

pytestmark = pytest.mark.stage


def outcomes(fails):
    """What each process gets of work on rank 0, and of work that every node does first."""
    from dschat_lora.engine.distributed import local_rank_first, on_rank_zero, sum_over_ranks

    def work():
        if fails:
            raise ValueError("no")
        return 7

    results = []
    for collective in (on_rank_zero, local_rank_first):
        try:
            results.append(collective(work))
        except ValueError as error:
            results.append(str(error))
        except SystemExit as end:
            results.append(f"exit {end.code}")
    # Nobody is left behind in a collective of its own.
    return [*results, sum_over_ranks([1.0])[0]]


def test_result_of_rank_zero_comes_to_it_alone_and_the_others_wait(ranks):
    reports = ranks(2).run("engine.test_rank_zero:outcomes", fails=False)
    assert reports == [[7, 7, 2.0], [None, 7, 2.0]]


def test_failure_of_rank_zero_is_told_there_and_ends_the_others_quietly(ranks):
    reports = ranks(2).run("engine.test_rank_zero:outcomes", fails=True)
    assert reports == [["no", "no", 2.0], ["exit 2", "exit 2", 2.0]]


@pytest.mark.parametrize(("error", "code"), [(OSError("full"), 1.0), (ValueError("wrong"), 2.0)])
def test_other_ranks_learn_the_exit_code_of_rank_zeros_failure(monkeypatch, error, code):
    told = []
    monkeypatch.setattr(distributed, "max_over_ranks", lambda value: told.append(value) or value)

    def fail():
        raise error

    with pytest.raises(type(error)):
        distributed.on_rank_zero(fail)
    assert distributed.on_rank_zero(lambda: "done") == "done"
    assert told == [code, 0.0]


def test_first_rank_ends_with_another_one_that_failed(monkeypatch):
    monkeypatch.setattr(distributed, "max_over_ranks", lambda value: 2.0)
    with pytest.raises(SystemExit, match="2"):
        distributed.local_rank_first(lambda: "done")


def test_a_process_alone_hears_its_own_mistake():
    def fail():
        raise ValueError("no rows")

    with pytest.raises(ValueError, match="no rows"):
        distributed.raise_together(fail)
