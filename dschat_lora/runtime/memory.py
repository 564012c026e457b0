"""Memory of a run of one trained model or several, estimated before it starts."""

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil
import torch
from torch import nn

from dschat_lora.algos.logprobs import MAX_CHUNK_LOGITS, MAX_CHUNK_LOGITS_CPU
from dschat_lora.checkpoint.history import checkpoints_of
from dschat_lora.config.addons import load, provided
from dschat_lora.config.stages import StageConfig
from dschat_lora.engine.build import EngineSettings
from dschat_lora.engine.distributed import (
    data_world_size,
    device,
    device_type,
    max_over_ranks,
    planned_varlen,
)
from dschat_lora.models.backbone import Backbone
from dschat_lora.perf.launches import PassSeconds, pass_seconds
from dschat_lora.perf.memory import (
    MemoryEstimate,
    estimate_memory,
    offloaded_bytes,
    parameter_bytes,
    rows_of,
)
from dschat_lora.perf.throughput import device_peak

GIB = 2**30
# TFLOP/s of 16 bits of a GPU that no table has: they weigh launches against work.
UNKNOWN_PEAK = 150.0


@dataclass(frozen=True)
class TrainedModel:
    """A model that trains, before it is sharded, and the full micro-batches it trains on."""

    model: nn.Module
    settings: EngineSettings
    rows: int
    length: int  # positions of a sequence
    recomputes: bool  # its blocks, in the backward pass
    tokens: int = 0  # of a micro-batch, which stand in for rows; 0: by rows
    sequences: int = 1  # of a row
    offloads: bool = False  # the inputs of its blocks, where they are recomputed
    logit_bytes: int | None = None  # of a loss over whole distributions; None: cross-entropy
    processes: int = 1  # that divide the tokens of a row

    def estimated(self) -> MemoryEstimate:
        """Bytes per device as it trains; see :func:`estimate_memory`."""
        rows, length = self.grid(self.rows, self.length)
        settings = self.settings
        small = device_type() == "cpu" and self.logit_bytes is None
        masks = 0  # where processes attend to sequences one by one
        if self.processes == 1:
            masks = Backbone(self.model).mask_bytes(
                device() if planned_varlen() is None else None,
                length=length,
                recomputes=self.recomputes,
                sharded=settings.zero_stage == 3,
            )
        return estimate_memory(
            self.model,
            rows=rows,
            length=length,
            compute_dtype=settings.torch_dtype,
            gradient_checkpointing=self.recomputes,
            zero_stage=settings.zero_stage,
            world_size=data_world_size(),
            offload=settings.offload,
            offload_activations=self.offloads,
            accumulates=settings.accumulation_steps > 1,
            chunk_logits=MAX_CHUNK_LOGITS_CPU if small else MAX_CHUNK_LOGITS,
            logit_bytes=self.logit_bytes,
            context_parallel_size=self.processes,
            mask_bytes=masks,
            has_temporaries=device_type() == "cpu",  # a GPU's share beyond USABLE is for these
            **settings.gathering(),
        )

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory that the inputs of its blocks take."""
        if not (self.offloads and self.recomputes):
            return 0
        rows, length = self.grid(self.rows, self.length)
        positions = -(-rows * length // self.processes)
        return offloaded_bytes(
            self.model, positions=positions, compute_dtype=self.settings.torch_dtype
        )

    def seconds(self, peak: float, *, fused: bool) -> PassSeconds:
        """Time of a full micro-batch on a GPU; see :func:`pass_seconds`."""
        rows, length = self.grid(self.rows, self.length)
        return pass_seconds(
            self.model,
            tokens=rows * length // self.length * self.length,
            length=self.length,
            peak=peak,
            recomputes=self.recomputes,
            fused=fused,
        )

    def grid(self, rows: int, length: int) -> tuple[int, int]:
        """Rows and positions of each in a micro-batch."""
        length *= self.sequences
        return rows_of(self.tokens, length) if self.tokens else (rows, length)


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes on one device, by what they hold."""

    weights: int  # of all models, each shared tensor once
    separate_weights: int  # what models would take that share no tensors
    training: int  # gradients and optimizer state, and a moving average
    update: int  # activations and a chunk of logits, for full rows; what ZeRO 3 gathers
    cache: int  # keys and values of responses decoded at a time; at ZeRO 3 whole weights too
    keeps_cache: bool = False  # while weights are updated
    host: int = 0  # inputs of recomputed blocks, which are on the host
    graphs: int = 0  # activations that CUDA graphs of training keep

    @property
    def peak(self) -> int:
        """The most at a time: decoding and updating take turns."""
        kept = self.cache if self.keeps_cache else 0
        return max(self.updating + kept, self.decoding)

    @property
    def updating(self) -> int:
        """The most during an update, which recomputed activations reduce."""
        return self.weights + self.training + self.graphs + self.update

    @property
    def decoding(self) -> int:
        """The most while responses are drawn."""
        return self.weights + self.training + self.graphs + self.cache

    def line(self, *, of_parts: bool) -> str:
        """The plan in words, for the log; ``of_parts`` says what takes how much."""
        most = f"memory       up to {self.peak / GIB:.3g} GiB per device by estimate"
        graphs = f", CUDA graphs {self.graphs / GIB:.3g}" if self.graphs else ""
        if not of_parts:
            return f"{most}, for full rows{graphs}{self.host_words}"
        saved = self.separate_weights - self.weights
        shared = f" (as separate models: {self.separate_weights / GIB:.3g})" if saved else ""
        return (
            f"{most}: weights {self.weights / GIB:.3g}{shared}, gradients and optimizer "
            f"{self.training / GIB:.3g}{graphs}, update {self.update / GIB:.3g}, KV cache "
            f"{self.cache / GIB:.3g}{', kept' if self.keeps_cache else ''}{self.host_words}"
        )

    @property
    def host_words(self) -> str:
        """What else is in host memory, for the log; empty where nothing is."""
        return f"; inputs of blocks {self.host / GIB:.3g} GiB in host memory" if self.host else ""

    def to_dict(self) -> dict[str, int]:
        """The plan as JSON."""
        return asdict(self) | {"peak": self.peak}


