"""Joining the process group, and the few collectives the package needs."""

import gc
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol
from weakref import WeakSet

import torch
import torch.distributed as dist

from dschat_lora.engine import failure_detection, gpu
from dschat_lora.engine.rendezvous import complete_environment, settle_port

# Of a collective. That a peer is lost is known long before, by engine/failure_detection.py.
TIMEOUT = timedelta(hours=2)


def init_distributed() -> str | None:
    """Join the process group of the launcher, or form one of a single process without it.

    A single host whose MASTER_PORT is taken moves to a free port.

    Returns:
        What a log is to say of this process's GPU, if anything.

    Raises:
        ValueError: if the processes cannot meet, or a GPU is here that torch cannot use.
    """
    complete_environment()
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
    with _silent_stderr():  # the first use tries what can be compiled
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    hook = sys.excepthook
    try:
        deepspeed.init_distributed(timeout=TIMEOUT, verbose=False)
    except dist.DistNetworkError as error:
        port = os.environ["MASTER_PORT"]
        raise ValueError(
            f"the processes cannot meet at {os.environ['MASTER_ADDR']}:{port}, perhaps because "
            f"another run took the port; start again, or choose one with: deepspeed "
            f"--master_port PORT ... ({error})"
        ) from error
    if _names_the_rank(hook) or os.environ["WORLD_SIZE"] == "1":
        sys.excepthook = hook
    return note


@contextmanager
def _silent_stderr() -> Iterator[None]:
    """A block whose processes write no errors; the kernel of a notebook would show them."""
    before = os.dup(2)
    with open(os.devnull, "w", encoding="utf-8") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(before, 2)
        os.close(before)


def _names_the_rank(hook: Any) -> bool:
    """Whether torch has put ``[rank0]:`` before tracebacks already; it does so in each group."""
    return getattr(hook, "__module__", None) == dist.distributed_c10d.__name__


class Destroyable(Protocol):
    """An engine of DeepSpeed."""

    def destroy(self) -> None:
        """Remove the hooks that lead from the model back to the engine."""


_engines: WeakSet[Destroyable] = WeakSet()


def destroy_at_shutdown(engine: Destroyable) -> None:
    """Have :func:`shutdown` destroy the engine, if it still exists then."""
    _engines.add(engine)


def is_destroyed(engine: Destroyable) -> bool:
    """Whether :func:`shutdown` or :func:`destroy_engines` has destroyed the engine."""
    return engine not in _engines


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
    dist.barrier()  # nobody leaves while another still waits for an answer
    if _grid is not None:
        form_grid(1)
    comm = sys.modules.get("deepspeed.comm.comm")
    if comm is None or comm.cdb is None:
        dist.destroy_process_group()
    else:
        comm.destroy_process_group()  # and what DeepSpeed remembers of groups
    failure_detection.leave()


def destroy_engines(engines: Sequence[Destroyable]) -> None:
    """Undo what keeps engines, by hooks on their modules and by what ZeRO 3 holds globally."""
    if not engines:
        return
    from deepspeed.runtime.zero import parameter_offload
    from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator

    for engine in engines:
        _engines.discard(engine)
        engine.destroy()
    parameter_offload.FWD_MODULE_STACK.clear()  # the networks are its bottom
    # What each module releases is cached for the class, and so every module is kept.
    for method in vars(PartitionedParameterCoordinator).values():
        for cell in getattr(method, "__closure__", None) or ():
            if hasattr(cell.cell_contents, "cache_clear"):
                cell.cell_contents.cache_clear()


@dataclass(frozen=True)
class Grid:
    """The processes in rows and columns, in the words that DeepSpeed asks an ``mpu`` in.

    A row, ``tensor_size`` processes one after another, holds one model between them and sees
    the same data. A column holds the same part of it, and its gradients are averaged.
    """

    tensor_size: int  # processes of a row
    tensor_group: Any  # this process's row
    data_group: Any  # this process's column

    def get_model_parallel_rank(self) -> int:
        return rank() % self.tensor_size

    def get_model_parallel_world_size(self) -> int:
        return self.tensor_size

    def get_model_parallel_group(self) -> Any:
        return self.tensor_group

    def get_data_parallel_rank(self) -> int:
        return rank() // self.tensor_size

    def get_data_parallel_world_size(self) -> int:
        return world_size() // self.tensor_size

    def get_data_parallel_group(self) -> Any:
        return self.data_group

    get_tensor_model_parallel_rank = get_model_parallel_rank
    get_tensor_model_parallel_world_size = get_model_parallel_world_size
    get_tensor_model_parallel_group = get_model_parallel_group


