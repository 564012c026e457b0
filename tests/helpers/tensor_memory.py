"""What the processes of :class:`helpers.ranks.Ranks` hold of a divided model."""

import threading

import numpy as np
import psutil
import torch

from dschat_lora.config.groups import LoraConfig, ModelConfig
from dschat_lora.data.batch import SampleCollator
from dschat_lora.data.samples import SequenceSample
from dschat_lora.lora.model import apply_lora
from dschat_lora.models.loading import load_causal_lm, load_config
from dschat_lora.supervised.objectives import SUPERVISED
from helpers.engines import make_engine
from helpers.steps import train_steps
from helpers.tensor_parallel import divided


def hold(path, tensor_parallel):
    """Bytes of distinct storages after a step on a row of 16 tokens, and the most to read them."""
    ids = np.arange(4, 20, dtype=np.int32)
    batch = SampleCollator(1)([[SequenceSample.of(ids, ids)]])
    options = ModelConfig()
    config = load_config(path, options)
    with divided(tensor_parallel) as group:
        with PeakOfOwnMemory() as peak:
            model = load_causal_lm(
                path, config, options, dtype=torch.float32, meta=False, group=group
            )
        apply_lora(model, LoraConfig(lora_dim=8), seed=0)
        engine = make_engine(model, dtype="fp32", rows=1, accumulation_steps=1)
        for _ in train_steps(engine, [[batch]], SUPERVISED, iter([1.0])):
            pass
        states = [value for state in engine.adam.state.values() for value in state.values()]
        taken = {
            "weights": storage_bytes(engine.module.parameters()),
            "optimizer": storage_bytes(filter(torch.is_tensor, states)),
            "reading": peak.bytes,
        }
        engine._engine.destroy()
    return taken


def storage_bytes(tensors):
    storages = (tensor.untyped_storage() for tensor in tensors)
    return sum({each.data_ptr(): each.nbytes() for each in storages}.values())


class PeakOfOwnMemory:
    """The most host memory that this process takes within, over what it took before.

    Pages of files do not count. Looked at every millisecond: what stays for less may be missed.
    """

    bytes = 0

    def __enter__(self):
        self._before, self._ended = _own_memory(), threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._ended.set()
        self._thread.join()

    def _watch(self):
        ended = False
        while not ended:
            ended = self._ended.wait(1e-3)
            self.bytes = max(self.bytes, _own_memory() - self._before)


def _own_memory():
    memory = psutil.Process().memory_info()
    return memory.rss - memory.shared