def peak_here(dtype: torch.dtype) -> float | None:
    """TFLOP/s to expect of this machine's device; None on a CPU."""
    return None if device_type() == "cpu" else device_peak(device(), dtype) or UNKNOWN_PEAK


def plan_memory(
    trained: Sequence[TrainedModel],
    *,
    models: Sequence[nn.Module] = (),
    averaged: int = 0,
    cache: int = 0,
) -> MemoryPlan | None:
    """The plan of a run; None for architectures that are not understood.

    ``models`` are all of them, frozen ones too (default: those that train); ZeRO 3 of the first
    trained one shards all. A moving average takes ``averaged`` bytes, whole.
    """
    try:
        estimates = [each.estimated() for each in trained]
    except ValueError:
        return None
    models = models or [each.model for each in trained]
    first = trained[0].settings
    ranks = data_world_size() if first.zero_stage == 3 else 1

    def stored(parameters: Iterable[nn.Parameter]) -> int:
        on_host = first.zero_stage == 3 and first.offload
        return 0 if on_host else parameter_bytes(parameters) // ranks

    return MemoryPlan(
        weights=stored(nn.ModuleList(models).parameters()),
        separate_weights=sum(stored(each.parameters()) for each in models),
        training=averaged // ranks + sum(e.gradients + e.optimizer for e in estimates),
        # Models that share their base gather the same weights.
        update=sum(e.activations + e.loss + e.temporaries + e.update for e in estimates)
        + (max if first.shares_weights else sum)(e.gathered for e in estimates)
        + max(e.unpacked for e in estimates),
        cache=cache,
        host=sum(each.host_bytes for each in trained),
    )


def free_memory() -> int:
    """Bytes that are free on the fullest device, or of the host's equal shares; on every rank.

    Call it before any rank loads a model: what the estimate counts must not be in use already.
    """
    if device().type == "cuda":
        mine = torch.cuda.mem_get_info(device())[0]
    else:
        mine = psutil.virtual_memory().available // int(os.environ["LOCAL_WORLD_SIZE"])
    return -int(max_over_ranks(-float(mine)))


def offloads_inputs(config: StageConfig) -> bool:
    """Whether inputs of recomputed blocks leave the device; on a CPU they only change places."""
    return config.parallel.offload_activations and device_type() == "cuda"


def advice(occasion: str, *facts: object) -> str | None:
    """What an add-on advises on an occasion of a run, by its facts; None where none does."""
    path = provided("advice").get(occasion)
    return None if path is None else load(path)(*facts)


@contextmanager
def explaining_memory(
    directory: Path, plan: MemoryPlan | None, occasion: str, *facts: object
) -> Iterator[None]:
    """Raise an out-of-memory error of the block anew, with advice and the newest checkpoint.

    Any rank may run out alone, so no collective is called. Before its ``facts`` the advice of an
    ``occasion`` takes the error and the bytes of the GPU, None on a CPU.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        here = device()
        total = torch.cuda.get_device_properties(here).total_memory if here.type == "cuda" else None
        said = advice(occasion, error, total, *facts)
        if said is None:
            need = "" if plan is None else f", by estimate {plan.peak / GIB:.3g} GiB are needed"
            said = f"out of GPU memory{need}: {error}"
        if checkpoints := checkpoints_of(directory):
            said += f". The newest valid checkpoint is {checkpoints[0]}"
        raise torch.OutOfMemoryError(said) from error
