"""RMSNorm by its kernel in Triton's interpreter, against the sums written out."""

import pytest
import torch

from dschat_lora.kernels.norms import rms_norm_rows

LIMITS = {torch.float32: 1e-6, torch.bfloat16: 2**-8}


@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("shape", [(1, 16), (3, 70), (2, 257)])
def test_rows_are_normed_each_by_itself(shape, dtype, by_kernel):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(shape[0], shape[1] + 3, generator=generator).to(dtype)[:, 2:-1]
    weight = torch.randn(shape[1], generator=generator).to(dtype)
    result = rms_norm_rows(x, weight, 0.1)
    expected = x.double() / (x.double() ** 2).mean(1, keepdim=True).add(0.1).sqrt()
    expected = expected * weight.double()
    assert (result.double() - expected).norm() < LIMITS[dtype] * expected.norm()
    assert result.dtype == dtype
