"""Ranks and their groups, collectives of numbers or a text, and what one rank decides for all."""

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from typing import Protocol, TypeVar
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor

from dschat_lora.algos.segments import to_device
from dschat_lora.engine import gpu
from dschat_lora.engine.failure_detection import name_of

# Of a collective. That a peer is lost is known long before, by engine/failure_detection.py.
TIMEOUT = timedelta(hours=2)


class Destroyable(Protocol):
    """An engine of DeepSpeed."""

    def destroy(self) -> None:
        """Remove the hooks that lead from the model back to the engine."""


_engines: WeakSet[Destroyable] = WeakSet()


def destroy_at_shutdown(engine: Destroyable) -> None:
    """Have ``process_group.shutdown`` destroy the engine, if it still exists then."""
    _engines.add(engine)


def is_destroyed(engine: Destroyable) -> bool:
    """Whether ``process_group.shutdown`` or :func:`destroy_engines` has destroyed the engine."""
    return engine not in _engines


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
    tensor_group: dist.ProcessGroup  # this process's row
    data_group: dist.ProcessGroup  # this process's column

    def get_model_parallel_rank(self) -> int:
        return rank() % self.tensor_size

    def get_model_parallel_world_size(self) -> int:
        return self.tensor_size

    def get_model_parallel_group(self) -> dist.ProcessGroup:
        return self.tensor_group

    def get_data_parallel_rank(self) -> int:
        return rank() // self.tensor_size

    def get_data_parallel_world_size(self) -> int:
        return world_size() // self.tensor_size

    def get_data_parallel_group(self) -> dist.ProcessGroup:
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


_context: dist.ProcessGroup | None = None


