"""Collectives of a few numbers or a text, and what one rank decides for all."""

import json
from collections.abc import Callable, Mapping
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from dschat_lora.algos.tensors import to_device
from dschat_lora.engine.distributed import (
    data_group,
    data_rank,
    data_world_size,
    device,
    local_rank,
    rank,
    tensor_rank,
    world_size,
)
from dschat_lora.engine.failure_detection import name_of

ResultT = TypeVar("ResultT")


def _collective_device() -> torch.device:
    """Where the tensors of a collective of this process group lie."""
    return torch.device("cpu") if dist.get_backend() == "gloo" else device()


def sum_over_ranks(values: list[float]) -> list[float]:
    """Each number summed over the shares of the data, in fp64; call on every rank."""
    return sum_tensor_(torch.tensor(values, dtype=torch.float64, device=device())).tolist()


def sum_tensor_(tensor: Tensor) -> Tensor:
    """Overwrite ``tensor`` with its sum over the shares of the data; call on every rank.

    Processes that hold one model between them bring the same, which counts once.
    """
    dist.all_reduce(tensor, group=data_group())
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


def _broadcast_text(text: str, source: int) -> str:
    """The text of the rank ``source``; call on every rank. Bytes, for nobody unpickles a peer's."""
    content = text.encode()
    size = torch.tensor([len(content)], device=_collective_device())
    dist.broadcast(size, source)
    data = torch.zeros(int(size), dtype=torch.uint8)
    if rank() == source:
        data = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    data = data.to(_collective_device())
    if len(data):
        dist.broadcast(data, source)
    return bytes(data.tolist()).decode()


def local_rank_first(function: Callable[[], ResultT]) -> ResultT:
    """What ``function`` returns, called on each node's first process and then on the others.

    If the first fails, the other processes end quietly, with the exit code of a user's mistake.
    Call on every rank.
    """
    if local_rank() == 0:
        return _run_and_share_exit(function)
    _wait_for_exit_code()
    return function()


def on_rank_zero(function: Callable[[], ResultT]) -> ResultT | None:
    """What ``function`` returns on rank 0, which alone calls it; the others wait, and get None.

    If it fails, the other processes end quietly. Call on every rank.
    """
    if rank() == 0:
        return _run_and_share_exit(function)
    _wait_for_exit_code()
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
    """Call; :func:`_wait_for_exit_code` elsewhere learns the exit code, 0 if it worked."""
    code = 2
    try:
        result = function()
        code = 0
    except OSError:
        code = 1
        raise
    finally:
        worst = max_over_ranks(float(code))
    if worst:
        raise SystemExit(int(worst))
    return result


def _wait_for_exit_code() -> None:
    if code := int(max_over_ranks(0.0)):
        raise SystemExit(code)
