"""What this machine is, what it has, and what it multiplies at best."""

import importlib.util
from typing import Any

import torch

from benchmarks.parts.report import PartReport, print_table
from dschat_lora.engine.build import DTYPES, resolve_dtype
from dschat_lora.engine.distributed import device
from dschat_lora.perf.peak import device_peak, measured_peak

OPTIONAL = ("peft", "datasets", "pyarrow", "sentencepiece")


def run(report: PartReport, *, tiny: bool) -> None:
    """Print and store device, optional packages and the matmul peak of each type."""
    report.store({"hardware": _hardware(), "compute_type_auto": resolve_dtype("auto")})
    found = {name: importlib.util.find_spec(name) is not None for name in OPTIONAL}
    report.store({"optional_packages": found})
    print(f"{_hardware()}  optional packages: {found}")
    peaks = {name: _peak(dtype, tiny=tiny) for name, dtype in DTYPES.items()}
    report.store({"matmul_tflops": peaks})
    rows = [[name, peak["measured"], peak["table"]] for name, peak in peaks.items()]
    print_table(["matmul", "measured TFLOP/s", "table TFLOP/s"], rows)
    report.check("every type multiplies", all(peak["measured"] > 0 for peak in peaks.values()))


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