def form_context(size: int) -> None:
    """Put the processes in groups of ``size`` that divide rows among them; call on every rank.

    Raises:
        ValueError: if the processes do not fill groups.
    """
    global _context
    count = world_size()
    if count % size:
        raise ValueError(f"--context_parallel_size {size} does not divide the {count} processes")
    if _context is not None:
        dist.destroy_process_group(_context)
    _context = None
    if size > 1:
        firsts = range(0, count, size)
        made = [dist.new_group(list(range(i, i + size)), timeout=TIMEOUT) for i in firsts]
        _context = made[rank() // size]


def context() -> dist.ProcessGroup | None:
    """The processes that divide rows among them, this one too; None where each has whole rows."""
    return _context


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


def data_group() -> dist.ProcessGroup | None:
    """Processes that hold the same weights and see other data."""
    return dist.group.WORLD if _grid is None else _grid.data_group


def rank() -> int:
    """This process among all, from 0."""
    return dist.get_rank() if dist.is_initialized() else 0


def local_rank() -> int:
    """This process among those of its node, from 0."""
    return int(os.environ.get("LOCAL_RANK", "0"))


_planned: tuple[int, bool] | None = None  # processes, and whether their GPUs have varlen attention


@contextmanager
def planned_processes(count: int, *, has_varlen: bool = True) -> Iterator[None]:
    """Inside the block, which only computes with shapes, there seem to be so many GPUs.

    ``has_varlen`` says whether they attend to sequences of 16 bits one by one in one call.
    """
    global _planned
    before, _planned = _planned, (count, has_varlen)
    try:
        yield
    finally:
        _planned = before


def world_size() -> int:
    """Number of processes."""
    return (
        dist.get_world_size() if dist.is_initialized() else 1 if _planned is None else _planned[0]
    )


def device_type() -> str:
    """The kind of device of a run, or of one that is planned: ``cuda`` or ``cpu``."""
    return device().type if _planned is None else "cuda"


def planned_varlen() -> bool | None:
    """Whether a GPU that is planned has varlen attention; None: a run's own device counts."""
    return None if _planned is None else _planned[1]


def device() -> torch.device:
    """Where this process computes: DeepSpeed's choice, which DS_ACCELERATOR can override.

    Raises:
        ValueError: if a GPU is here that torch cannot use, and DS_ACCELERATOR is not set.
    """
    from deepspeed.accelerator import get_accelerator

    kind = get_accelerator().device_name()
    return _usable_device(kind, 0 if kind == "cpu" else local_rank())


@cache
def _usable_device(kind: str, number: int) -> torch.device:
    choose_attention_kernels()
    return gpu.usable(torch.device("cpu") if kind == "cpu" else torch.device(kind, number))


def choose_attention_kernels() -> None:
    """Do without cuDNN's attention, unless TORCH_CUDNN_SDPA_DEPRIORITIZED, torch's own, is 0.

    Where torch prefers it, on compute capability 9 and 10, each new shape is planned for up to
    half a second, and rows have many. Steps of decoding have few, and take it in any case.
    """
    asked = os.environ.get("TORCH_CUDNN_SDPA_DEPRIORITIZED") == "0"
    torch.backends.cuda.enable_cudnn_sdp(asked)


ResultT = TypeVar("ResultT")


def _collective_device(group: dist.ProcessGroup | None = None) -> torch.device:
    """Where the tensors of a collective of a process group lie."""
    return torch.device("cpu") if dist.get_backend(group) == "gloo" else device()


def sum_over_ranks(values: list[float]) -> list[float]:
    """Each number summed over the shares of the data, in fp64; call on every rank."""
    return sum_tensor_(torch.tensor(values, dtype=torch.float64, device=device())).tolist()


def sum_tensor_(tensor: Tensor) -> Tensor:
    """Overwrite ``tensor`` with its sum over the shares of the data; call on every rank.

    Processes that hold one model between them bring the same, which counts once.
    """
    dist.all_reduce(tensor, group=data_group())
    return tensor


def max_tensor_(tensor: Tensor) -> Tensor:
    """Overwrite ``tensor`` with the largest of the processes' values; call on every rank."""
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return tensor


def sum_over_processes(values: list[float]) -> list[float]:
    """Each number summed over all processes, in fp64; call on every rank."""
    total = torch.tensor(values, dtype=torch.float64, device=device())
    dist.all_reduce(total)
    return total.tolist()


def sum_with_requests(values: Tensor, requests: list[float]) -> Tensor:
    """``values`` summed over the shares of the data, then each request over all processes.

    Call on every rank.
    """
    counted = values if tensor_rank() == 0 else torch.zeros_like(values)
    own = to_device(torch.tensor(requests, dtype=values.dtype), values.device)
    total = torch.cat([counted, own])
    dist.all_reduce(total)
    return total


def gather_over_ranks(values: Tensor) -> Tensor:
    """The (n, ...) tensors of all shares of the data behind each other, of any n; on every rank."""
    own = [float(len(values)) * (each == data_rank()) for each in range(data_world_size())]
    sizes = [int(size) for size in sum_over_ranks(own)]
    # Collectives move equal shapes.
    padded = values.new_zeros(max(sizes), *values.shape[1:])
    padded[: len(values)] = values
    parts = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(parts, padded, group=data_group())
    return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])


def max_over_ranks(value: float) -> float:
    """The largest of the processes' numbers; call on every rank."""
    if not dist.is_initialized():
        return value
    largest = torch.tensor(value, dtype=torch.float64, device=_collective_device())
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return float(largest)


def broadcast_(tensor: Tensor) -> Tensor:
    """Overwrite ``tensor`` with rank 0's; call on every rank."""
    dist.broadcast(tensor, 0)
    return tensor


def broadcast_string(fact: str) -> str:
    """Rank 0's ``fact``; call on every rank."""
    return _broadcast_text(fact, 0) if dist.is_initialized() else fact


def gather_texts(text: str) -> list[str]:
    """Every process's text, by rank; call on every rank."""
    return [_broadcast_text(text, source) for source in range(world_size())]


