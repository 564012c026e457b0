"""Users' functions and objects: coroutines on one event loop of the process, and threads."""

import asyncio
import concurrent.futures
import os
import threading
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from functools import cache
from typing import Any


@cache
def _loop(process: int) -> asyncio.AbstractEventLoop:
    """The loop of a process, in a thread that does not keep it from ending.

    One loop: what a coroutine opens, such as a connection, belongs to the loop it ran on. A thread
    of its own: a notebook runs a loop in the main one.
    """
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    return loop


def start(coroutine: Coroutine[Any, Any, Any]) -> "concurrent.futures.Future[Any]":
    """Begin a coroutine on the loop; the future has its result, and may be cancelled."""
    return asyncio.run_coroutine_threadsafe(coroutine, _loop(os.getpid()))


def in_thread(function: Callable[[], Any]) -> "concurrent.futures.Future[Any]":
    """Call a function in a thread that does not keep the process from ending."""
    future: concurrent.futures.Future[Any] = concurrent.futures.Future()

    def run() -> None:
        with suppress(concurrent.futures.InvalidStateError):  # nobody waits any more
            try:
                result = function()
            except BaseException as error:  # noqa: BLE001 - raised again by result()
                future.set_exception(error)
            else:
                future.set_result(result)

    threading.Thread(target=run, daemon=True).start()
    return future


def run_together(waiting: Sequence[Awaitable[Any]]) -> list[Any]:
    """What they give, all at once.

    Raises:
        RuntimeError: if one calls ``sys.exit``, which would end the loop.
    """

    async def guarded(each: Awaitable[Any]) -> Any:
        try:
            return await each
        except SystemExit as error:
            raise RuntimeError("sys.exit was called") from error

    async def together() -> list[Any]:
        return list(await asyncio.gather(*map(guarded, waiting)))

    return start(together()).result()
