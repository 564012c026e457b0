"""How much of a cache decoding attention reads, where each row reads its own columns.

``python scripts/columns_read.py`` decodes on a CPU as on a GPU of 132 multiprocessors, with answers
of log-normal lengths, and counts in each step what the kernels of
:mod:`dschat_lora.kernels.attention` load for one layer, against what a masked call loads for the
same step: as many columns of each row in use as the step's shape has. Keys, values and, where
parts are combined, what is written and read for it are counted, in whole blocks of columns.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from dschat_lora.generation import generate, kv_cache
from dschat_lora.generation.generate import GPU_POLL, Decoder
from dschat_lora.generation.sampling import Responses, Sampling
from dschat_lora.kernels import support
from dschat_lora.kernels.attention import OwnColumns, blocks, splits_of

PROCESSORS = 132
LENGTHS: dict[str, Any] = {"median": 256, "most": 1024, "prompt": (128, 256)}  # in tokens
KEY_HEADS, HEADS, SIZE, BYTES = 8, 4, 128, 2  # of Llama-3-8B: heads are of one key head


def columns_read(columns: OwnColumns, *, copies: int, block: int = 1) -> Tensor:
    """(programs,) columns of one key head that each row, and each tile of ``copies``, reads.

    They are rounded up to whole blocks. Of a row that is split it is the sum.
    """
    end = columns.last + 1
    begin = columns.first
    if columns.window is not None:
        begin = torch.maximum(begin, end - columns.window)
    counts = [end - torch.maximum(begin, columns.own)]
    if columns.tiles is not None:
        tiles = columns.tiles.view(-1, copies)
        there, shared = tiles >= 0, torch.minimum(end, columns.own)
        start = begin[tiles].masked_fill(~there, torch.iinfo(torch.int64).max).amin(1)
        stop = shared[tiles].masked_fill(~there, 0).amax(1)
        counts.append(torch.where(there.any(1), stop - start, 0))
    return -(-torch.cat(counts).clamp(min=0) // block) * block


@dataclass
class Counted:
    """Bytes of one layer, of all steps; ``exact`` without what masks leave of a block's columns."""

    steps: int = 0
    masked: int = 0
    exact: int = 0
    blocks: int = 0
    combined: int = 0

    def note(self, shape: torch.Size, columns: OwnColumns) -> None:
        """Count a step whose keys have this shape, as one of Llama-3-8B's."""
        rows, _, width, _ = shape
        _, _, copies, block = blocks(SIZE, BYTES, HEADS)
        of_column = 2 * KEY_HEADS * SIZE * BYTES
        self.steps += 1
        self.masked += rows * width * of_column
        self.exact += int(columns_read(columns, copies=copies).sum()) * of_column
        self.blocks += int(columns_read(columns, copies=copies, block=block).sum()) * of_column
        splits = splits_of((rows, KEY_HEADS, width, SIZE), PROCESSORS, columns.tiles is not None)
        if sum(splits) > 1:
            shared = int((columns.own > columns.first).sum())
            parts = (rows * splits[0] + shared * splits[1]) * KEY_HEADS * HEADS
            self.combined += 2 * parts * (SIZE + 1) * 4

    @property
    def share(self) -> float:
        """What is read, of what a masked call reads."""
        return (self.blocks + self.combined) / self.masked


@contextmanager
def counting(lengths: list[int]) -> Iterator[Counted]:
    """Within, decoding on a CPU has a GPU's shapes, answers of those lengths, and no attention."""
    counted = Counted()

    def attend(query: Tensor, key: Tensor, value: Tensor, columns: OwnColumns, **_: Any) -> Tensor:
        counted.note(key.shape, columns)
        return torch.zeros_like(query)

    class Limited(Responses):
        def start(self, seeds: Any, limits: Any = None) -> None:
            super().start(seeds, lengths)

    with (
        mock.patch.object(support, "PLAIN_ON_CPU", True),
        mock.patch.object(kv_cache, "attend_own_columns", attend),
        mock.patch.object(generate, "Responses", Limited),
        mock.patch.object(generate, "CPU_POLL", GPU_POLL),
    ):
        yield counted


def decoded(
    *, rows: int, responses: int, copies: int, median: int, most: int, prompt: tuple[int, int]
) -> Counted:
    """Responses of log-normal lengths (sigma 0.8) to prompts of between so many tokens.

    Of more responses than rows, those that end make room for others.
    """
    generator = torch.Generator().manual_seed(0)
    normal = torch.randn(responses, generator=generator)
    lengths = (median * (0.8 * normal).exp()).round().clamp(1, most).long().tolist()
    low, high = prompt
    widths = torch.randint(low, high + 1, (responses // copies,), generator=generator).tolist()
    prompts = [[5 + n % 50] * width for n, width in enumerate(widths)]
    config = LlamaConfig(
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        vocab_size=64,
        max_position_embeddings=high + most,
    )
    decoder = Decoder(
        LlamaForCausalLM(config).eval(),
        eos_ids=(),
        pad_id=0,
        device=torch.device("cpu"),
        largest=(rows, high + most),
        record=lambda step: step,  # shapes are those of recorded steps
    )
    seeds = [list(range(copies)) for _ in prompts]
    limits = [most] * len(prompts)
    with counting(lengths) as counted:
        decoder(prompts, Sampling(most, do_sample=False), seeds=seeds, limits=limits)
    return counted


def main() -> None:
    """Print what is read of what a masked call reads, by kind of batch and answers a prompt."""
    for name, responses in (("a batch of 64 rows", 64), ("256 responses in 64 rows", 256)):
        for copies in (1, 8):
            found = decoded(rows=64, responses=responses, copies=copies, **LENGTHS)
            exact = (found.exact + found.combined) / found.masked
            print(
                f"{name}, {copies} answers a prompt: {found.share:.3f} of "
                f"{found.masked / 1e9:.0f} GB a layer in {found.steps} steps "
                f"({found.combined / found.masked:.3f} for parts; {exact:.3f} by columns)"
            )


if __name__ == "__main__":
    main()
