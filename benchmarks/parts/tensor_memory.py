"""What a process holds of a model, and the most it holds while it reads it."""

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import psutil
import torch
from torch import Tensor
from transformers import PreTrainedModel

from benchmarks.common.bundled import make_engine
from dschat_lora.config.groups import LoraConfig, ModelConfig, ParallelConfig
from dschat_lora.data.batch import Batch
from dschat_lora.engine.build import DTYPES, TrainEngine
from dschat_lora.engine.distributed import form_grid
from dschat_lora.lora.collectives import TensorGroup
from dschat_lora.lora.model import apply_lora
from dschat_lora.models.loading import load_causal_lm, load_config
from dschat_lora.runtime.setup import tensor_group
from dschat_lora.supervised.loop import train_steps
from dschat_lora.supervised.objectives import SUPERVISED

SEED = 0


@contextmanager
def divided_among(size: int, *, sequence_parallel: bool = False) -> Iterator[TensorGroup | None]:
    """Within, so many processes hold one model between them; None of one. Call on every rank."""
    form_grid(size)
    try:
        yield tensor_group(
            ParallelConfig(tensor_parallel_size=size, sequence_parallel=sequence_parallel)
        )
    finally:
        form_grid(1)


def held(
    path: str, batch: Batch, *, tensor_parallel: int, lora_dim: int, dtype: str
) -> dict[str, int]:
    """Bytes that this process holds after a step on ``batch``; call on every rank.

    Every storage counts once. ``reading`` is the most host memory that reading the model takes.

    Args:
        path: of the model.
        batch: that is trained on.
        tensor_parallel: processes that hold the model between them.
        lora_dim: r, on every linear layer of the blocks.
        dtype: of the base.
    """
    with divided_among(tensor_parallel) as group:
        model, reading = read(path, group, dtype=dtype)
        apply_lora(model, LoraConfig(lora_dim=lora_dim), seed=SEED)
        engine = make_engine(
            model, dtype=dtype, zero_stage=0, rows=len(batch.input_ids), accumulation_steps=1
        )
        for _ in train_steps(engine, [[batch]], SUPERVISED, iter([1.0])):
            pass
        found = {
            "weights": storage_bytes(engine.module.parameters()),
            "optimizer": storage_bytes(_state_of(engine)),
            "reading": reading,
        }
        engine._engine.destroy()
    return found


def read(path: str, group: TensorGroup | None, *, dtype: str) -> tuple[PreTrainedModel, int]:
    """The model at ``path``, or this process's part, and the most host memory it took to read.

    Pages of the files themselves do not count: they are read again where they are needed.
    """
    options = ModelConfig()
    config = load_config(path, options)
    with PeakOfOwnMemory() as peak:
        model = load_causal_lm(path, config, options, dtype=DTYPES[dtype], meta=False, group=group)
    return model, peak.bytes


class PeakOfOwnMemory:
    """The most host memory that this process takes within, over what it took before.

    Looked at every millisecond: what stays for less may be missed.
    """

    bytes = 0

    def __enter__(self) -> "PeakOfOwnMemory":
        self._before, self._ended = _own_memory(), threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        ended = False
        while not ended:
            ended = self._ended.wait(1e-3)
            self.bytes = max(self.bytes, _own_memory() - self._before)


def _own_memory() -> int:
    """Resident bytes that are no pages of files."""
    memory = psutil.Process().memory_info()
    return int(memory.rss - memory.shared)


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Of distinct storages."""
    storages = (tensor.untyped_storage() for tensor in tensors)
    return sum({each.data_ptr(): each.nbytes() for each in storages}.values())


def _state_of(engine: TrainEngine) -> Iterator[Tensor]:
    for state in engine.adam.state.values():
        yield from (value for value in state.values() if isinstance(value, torch.Tensor))
