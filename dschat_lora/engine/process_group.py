"""Joining the process group of a launch, and leaving it in order."""

import gc
import os
import sys

import torch.distributed as dist

from dschat_lora.engine import failure_detection, gpu
from dschat_lora.engine.distributed import (
    TIMEOUT,
    _engines,
    destroy_engines,
    device,
    form_context,
    form_grid,
    grid,
    local_rank,
)
from dschat_lora.engine.rendezvous import complete_launch_variables, settle_port


def init_distributed() -> str | None:
    """Join the process group of the launcher, or form one of a single process without it.

    A single host whose MASTER_PORT is taken moves to a free port.

    Returns:
        What a log is to say of this process's GPU, if anything.

    Raises:
        ValueError: if the processes cannot meet, or a GPU is here that torch cannot use.
    """
    complete_launch_variables()
    import deepspeed  # late: GLUE can do without it
    from deepspeed.accelerator import get_accelerator

    if os.environ["WORLD_SIZE"] == "1":
        settle_port()
    failure_detection.join()
    note = None
    if get_accelerator().device_name() == "cuda":
        note = gpu.allow_expandable_segments(local_rank())
    if device().type != "cpu":
        get_accelerator().set_device(local_rank())
    # Compiled at the first use on CPU, for inference alone. A compile that is killed leaves a
    # lock on which every later run waits without a word.
    before = os.dup(2)
    with open(os.devnull, "w", encoding="utf-8") as nowhere:
        os.dup2(nowhere.fileno(), 2)  # the first use tries what can be compiled
    try:
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    finally:
        os.dup2(before, 2)
        os.close(before)
    hook = sys.excepthook
    try:
        deepspeed.init_distributed(timeout=TIMEOUT, verbose=False)
    except dist.DistNetworkError as error:
        port = os.environ["MASTER_PORT"]
        raise ValueError(
            f"the processes cannot connect at {os.environ['MASTER_ADDR']}:{port}, perhaps because "
            "another run took the port; start again, or choose one with: deepspeed --master_port "
            f"PORT ... ({error})"
        ) from error
    # Torch puts ``[rank0]:`` before tracebacks, and does so again in each group.
    names_the_rank = getattr(hook, "__module__", None) == dist.distributed_c10d.__name__
    if names_the_rank or os.environ["WORLD_SIZE"] == "1":
        sys.excepthook = hook
    return note


def shutdown() -> None:
    """Leave the process group in order, so that no thread of it outlives it; call on every rank.

    A group ends, and its threads with it, when nothing refers to it: no engine, hook or DDP. Its
    threads drop the tensors of collectives, for which they need the interpreter; one that is left
    to do so when the interpreter ends aborts the process.
    """
    if not dist.is_initialized():
        return
    destroy_engines(list(_engines))
    gc.collect()  # engines and trainers refer to themselves
    gpu_index = device().index  # NCCL would guess it from the rank
    # Nobody leaves while another still waits for an answer.
    dist.barrier(device_ids=None if gpu_index is None else [gpu_index])
    if grid() is not None:
        form_grid(1)
    form_context(1)
    comm = sys.modules.get("deepspeed.comm.comm")
    if comm is None or comm.cdb is None:
        dist.destroy_process_group()
    else:
        comm.destroy_process_group()  # and what DeepSpeed remembers of groups
    failure_detection.leave()
