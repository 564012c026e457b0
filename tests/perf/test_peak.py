import pytest
import torch

from dschat_lora.perf.cards import tabled_peak
from dschat_lora.perf.throughput import device_peak, measured_peak

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@pytest.mark.parametrize(
    ("name", "dtype", "expected"),
    [
        ("NVIDIA A100-SXM4-80GB", BF16, 312),
        ("NVIDIA A100 80GB PCIe", FP32, 19.5),
        ("NVIDIA H100 80GB HBM3", BF16, 989.4),
        ("NVIDIA H100 PCIe", BF16, 756),
        ("NVIDIA H100 NVL", FP16, 835.5),
        ("NVIDIA H200", BF16, 989.4),
        ("NVIDIA GH200 480GB", BF16, 989.4),
        ("NVIDIA B200", BF16, 2250),
        ("NVIDIA L40S", BF16, 362),
        ("NVIDIA RTX A6000", BF16, 154.8),
        ("NVIDIA A10", FP16, 125),
        ("Tesla V100-SXM2-16GB", FP16, 125),
        ("Tesla V100-PCIE-32GB", FP16, 112),
        ("Tesla V100S-PCIE-32GB", FP16, 130),
        ("Tesla T4", FP16, 65),
        ("NVIDIA GeForce RTX 4090", BF16, 165.2),
        ("NVIDIA GeForce RTX 3090", BF16, 71),
        ("AMD Instinct MI300X", BF16, 1307.4),
        ("AMD Instinct MI250X", FP16, 191.5),
    ],
)
def test_peaks_are_the_dense_figures_of_the_data_sheets(name, dtype, expected):
    assert tabled_peak(name, dtype) == expected


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("Tesla V100-SXM2-16GB", BF16),
        ("Tesla T4", BF16),
        ("NVIDIA A100-SXM4-80GB", torch.float64),
        ("NVIDIA A10G", BF16),
        ("NVIDIA H800", BF16),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", BF16),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", BF16),
        ("NVIDIA GeForce RTX 4090 D", BF16),
        ("Some Future GPU", BF16),
    ],
)
def test_what_the_table_does_not_hold_has_no_peak(name, dtype):
    assert tabled_peak(name, dtype) is None


def test_a_cpu_has_no_tabled_peak():
    assert device_peak(torch.device("cpu"), FP32) is None


def test_measured_peak_counts_two_flops_per_multiply_add(monkeypatch):
    ticks = iter([0.0, 9.0, 10.0, 12.0, 20.0, 21.0])  # warm-up 9 s, then 2 s and 1 s
    monkeypatch.setattr("dschat_lora.perf.throughput.time.perf_counter", lambda: next(ticks))
    peak = measured_peak(torch.device("cpu"), FP32, size=100, rounds=2)
    assert peak == pytest.approx(2e6 / 1.0 / 1e12)