_grid: Grid | None = None


def form_grid(tensor_size: int) -> Grid | None:
    """Put the processes in rows of ``tensor_size``; None, for rows of one; call on every rank.

    Raises:
        ValueError: if the processes do not fill rows.
    """
    global _grid
    from deepspeed.utils import groups

    size = world_size()
    if size % tensor_size:
        raise ValueError(
            f"--tensor_parallel_size {tensor_size} does not divide the {size} processes"
        )
    for group in () if _grid is None else (_grid.tensor_group, _grid.data_group):
        dist.destroy_process_group(group)
    groups.mpu = _grid = None
    if tensor_size == 1:
        return None
    rows = [list(range(first, first + tensor_size)) for first in range(0, size, tensor_size)]
    columns = [list(range(first, size, tensor_size)) for first in range(tensor_size)]
    # Every process has a part in making every group.
    made = [[dist.new_group(each, timeout=TIMEOUT) for each in kind] for kind in (rows, columns)]
    _grid = Grid(tensor_size, made[0][rank() // tensor_size], made[1][rank() % tensor_size])
    return _grid


def grid() -> Grid | None:
    """What :func:`form_grid` made; None where every process holds a whole model."""
    return _grid


def tensor_rank() -> int:
    """This process among those that hold one model between them, from 0."""
    return 0 if _grid is None else _grid.get_model_parallel_rank()


def data_rank() -> int:
    """Which share of the data this process sees, from 0; alike on all that hold one model."""
    return rank() if _grid is None else _grid.get_data_parallel_rank()


def data_world_size() -> int:
    """Shares of the data: processes, or rows of them that hold one model between them."""
    return world_size() if _grid is None else _grid.get_data_parallel_world_size()


def data_group() -> Any:
    """Processes that hold the same weights and see other data."""
    return dist.group.WORLD if _grid is None else _grid.data_group


def rank() -> int:
    """This process among all, from 0."""
    return dist.get_rank() if dist.is_initialized() else 0


def local_rank() -> int:
    """This process among those of its node, from 0."""
    return int(os.environ.get("LOCAL_RANK", "0"))


_planned_processes: int | None = None


@contextmanager
def planned_processes(count: int) -> Iterator[None]:
    """Inside the block, which only computes with shapes, there seem to be so many GPUs."""
    global _planned_processes
    before, _planned_processes = _planned_processes, count
    try:
        yield
    finally:
        _planned_processes = before


def world_size() -> int:
    """Number of processes."""
    return dist.get_world_size() if dist.is_initialized() else _planned_processes or 1


def device_type() -> str:
    """The kind of device of a run, or of one that is planned: ``cuda`` or ``cpu``."""
    return device().type if _planned_processes is None else "cuda"


def device() -> torch.device:
    """Where this process computes: DeepSpeed's choice, which DS_ACCELERATOR can override.

    Raises:
        ValueError: if a GPU is here that torch cannot use, and DS_ACCELERATOR is not set.
    """
    from deepspeed.accelerator import get_accelerator

    choose_attention_kernels()
    kind = get_accelerator().device_name()
    return gpu.usable(torch.device("cpu") if kind == "cpu" else torch.device(kind, local_rank()))


def choose_attention_kernels() -> None:
    """Do without cuDNN's attention, unless TORCH_CUDNN_SDPA_DEPRIORITIZED, torch's own, is 0.

    Where torch prefers it, on compute capability 9 and 10, each new shape is planned for half a
    second, and rows have many.
    """
    asked = os.environ.get("TORCH_CUDNN_SDPA_DEPRIORITIZED") == "0"
    torch.backends.cuda.enable_cudnn_sdp(asked)
