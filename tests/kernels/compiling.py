"""Compiles launches of kernels for NVIDIA's GPUs, of which none is needed.

``python tests/kernels/compiling.py`` calls the operators of :data:`CALLS` with tensors of a CPU.
Each launch is compiled by Triton and its assembler as on a GPU, and does not run. One line says of
each kernel for how many kinds of arguments it was compiled.
"""

import itertools
import os
import sys
from collections import Counter
from types import SimpleNamespace

os.environ["TRITON_INTERPRET"] = "0"

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from dschat_lora.kernels import support

RANKS, ROWS = (0, 16, 128), (8, 64)


def low_rank(dtype):
    from dschat_lora.kernels.low_rank import add_low_rank, low_rank_residual, low_rank_swiglu

    for rank, rows in itertools.product(RANKS, ROWS):
        up, products = torch.zeros(192, rank, dtype=dtype), torch.zeros(rows, 768, dtype=dtype)
        if rank:
            add_low_rank(products, up, [128, 32, 32], 0.5, False)
            add_low_rank(products, up, [192], 0.5, True)
        factors = up if rank else None
        low_rank_residual(products, factors, 0.5, torch.zeros(rows, 192, dtype=dtype))
        low_rank_swiglu(products, factors, 0.5, 96)


def heads(dtype):
    from dschat_lora.kernels.heads import place_heads

    for rank, rows, fancy in itertools.product(RANKS, ROWS, (False, True)):
        products = torch.zeros(rows, 4 * 64 + 3 * rank, dtype=dtype)
        parts = [x.unflatten(1, (-1, 64)) for x in products[:, :256].split([128, 64, 64], 1)]
        up = torch.zeros(256, rank, dtype=dtype) if rank else None
        angles = [torch.zeros(rows, 64, dtype=dtype) if fancy else None] * 2
        norms = [torch.zeros(64, dtype=dtype) if fancy else None] * 2
        stores = torch.zeros(2, rows, 1, 128, 64, dtype=dtype)
        where = torch.zeros(1, dtype=torch.int64).expand(rows)
        inner = products[:, 256:] if rank else None
        place_heads(*parts, inner, up, 0.5, *angles, *norms, 1e-5, *stores, where)


def rounding(dtype):
    from dschat_lora.kernels.rounding import FORMATS, round_at_random

    if dtype in FORMATS:
        round_at_random(torch.zeros(4096, dtype=dtype), torch.zeros(4096), 2**32 - 1)


def norms(dtype):
    from dschat_lora.kernels.norms import rms_norm_rows

    for size in (96, 4096):
        rms_norm_rows(torch.zeros(8, size, dtype=dtype), torch.zeros(size, dtype=dtype), 1e-5)


def attention(dtype):
    from dschat_lora.kernels.attention import COPIES, attend_columns, combine_parts

    for heads, splits, size in itertools.product((1, 4), (1, 2), (64, 128)):
        query, stores = (
            torch.zeros(8, 2 * heads, size, dtype=dtype),
            torch.zeros(2, 8, 2, 256, size, dtype=dtype),
        )
        first = torch.zeros(8, dtype=torch.int64)
        for tiles in (None, torch.zeros(2, COPIES, dtype=torch.int64)):
            counts = splits, 0 if tiles is None else splits
            parts, sums = attend_columns(
                query, *stores, first, first, first, tiles, 0.5, 100, *counts
            )
            if sum(counts) > 1:
                combine_parts(parts, sums, first, first, query, splits)


def sampling(dtype):
    from dschat_lora.kernels.sampling import draw_tokens

    tables = [torch.ones(9, 4, dtype=kind) for kind in (torch.float64, torch.int64, torch.float32)]
    where, number = torch.zeros(8, dtype=torch.int64), torch.zeros(1, dtype=torch.int64).expand(8)
    for vocabulary, kept in itertools.product((500, 150_000), (None, tables[2])):
        logits = torch.zeros(8, vocabulary, dtype=dtype)
        draw_tokens(logits, 0.7, tables[0], where, number, tables[1], kept)


def swiglu(dtype):
    from dschat_lora.kernels.swiglu import swiglu, swiglu_backward

    x = torch.zeros(3, 100, dtype=dtype)
    swiglu(x, x)
    for product in (None, x):
        swiglu_backward(x, x, x, product)


def rotary(dtype):
    from dschat_lora.kernels.rotary import rotate

    for size, transposed in itertools.product((64, 80, 128), (False, True)):
        q, k = (torch.zeros(1, heads, 5, size, dtype=dtype) for heads in (12, 4))
        table = torch.zeros(1, 5, size, dtype=dtype)
        rotate(q, k, table, table, transposed)


# What calls operators with tensors of a type.
CALLS = [low_rank, heads, norms, attention, sampling, swiglu, rotary, rounding]


def compile_all(capability, names):
    """Launches by kernel, each compiled for cards of a compute capability."""
    support.ON_CPU, counts, plain = True, Counter(), JITFunction.run
    target = GPUTarget("cuda", capability, 32)
    card = SimpleNamespace(
        get_current_target=lambda: target,
        get_current_device=lambda: 0,
        get_current_stream=lambda _: 0,
    )
    triton.runtime.driver.set_active(card)

    def compile_only(self, *args, grid, warmup, **options):
        kernel = plain(self, *args, grid=grid, warmup=True, **options)
        assert len(kernel.asm["cubin"]) > 0
        counts[self.fn.__name__] += 1

    JITFunction.run = compile_only
    for call in CALLS:
        if not names or call.__name__ in names:
            for dtype in (torch.bfloat16, torch.float32):
                call(dtype)
    return counts


if __name__ == "__main__":
    capability, *names = sys.argv[1:]
    for name, count in compile_all(int(capability), names).items():
        print(name, count)  # noqa: T201