def first_of_model(value: ResultT) -> ResultT:
    """The value of the first of the processes that hold one model between them; on every rank.

    Where they are several it went through JSON.
    """
    if _grid is None:
        return value
    first: ResultT = json.loads(gather_texts(json.dumps(value))[rank() - tensor_rank()])
    return first


def _broadcast_text(text: str, source: int) -> str:
    """The text of the rank ``source``; call on every rank."""
    return broadcast_bytes(text.encode(), source).decode()


def broadcast_bytes(content: bytes, source: int, group: dist.ProcessGroup | None = None) -> bytes:
    """Those of the rank ``source``; call on every rank of the group. Nobody unpickles a peer's."""
    place = _collective_device(group)
    size = torch.tensor([len(content)], device=place)
    dist.broadcast(size, source, group=group)
    data = torch.zeros(int(size), dtype=torch.uint8)
    if rank() == source and content:
        data = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    data = data.to(place)
    if len(data):
        dist.broadcast(data, source, group=group)
    return data.cpu().numpy().tobytes()


def local_rank_first(function: Callable[[], ResultT]) -> ResultT:
    """What ``function`` returns, called on each node's first process and then on the others.

    If the first fails, the other processes end quietly, with the exit code of a user's mistake.
    Call on every rank.
    """
    if local_rank() == 0:
        return _run_and_share_exit(function)
    _end_if_any_failed()
    return function()


def on_rank_zero(function: Callable[[], ResultT]) -> ResultT | None:
    """What ``function`` returns on rank 0, which alone calls it; the others wait, and get None.

    If it fails, the other processes end quietly. Call on every rank.
    """
    if rank() == 0:
        return _run_and_share_exit(function)
    _end_if_any_failed()
    return None


def raise_together(function: Callable[[], ResultT]) -> ResultT:
    """What ``function`` returns on this rank; call on every rank.

    Raises:
        ValueError: on every rank, if it raised one on any: the first one's.
        RuntimeError: on the other ranks, if it raised anything else on one.
    """
    if world_size() == 1:
        return function()
    failure: Exception | None = None
    try:
        result = function()
    except Exception as error:  # noqa: BLE001 - raised again, on every rank
        failure = error
    first = -int(max_over_ranks(-float(rank() if failure is not None else world_size())))
    if first == world_size():
        return result
    mine = [str(failure), isinstance(failure, ValueError)]
    words, is_mistake = json.loads(_broadcast_text(json.dumps(mine), first))
    if is_mistake:
        raise ValueError(words) from failure
    raise failure or RuntimeError(f"rank {first} failed: {words}")


def check_same(find: Callable[[], Mapping[str, str]], *, remedy: str) -> None:
    """Refuse to go on where a process has something else than rank 0; call on every rank.

    Args:
        find: gives texts by name, the same names everywhere; one that is empty is not compared.
            Not called where there is one process.
        remedy: what to do about a difference.

    Raises:
        ValueError: on every rank, naming the first rank that differs, its host, and what differs.
    """
    if world_size() == 1:
        return
    facts = find()
    first: dict[str, str] = json.loads(broadcast_string(json.dumps(facts)))

    def compare() -> None:
        differing = [name for name, text in facts.items() if text and text != first[name]]
        if differing:
            shown = (f"{name} ({facts[name]} here, {first[name]} there)" for name in differing)
            raise ValueError(
                f"{name_of(rank())} differs from {name_of(0)} in {', '.join(shown)}; {remedy}"
            )

    raise_together(compare)


def _run_and_share_exit(function: Callable[[], ResultT]) -> ResultT:
    """Call; others learn the exit code by :func:`_end_if_any_failed`."""
    try:
        result = function()
    except BaseException as error:
        max_over_ranks(1.0 if isinstance(error, OSError) else 2.0)
        raise
    _end_if_any_failed()
    return result


def _end_if_any_failed() -> None:
    if code := int(max_over_ranks(0.0)):
        raise SystemExit(code)
