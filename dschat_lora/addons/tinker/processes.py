"""Several processes: rank 0 serves, and the others make the calls that it makes."""

import json
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import wraps
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, cast

import torch
import torch.distributed as dist

from dschat_lora.engine.distributed import broadcast_bytes, raise_together, rank, world_size
from dschat_lora.engine.failure_detection import wait_for_lost_peer

ParamsT = ParamSpec("ParamsT")
ResultT = TypeVar("ResultT")
FULL = "out of memory"  # in what torch says of a GPU


class ProcessError(Exception):
    """What one process could not do, on all of them."""


class OutOfStepError(BaseException):
    """One process failed where others wait for it: the run has to end."""


def agreed(function: Callable[[], ResultT]) -> ResultT:
    """What ``function`` returns on this rank, unless it fails on one; call on every rank.

    Raises:
        ValueError: on every rank, if it raised one on any.
        ProcessError: on every rank, if it raised anything else there and they are several.
    """
    if world_size() == 1:
        return function()
    try:
        return raise_together(function)
    except ValueError:
        raise
    except Exception as error:
        wait_for_lost_peer(error)
        if FULL in str(error):
            torch.cuda.empty_cache()
        raise ProcessError(str(error)) from error


class Channel:
    """How rank 0 tells the others what to call; made on every rank."""

    def __init__(self) -> None:
        self._group = None
        if world_size() > 1:
            # On the CPU, so that no GPU is busy with waiting; the next call may come in weeks.
            self._group = dist.new_group(backend="gloo", timeout=timedelta(days=3650))

    def send(self, *call: object) -> None:
        """Tell the others; nothing ends them. On other ranks this does nothing."""
        if self._group is not None and rank() == 0:
            broadcast_bytes(json.dumps(call).encode(), 0, self._group)

    def receive(self) -> list[Any]:
        """What rank 0 sent; call on every other rank."""
        return json.loads(broadcast_bytes(b"", 0, self._group))

    def gather(self, own: bytes) -> list[bytes]:
        """What every process has, by rank; call on every rank."""
        if self._group is None:
            return [own]
        return [broadcast_bytes(own, source, self._group) for source in range(world_size())]


class Called(Protocol):
    """What has methods that every process calls."""

    @property
    def channel(self) -> Channel:
        """Between the processes."""


CalledT = TypeVar("CalledT", bound=Called)


def collective(
    method: Callable[Concatenate[CalledT, ParamsT], ResultT],
) -> Callable[Concatenate[CalledT, ParamsT], ResultT]:
    """A method that the other processes call too when rank 0 does; its arguments are JSON-able.

    Its own errors are those of :func:`agreed`, which are alike on all ranks. After any other one
    the ranks would wait for each other.
    """

    @wraps(method)
    def call(self: CalledT, *args: ParamsT.args, **named: ParamsT.kwargs) -> ResultT:
        assert not named, "arguments are sent by their places"
        try:
            self.channel.send(method.__name__, *args)
            return method(self, *args, **named)
        except (ValueError, ProcessError):
            raise
        except Exception as error:
            if world_size() == 1:
                raise
            wait_for_lost_peer(error)
            raise OutOfStepError(f"{method.__name__} failed: {error}") from error

    return cast(Callable[Concatenate[CalledT, ParamsT], ResultT], call)


def follow(called: Called) -> None:
    """Make the calls of rank 0 until it sends an empty one; call on every other rank."""
    while call := called.channel.receive():
        name, *args = call
        with suppress(ValueError, ProcessError):  # rank 0 tells them
            getattr(called, name)(*args)
