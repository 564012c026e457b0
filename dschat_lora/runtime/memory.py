"""A stage's need of memory: estimated before it starts, explained when it was not enough."""

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import combinations
from pathlib import Path
from typing import Any

import psutil
import torch

from dschat_lora.checkpoint.history import checkpoints_of
from dschat_lora.config.groups import Switch, is_on
from dschat_lora.config.stages import StageConfig, SupervisedConfig
from dschat_lora.engine.build import EngineSettings
from dschat_lora.engine.distributed import (
    broadcast_string,
    data_world_size,
    device,
    max_over_ranks,
    rank,
    world_size,
)
from dschat_lora.models.build import AdaptedModel
from dschat_lora.models.tensor_parallel_checks import check_divides, check_training
from dschat_lora.perf.advice import Estimator, out_of_memory_advice
from dschat_lora.perf.memory import USABLE, MemoryEstimate, estimate_memory, rows_of
from dschat_lora.perf.shape import describe
from dschat_lora.runtime.resume import read_state

# Names of roles that recompute their blocks -> bytes of a device that the run needs.
Need = Callable[[Sequence[str]], int]


def free_memory() -> int:
    """Bytes that are free to every process, the least of all; call on every rank.

    Those of its GPU, or an equal share of the host's. Call it before any rank loads a model: what
    the estimate counts must not be in use already.
    """
    if device().type == "cuda":
        mine = torch.cuda.mem_get_info(device())[0]
    else:
        mine = psutil.virtual_memory().available // int(os.environ["LOCAL_WORLD_SIZE"])
    return -int(max_over_ranks(-float(mine)))


def settle_recomputation(
    config: StageConfig, switches: Mapping[str, Switch], need: Need, *, free: int
) -> tuple[dict[str, bool], str | None]:
    """Whether blocks are computed again in the backward pass, and what to say of it.

    Where that is ``auto``, a resumed run does as it did unless the option is typed again, and
    another recomputes as little as fits the memory by estimate. Rank 0's decision holds; call on
    every rank.

    Args:
        config: of the stage.
        switches: its options that decide so, by name.
        need: memory with the blocks under some of these options recomputed.
        free: see :func:`free_memory`.
    """
    decided = _decide(config, switches, need, free) if rank() == 0 else None
    on, words = json.loads(broadcast_string(json.dumps(decided)))
    return {name: name in on for name in switches}, words


def _decide(
    config: StageConfig, switches: Mapping[str, Switch], need: Need, free: int
) -> tuple[list[str], str | None]:
    """Options that are on, and what to say of those that were ``auto``."""
    before = read_state(Path(config.checkpoint))["config"] if config.checkpoint else {}
    # What was auto at the checkpoint is settled there: auto is given if it was typed now.
    kept = {n: before[n] for n, v in switches.items() if v == "auto" and n in before}
    known = {n: v if n in config.given else kept.get(n, v) for n, v in switches.items()}
    on = [name for name, value in known.items() if value is True]
    undecided = [name for name, value in known.items() if value == "auto"]
    chosen = _fewest(undecided, lambda more: need([*on, *more]) <= USABLE * free)
    if not chosen:
        return on, None
    without, within = need(on), need([*on, *chosen])
    return [*on, *chosen], (
        f"activations are recomputed ({', '.join(f'--{name}' for name in chosen)}): by estimate "
        f"{_gib(without)} per device without, {_gib(within)} with, of {_gib(free)} free"
    )


def _fewest(names: Sequence[str], fits: Callable[[Sequence[str]], bool]) -> list[str]:
    """The fewest of the names that fit together; all where none do."""
    for size in range(len(names)):
        for chosen in combinations(names, size):
            if fits(chosen):
                return list(chosen)
    return list(names)


def _gib(count: int) -> str:
    return f"{count / 2**30:.3g} GiB"


def estimate_memory_of(
    adapted: AdaptedModel, config: SupervisedConfig, settings: EngineSettings
) -> int | None:
    """Bytes one device is expected to need; None for architectures that are not understood."""
    estimator = make_estimator(adapted, config, settings)
    if estimator is None:
        return None
    estimate = estimator(
        rows=_rows_at_once(config),
        length=config.data.max_seq_len,
        gradient_checkpointing=is_on(config.model.gradient_checkpointing),
        zero_stage=settings.zero_stage,
    )
    return estimate.total - (estimate.optimizer if settings.offload else 0)


def _rows_at_once(config: SupervisedConfig) -> int:
    """Full rows of a micro-batch."""
    if tokens := config.batch.tokens_per_device:
        return rows_of(tokens, config.max_row_tokens)[0]
    return config.batch.per_device_train_batch_size


def make_estimator(
    adapted: AdaptedModel, config: SupervisedConfig, settings: EngineSettings
) -> Estimator | None:
    """The memory estimate of this model; None for architectures that are not understood.

    Its ``length`` is ``--max_seq_len``, of which a row of pairs holds two. ``--tokens_per_device``
    stands in for rows.
    """
    try:
        describe(adapted.model)
    except ValueError:
        return None
    sequences = config.max_row_tokens // config.data.max_seq_len

    def estimate(*, rows: int, length: int, **options: Any) -> MemoryEstimate:
        length *= sequences
        if tokens := config.batch.tokens_per_device:
            rows, length = rows_of(tokens, length)
        return estimate_memory(
            adapted.model,
            rows=rows,
            length=length,
            compute_dtype=settings.torch_dtype,
            world_size=data_world_size(),
            **options,
        )

    return estimate


def _larger_groups(adapted: AdaptedModel, config: SupervisedConfig) -> list[int]:
    """Multiples of ``--tensor_parallel_size`` that the processes and the model allow as well."""
    size, count = config.parallel.tensor_parallel_size, world_size()
    sizes = [n for n in range(2 * size, count + 1, size) if count % n == 0]
    return [n for n in sizes if _can_divide(adapted, config, n)]


def _can_divide(adapted: AdaptedModel, config: SupervisedConfig, size: int) -> bool:
    try:
        check_divides(adapted.model.config.to_dict(), size)
        check_training(config.model, adapted.lora, size)
    except ValueError:
        return False
    return True


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
            micro_batch_size=_rows_at_once(config),
            accumulation_steps=config.batch.gradient_accumulation_steps,
            max_seq_len=config.data.max_seq_len,
            gradient_checkpointing=is_on(config.model.gradient_checkpointing),
            zero_stage=settings.zero_stage,
            world_size=data_world_size(),
            offload=settings.offload,
            trains_base=adapted.lora.lora_dim == 0 or not adapted.lora.only_optimize_lora,
            lora_dim=adapted.lora.lora_dim,
            dtype=settings.dtype,
            tensor_parallel_size=config.parallel.tensor_parallel_size,
            larger_groups=_larger_groups(adapted, config),
        )
        if tokens := config.batch.tokens_per_device:
            advice += f". Fewer than --tokens_per_device {tokens} take less, in another run"
        if found := checkpoints_of(directory):
            advice += f". The newest checkpoint is {found[0]}"
        raise torch.OutOfMemoryError(advice) from error
