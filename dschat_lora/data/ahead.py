"""Windows of micro-batches that a thread makes while the device computes with those before."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, is_dataclass, replace
from typing import TypeVar

from torch import Tensor

from dschat_lora.data.loader import Window

ItemT = TypeVar("ItemT")


def one_ahead(items: Iterator[ItemT]) -> Iterator[ItemT]:
    """The same items, each made by a thread from when the one before is taken.

    What fails is raised where its item is due. The thread ends with the iterator.
    """
    end = object()
    with ThreadPoolExecutor(1, thread_name_prefix="batches") as thread:
        coming = thread.submit(next, items, end)
        while (item := coming.result()) is not end:
            coming = thread.submit(next, items, end)
            yield item  # type: ignore[misc]


def pinned_window(window: Window) -> Window:
    """The window with its batches in pinned memory, from which a GPU copies without the host."""
    return replace(window, batches=[_pinned(batch) for batch in window.batches])


def _pinned(value: object) -> object:
    """A tensor, or what has tensors and may be moved as a whole, in pinned memory."""
    if isinstance(value, Tensor):
        return value.pin_memory()
    if not is_dataclass(value) or not hasattr(value, "to"):
        return value
    own = {field.name: getattr(value, field.name) for field in fields(value)}
    return replace(value, **{name: _pinned(each) for name, each in own.items()})  # type: ignore[type-var]
