"""Matmul peaks of GPUs by name, as vendors' data sheets state them."""

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

USABLE = 0.9  # of a device's memory; the rest is for temporaries and fragmentation
# Part of the device's name -> dense TFLOP/s (fp16, bf16, fp32), accumulating in fp32; the first
# match counts. fp32 is without TF32, as torch multiplies by default. Figures of the vendors' data
# sheets and architecture white papers, where those give sparse figures half of them.
_PEAKS: tuple[tuple[str, float | None, float | None, float | None], ...] = (
    (r"\bB200\b", 2250, 2250, 75),  # NVIDIA DGX/HGX B200 data sheets
    (r"\bGH200\b", 989.4, 989.4, 66.9),  # NVIDIA GH200 data sheet
    (r"\bH200 NVL\b", 835.5, 835.5, 60),  # NVIDIA H200 data sheet
    (r"\bH200\b", 989.4, 989.4, 66.9),
    (r"\bH100 NVL\b", 835.5, 835.5, 60),  # NVIDIA H100 data sheet
    (r"\bH100 PCIE\b", 756, 756, 51.2),
    (r"\bH100\b", 989.4, 989.4, 66.9),  # the SXM5 module names no form factor
    (r"\bA100\b", 312, 312, 19.5),  # NVIDIA A100 data sheet; PCIe and SXM4 alike
    (r"\bL40S\b", 362, 362, 91.6),  # NVIDIA L40S data sheet
    (r"\bL40\b", 181, 181, 90.5),
    (r"\bL4\b", 121, 121, 30.3),
    (r"\bRTX 6000 ADA\b", 364.2, 364.2, 91.1),  # NVIDIA RTX 6000 Ada data sheet
    (r"\bA6000\b", 154.8, 154.8, 38.7),  # NVIDIA RTX A6000 data sheet
    (r"\bA40\b", 149.7, 149.7, 37.4),
    (r"\bA30\b", 165, 165, 10.3),
    (r"\bA10\b", 125, 125, 31.2),  # NVIDIA A10 data sheet
    (r"\bRTX 4090\b", 165.2, 165.2, 82.6),  # NVIDIA Ada architecture white paper
    (r"\bRTX 3090\b", 71, 71, 35.6),  # NVIDIA GA102 architecture white paper
    (r"\bV100S\b", 130, None, 16.4),  # NVIDIA V100 data sheet; no bf16, no CUDA 13
    (r"\bV100-PCIE\b", 112, None, 14),
    (r"\bV100\b", 125, None, 15.7),
    (r"\bT4\b", 65, None, 8.1),  # NVIDIA T4 data sheet
    (r"\bMI300X\b", 1307.4, 1307.4, 163.4),  # AMD Instinct MI300X data sheet, matrix figures
    (r"\bMI300A\b", 980.6, 980.6, 122.6),
    # A device is one of the two dies of these cards, so half of the data sheet's figure.
    (r"\bMI250X\b", 191.5, 191.5, 47.9),
    (r"\bMI250\b", 181, 181, 45.3),
    (r"\bMI210\b", 181, 181, 45.3),
)
# Slower parts which carry the name of a faster one.
_UNLIKE = re.compile(r"\bMIG\b|LAPTOP|MAX-Q|MOBILE|4090 D\b|3090 TI\b")


def tabled_peak(device_name: str, dtype: "torch.dtype") -> float | None:
    """Dense matmul peak in TFLOP/s, or None where the device or its type is not in the table.

    ``device_name`` is as ``torch.cuda.get_device_name`` gives it.
    """
    name = device_name.upper()
    if _UNLIKE.search(name):
        return None
    for pattern, half, brain, single in _PEAKS:
        if re.search(pattern, name):
            rates = {"float16": half, "bfloat16": brain, "float32": single}
            return rates.get(str(dtype).removeprefix("torch."))
    return None
