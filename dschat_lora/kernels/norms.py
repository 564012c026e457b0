"""RMSNorm (arXiv:1910.07467, eq. 4) of rows in one kernel: in fp32 and rounded once."""

import torch.nn.functional as F
from torch import Tensor

from dschat_lora.kernels.support import define, next_power_of_2


def _plain(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x, weight.shape, weight, eps)


def _kernel(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    from dschat_lora.kernels.norms_kernels import rms_norm_kernel

    rows, size = x.shape
    output = x.new_empty(rows, size)
    assert x.stride(1) == 1
    width = next_power_of_2(size)
    if rows:
        warps = min(16, max(1, width // 256))
        arguments = (x, weight, output, x.stride(0), size, eps)
        rms_norm_kernel[(rows,)](*arguments, WIDTH=width, num_warps=warps)
    return output


# x (N, H), weight (H,).
rms_norm_rows = define("rms_norm_rows", _kernel, plain=_plain)
