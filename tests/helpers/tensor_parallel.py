"""Models and rows divided among processes of ``Ranks``, and what must not depend on that."""

from contextlib import contextmanager

import torch

from dschat_lora.config.groups import ParallelConfig
from dschat_lora.engine.distributed import context, form_context, form_grid, rank
from dschat_lora.lora.collectives import ContextGroup
from dschat_lora.lora.parallel import group_of, shard_of
from dschat_lora.runtime.setup import tensor_group


@contextmanager
def divided(size, *, sequence_parallel=False):
    """Within, so many processes hold one model; yields their group, None for one."""
    form_grid(size)
    try:
        yield tensor_group(
            ParallelConfig(tensor_parallel_size=size, sequence_parallel=sequence_parallel)
        )
    finally:
        form_grid(1)


@contextmanager
def divided_rows(size):
    """Within, so many processes divide the tokens of rows; yields their group, None for one."""
    form_context(size)
    try:
        yield ContextGroup(context(), rank() % size, size) if size > 1 else None
    finally:
        form_context(1)


def replicas_differ(model):
    """Names of the parameters that each rank of the group holds, and that are not the same bits."""
    group = group_of(model)
    if group is None:
        return []
    return [
        name
        for name, parameter in model.named_parameters()
        if shard_of(parameter) is None and not _same(group.gather(_here(parameter)))
    ]


def _here(parameter):
    """What this process holds of a parameter, which ZeRO 3 may have cut."""
    return getattr(parameter, "ds_tensor", parameter).detach()


def _same(copies):
    return all(torch.equal(each, copies[0]) for each in copies)
