"""Exchanges of a step and their times, worked out by hand; tests/fakecuda counts the bytes."""

from pathlib import Path

import pytest

from benchmarks import scaling
from benchmarks.common.exchanges import (
    Cluster,
    Exchange,
    ModelSize,
    data_exchanges,
    experience_bytes,
    experience_exchanges,
    tensor_exchanges,
)
from benchmarks.common.report import with_tables

SIZE = ModelSize(
    frozen=1_000_000,
    trained=2_000,
    embedding=0,
    head=0,
    layers=2,
    hidden=100,
    linears=3,
    last=250_000,
    rank=1,
)
CLUSTER = Cluster("by hand", 100.0, 0.5, 1e12, 0.5, 8, 100e9, 10e9, link_share=0.5, latency=1e-3)


def test_a_rank_sends_all_but_its_part_once_and_for_a_sum_twice():
    assert Exchange("all_gather", 4, 800).sent == 600
    assert Exchange("reduce_scatter", 4, 800).sent == 600
    assert Exchange("all_reduce", 4, 800).sent == 1200


def test_one_rank_exchanges_nothing():
    for stage in range(4):
        assert data_exchanges(SIZE, zero_stage=stage, ranks=1) == []
    assert tensor_exchanges(SIZE, ranks=1, positions=10, targets=5) == []
    assert experience_exchanges(8, new_tokens=4, longest=4, ranks=1) == []


def test_accumulation_repeats_sums_at_zero_2_and_3_alone():
    def summed(stage):
        exchanged = data_exchanges(SIZE, zero_stage=stage, ranks=4, micro_batches=3)
        return sum(each.bytes for each in exchanged if each.kind != "all_gather")

    assert [summed(stage) for stage in range(4)] == [8_000, 8_000, 24_000, 24_000]


def test_zero_3_gathers_a_large_model_again_for_its_backward_pass_but_for_some_weights():
    size = ModelSize(
        frozen=2_200_000_000,
        trained=0,
        embedding=100_000_000,
        head=100_000_000,
        layers=2,
        hidden=100,
        linears=3,
        last=250_000_000,
        rank=1,
    )
    # Of 2,000 million elements in the blocks 400 million are kept, besides the head's 100 million.
    gathered = data_exchanges(size, zero_stage=3, ranks=8)[1]
    assert gathered.bytes == 2 * (100e6 + 100e6 + 2000e6 + 1600e6)
    gathered = data_exchanges(size, zero_stage=3, ranks=8, recomputes=True)[1]
    # The last layers of both blocks are there when their backward pass begins.
    assert gathered.bytes == 2 * (100e6 + 100e6 + 6000e6 - 500e6)


def test_the_factors_beside_the_hidden_size_are_whole_on_every_tensor_parallel_rank():
    # 2 blocks of 3 layers, factors of 100 elements whole: 600; of the other 1,400 a part.
    assert SIZE.trained_on(1) == 2_000
    assert SIZE.trained_on(2) == 600 + 700
    assert SIZE.trained_on(4) == 600 + 350


def test_ranks_of_a_model_sum_activations_four_times_a_block_and_five_where_it_recomputes():
    (plain,) = tensor_exchanges(SIZE, ranks=2, positions=10, targets=0)
    (again,) = tensor_exchanges(SIZE, ranks=2, positions=10, targets=0, recomputes=True)
    activations = 10 * 100 * 2
    assert plain.bytes == 2 * 4 * activations + 600 * 4
    assert again.bytes - plain.bytes == (2 + 1) * activations


def test_the_experience_of_an_iteration_grows_with_responses_and_their_length():
    (both,) = experience_exchanges(10, new_tokens=4, longest=3, ranks=8)
    # number, two lengths, tokens, log-probabilities; number, score, three tables
    assert both.bytes == 8 * 10 * ((3 + 4 + 4) + (2 + 3 * 3))
    assert experience_bytes(10, longest=3) == 10 * 3 * (1 + 4 * 6)


def test_an_exchange_takes_the_slowest_link_of_its_ring_and_a_time_for_each_doubling():
    inside = Exchange("all_gather", 8, 8_000_000_000)
    assert CLUSTER.exchange_seconds(inside) == pytest.approx(7 / 50 + 3e-3)
    between = Exchange("all_gather", 16, 8_000_000_000, times=2)
    assert CLUSTER.exchange_seconds(between) == pytest.approx(7.5 / 5 + 2 * 4e-3)
    # Eight groups of two hosts share the link between them.
    apart = Exchange("all_gather", 2, 1_000_000_000)
    assert CLUSTER.exchange_seconds(apart, apart=8) == pytest.approx(0.5 / (5 / 8) + 1e-3)
    assert CLUSTER.exchange_seconds(apart, apart=2) == pytest.approx(0.5 / 50 + 1e-3)


def test_half_of_the_peak_takes_twice_the_time():
    assert CLUSTER.compute_seconds(100e12) == pytest.approx(2.0)


@pytest.mark.thorough
def test_the_documentation_has_the_tables_that_the_command_makes():
    text = (Path(__file__).parents[2] / "docs" / "scaling.md").read_text(encoding="utf-8")
    assert with_tables(text, scaling.tables()) == text


def test_a_document_without_the_place_of_a_table_is_refused():
    with pytest.raises(ValueError, match="no line '<!-- exchanged -->' for the table"):
        with_tables("# Scaling\n", scaling.tables())
