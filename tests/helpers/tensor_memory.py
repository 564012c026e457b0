"""What the processes of :class:`helpers.ranks.Ranks` hold of a divided model."""

import numpy as np

from benchmarks.parts.tensor_memory import held
from dschat_lora.data.batch import SampleCollator
from dschat_lora.data.samples import SequenceSample


def hold(path, tensor_parallel):
    """As :func:`benchmarks.parts.tensor_memory.held`, after a step on a row of 16 tokens."""
    ids = np.arange(4, 20, dtype=np.int32)
    batch = SampleCollator(1)([[SequenceSample.of(ids, ids)]])
    return held(path, batch, tensor_parallel=tensor_parallel, lora_dim=8, dtype="fp32")
