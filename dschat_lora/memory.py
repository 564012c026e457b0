"""A stage's need of memory: estimated before it starts, explained when it was not enough."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from dschat_lora.checkpoint.history import checkpoints_of
from dschat_lora.config import SupervisedConfig
from dschat_lora.engine.build import EngineSettings
from dschat_lora.engine.distributed import device, world_size
from dschat_lora.models.build import AdaptedModel
from dschat_lora.perf.advice import Estimator, out_of_memory_advice
from dschat_lora.perf.memory import MemoryEstimate, estimate_memory
from dschat_lora.perf.shape import describe


def estimate_memory_of(
    adapted: AdaptedModel, config: SupervisedConfig, settings: EngineSettings
) -> int | None:
    """Bytes one device is expected to need; None for architectures that are not understood."""
    estimator = make_estimator(adapted, config, settings)
    if estimator is None:
        return None
    estimate = estimator(
        rows=config.batch.per_device_train_batch_size,
        length=config.data.max_seq_len,
        gradient_checkpointing=config.model.gradient_checkpointing,
        zero_stage=settings.zero_stage,
    )
    return estimate.total - (estimate.optimizer if settings.offload else 0)


def make_estimator(
    adapted: AdaptedModel, config: SupervisedConfig, settings: EngineSettings
) -> Estimator | None:
    """The memory estimate of this model; None for architectures that are not understood.

    Its ``length`` is ``--max_seq_len``, of which a row of pairs holds two.
    """
    try:
        describe(adapted.model)
    except ValueError:
        return None
    sequences = config.max_row_tokens // config.data.max_seq_len

    def estimate(*, length: int, **options: Any) -> MemoryEstimate:
        return estimate_memory(
            adapted.model,
            length=length * sequences,
            compute_dtype=settings.torch_dtype,
            world_size=world_size(),
            **options,
        )

    return estimate


@contextmanager
def explaining_memory(
    adapted: AdaptedModel, config: SupervisedConfig, settings: EngineSettings, directory: Path
) -> Iterator[None]:
    """Inside the block, running out of GPU memory says what to change, and where to go on.

    Any rank may run out alone, so nothing is asked of the others.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        here = device()
        total = torch.cuda.get_device_properties(here).total_memory if here.type == "cuda" else None
        advice = out_of_memory_advice(
            make_estimator(adapted, config, settings),
            device_bytes=total,
            micro_batch_size=config.batch.per_device_train_batch_size,
            accumulation_steps=config.batch.gradient_accumulation_steps,
            max_seq_len=config.data.max_seq_len,
            gradient_checkpointing=config.model.gradient_checkpointing,
            zero_stage=settings.zero_stage,
            world_size=world_size(),
            offload=settings.offload,
            trains_base=adapted.lora.lora_dim == 0 or not adapted.lora.only_optimize_lora,
            lora_dim=adapted.lora.lora_dim,
            dtype=settings.dtype,
        )
        if found := checkpoints_of(directory):
            advice += f". The newest checkpoint is {found[0]}"
        raise torch.OutOfMemoryError(advice) from error
