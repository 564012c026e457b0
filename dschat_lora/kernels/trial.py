"""A first launch of a kernel, which shows whether this machine compiles any."""

import warnings

import torch

from dschat_lora.kernels import norms, support


def try_kernels(device: torch.device) -> None:
    """Have no kernels run in this process, and warn, where ``device`` does not launch one."""
    if not support.runs_kernels(device):
        return
    row = torch.ones(1, 16, device=device)
    failures: tuple[type[Exception], ...] = (RuntimeError, *support.errors(device))
    try:
        norms.rms_norm_rows(row, row[0], 1e-5)
    except failures as error:
        support.OFF = True
        reason = f"{type(error).__name__}: {error}"
        warnings.warn(f"computing without kernels in Triton, more slowly: {reason}", stacklevel=2)
