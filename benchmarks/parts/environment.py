"""What this machine is, what it has, and its ceilings: products of matrices, and copies."""

import importlib.util
from typing import Any

import torch

from benchmarks.common.report import PartReport, print_table
from benchmarks.common.turns import DeviceTimer
from dschat_lora.engine.build import DTYPES, resolve_dtype
from dschat_lora.engine.distributed import device
from dschat_lora.perf.throughput import device_peak, measured_peak

OPTIONAL = ("peft", "datasets", "pyarrow", "sentencepiece")


def run(report: PartReport, *, tiny: bool) -> None:
    """Print and store device, optional packages and what it does at best."""
    report.store({"hardware": _hardware(), "compute_type_auto": resolve_dtype("auto")})
    installed = {name: importlib.util.find_spec(name) is not None for name in OPTIONAL}
    report.store({"optional_packages": installed})
    print(f"{_hardware()}  optional packages: {installed}")
    peaks = {name: _peak(dtype, tiny=tiny) for name, dtype in DTYPES.items()}
    copied = copy_rate(2**20 if tiny else 2**30)
    report.store({"matmul_tflops": peaks, "copy_terabytes_per_second": copied})
    rows = [[name, peak["measured"], peak["table"]] for name, peak in peaks.items()]
    print_table(["matmul", "measured TFLOP/s", "table TFLOP/s"], rows)
    print(f"copy: {copied:.3g} TB/s read and written")
    report.check("every type multiplies", all(peak["measured"] > 0 for peak in peaks.values()))


def copy_rate(elements: int, rounds: int = 5) -> float:
    """What a copy of so many fp32 numbers reads and writes, TB/s: the fastest but the first."""
    source = torch.empty(elements, dtype=torch.float32, device=device())
    target = torch.empty_like(source)
    times = []
    for _ in range(rounds + 1):
        with DeviceTimer() as timer:
            target.copy_(source)
        times.append(timer.milliseconds)
    # The clock of a CPU's processor time may not have moved.
    return 2 * source.nbytes / max(min(times[1:]), 1e-3) / 1e9


def _peak(dtype: torch.dtype, *, tiny: bool) -> dict[str, float | None]:
    size, rounds = (256, 3) if tiny else (8192, 20 if dtype.itemsize == 2 else 5)
    return {
        "measured": measured_peak(device(), dtype, size=size, rounds=rounds),
        "table": device_peak(device(), dtype),
    }


def _hardware() -> dict[str, Any]:
    if not torch.cuda.is_available():
        return {"type": "cpu", "threads": torch.get_num_threads()}
    properties = torch.cuda.get_device_properties(device())
    return {
        "type": "cuda",
        "memory_bytes": properties.total_memory,
        "multiprocessors": properties.multi_processor_count,
        "capability": f"{properties.major}.{properties.minor}",
        "cuda": torch.version.cuda,
        "devices": torch.cuda.device_count(),
    }
