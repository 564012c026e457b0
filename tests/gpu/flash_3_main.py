"""Compares FlashAttention 3 with torch's kernel on long rows of this GPU, against fp32, as JSON."""

import json
import sys

import torch
import torch.nn.functional as F

from dschat_lora.algos.segments import make_spans
from dschat_lora.models import attention

GPU = torch.device("cuda")
LENGTHS = [(4200,), (700,)]


def values_of(attend, *tensors):
    """The output, and gradients of a weighted sum of it, as vectors of fp32."""
    leaves = [x.detach().requires_grad_() for x in tensors]
    output = attend(*leaves)
    weights = torch.linspace(-1, 1, output.numel(), device=GPU).view(output.shape)
    gradients = torch.autograd.grad((output.float() * weights).sum(), leaves)
    return [x.detach().float().flatten() for x in (output, *gradients)]


def exact(query, key, value, window):
    outputs = []
    for parts in zip(
        *(x.split([n for (n,) in LENGTHS], 2) for x in (query, key, value)), strict=True
    ):
        size = parts[0].shape[2]
        seen = torch.ones(size, size, dtype=torch.bool, device=GPU).tril()
        seen = seen if window is None else seen.triu(1 - window)
        attended = F.scaled_dot_product_attention(*parts, seen, enable_gqa=True)
        outputs.append(attended.transpose(1, 2))
    return torch.cat(outputs, 1)


def main():
    errors = []
    spans = make_spans([LENGTHS], sum(n for (n,) in LENGTHS)).to(GPU)
    for size, window in ((64, None), (128, None), (128, 1000)):
        torch.manual_seed(0)
        query, key, value = (torch.randn(1, n, 4900, size, device=GPU) for n in (8, 2, 2))
        truth = values_of(lambda *x, of=window: exact(*x, of), query, key, value)
        narrow = [x.bfloat16() for x in (query, key, value)]
        entry = {"case": f"heads of {size}, window {window}"}
        for name, least in (("flash 3", 4096), ("torch", 2**31)):
            attention.LONG = least
            values = values_of(
                lambda *x, of=window: attention.varlen_attend(*x, spans, scaling=None, window=of),
                *narrow,
            )
            pairs = zip(values, truth, strict=True)
            entry[name] = [float((a - b).norm() / b.norm()) for a, b in pairs]
        errors.append(entry)
    json.dump(errors, sys.stdout)


main()
