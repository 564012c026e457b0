import resource
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from dschat_lora.perf.shape import describe
from dschat_lora.perf.throughput import (
    Flops,
    Meter,
    StepCounts,
    deepspeed_chat_flops,
    peak_memory_bytes,
    step_flops,
)
from helpers.perf_models import add_lora, opt

CPU = torch.device("cpu")
# Two rows of 8 and one of 16: 2 * 8 + 16 = 32 positions, 2 * 64 + 256 = 384 pairs.
COUNTS = StepCounts(
    num_samples=5,
    num_tokens=30,
    num_targets=12,
    num_attended=100,
    num_positions=32,
    num_scored_pairs=384,
)


@pytest.fixture(scope="module")
def shape():
    return describe(add_lora(opt()))


def meter(shape, ticks, **changes):
    settings = {"gradient_checkpointing": True, "world_size": 2, "device": CPU}
    return Meter(shape, **(settings | changes), clock=iter(ticks).__next__)


def test_counts_add_field_by_field():
    twice = COUNTS + COUNTS
    assert twice == StepCounts(10, 60, 24, 200, 64, 768)


def test_rates_are_over_all_processes_and_tflops_per_device(shape):
    timer = meter(shape, [1.0, 3.0], peak_tflops=1e-6)
    timer.start()
    rates = timer.step(COUNTS)
    flops = step_flops(
        shape,
        num_tokens=30,
        num_attended=100,
        num_targets=12,
        gradient_checkpointing=True,
        num_positions=32,
        num_scored_pairs=384,
    )
    assert rates["step_seconds"] == 2
    assert rates["tokens_per_second"] == 15
    assert rates["samples_per_second"] == 2.5
    assert rates["tflops_per_device"] == pytest.approx(flops.model / (2 * 2) / 1e12)
    assert rates["hardware_tflops_per_device"] == pytest.approx(flops.hardware / (2 * 2) / 1e12)
    assert rates["mfu"] == pytest.approx(flops.model / (2 * 2) / 1e6)


def test_mfu_is_unknown_where_the_peak_is(shape):
    timer = meter(shape, [0.0, 1.0])
    timer.start()
    assert timer.step(COUNTS)["mfu"] is None


def test_classic_tflops_of_mixed_rows_are_the_sum_over_the_rows(shape):
    timer = meter(shape, [0.0, 2.0])
    timer.start()
    sizes = SimpleNamespace(num_layers=3, hidden_size=32, vocab_size=80)
    settings = {"lora_dim": 4, "gradient_checkpointing": True}
    by_row = deepspeed_chat_flops(sizes, batch_size=2, sequence_length=8, **settings)
    by_row += deepspeed_chat_flops(sizes, batch_size=1, sequence_length=16, **settings)
    two_devices = 2
    expected = by_row / 2.0 / 1e12 / two_devices
    assert timer.step(COUNTS)["tflops_deepspeed_chat"] == pytest.approx(expected)


def test_padding_that_is_not_computed_is_not_counted_as_work_of_the_hardware(shape):
    rates = []
    for counts in (COUNTS, replace(COUNTS, num_positions=10**6, num_scored_pairs=10**9)):
        timer = meter(shape, [0.0, 1.0], skips_padding=True)
        timer.start()
        rates.append(timer.step(counts)["hardware_tflops_per_device"])
    assert rates[0] == rates[1]
    timer = meter(shape, [0.0, 1.0])
    timer.start()
    assert timer.step(COUNTS)["hardware_tflops_per_device"] > rates[0]


def test_flops_besides_the_step_are_added(shape):
    timer = meter(shape, [0.0, 1.0, 2.0])
    timer.start()
    plain = timer.step(COUNTS)
    more = timer.step(COUNTS, extra=Flops(4e12, 8e12))
    gain = more["tflops_per_device"] - plain["tflops_per_device"]
    assert gain == pytest.approx(2)
    gain = more["hardware_tflops_per_device"] - plain["hardware_tflops_per_device"]
    assert gain == pytest.approx(4)


def test_a_window_weights_steps_by_their_time_and_empties(shape):
    timer = meter(shape, [0.0, 1.0, 4.0, 5.0])
    timer.start()
    timer.step(COUNTS)
    timer.step(COUNTS)
    window = timer.window()
    assert (window["steps"], window["step_seconds"], window["tokens_per_second"]) == (2, 2, 15)
    timer.step(COUNTS)
    assert timer.window()["tokens_per_second"] == 30
    empty = timer.window()
    assert empty["steps"] == 0
    assert empty["tokens_per_second"] is None


def test_summary_leaves_the_first_step_out_and_says_so(shape):
    timer = meter(shape, [0.0, 10.0, 11.0, 13.0])
    timer.start()
    for _ in range(3):
        timer.step(COUNTS)
    timer.window()
    summary = timer.summary()
    assert (summary["steps"], summary["warmup_steps"]) == (2, 1)
    assert summary["tokens_per_second"] == 20


def test_summary_of_a_single_step_is_that_step(shape):
    timer = meter(shape, [0.0, 10.0])
    timer.start()
    timer.step(COUNTS)
    summary = timer.summary()
    assert (summary["steps"], summary["warmup_steps"]) == (1, 0)
    assert summary["tokens_per_second"] == 3


def test_summary_of_no_step_has_no_rates(shape):
    summary = meter(shape, []).summary()
    assert (summary["steps"], summary["warmup_steps"]) == (0, 0)
    assert summary["tokens_per_second"] is None


def test_time_before_a_second_start_is_not_training_time(shape):
    timer = meter(shape, [0.0, 1.0, 50.0, 51.0])
    timer.start()
    timer.step(COUNTS)
    timer.start()  # an evaluation lies between
    assert timer.step(COUNTS)["step_seconds"] == 1


def test_a_step_without_a_start_is_an_error(shape):
    with pytest.raises(RuntimeError, match=r"Meter\.start\(\)"):
        meter(shape, []).step(COUNTS)


def test_peak_memory_on_a_cpu_is_this_process_in_bytes():
    block = torch.ones(20_000_000, dtype=torch.uint8)
    peak = peak_memory_bytes(CPU)
    assert peak > block.nbytes
    assert peak >= 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - 1024 * 64
