"""Results of a device, which the host reads while the device goes on computing."""

from collections.abc import Callable

import torch
from torch import Tensor


def reads_late(device: torch.device) -> bool:
    """Whether results of an optimizer step are read once the next one is queued: on a GPU.

    A CPU has nothing queued, and would only tell later of what it has done.
    """
    return device.type == "cuda"


def read_later(values: Tensor) -> Callable[[], Tensor]:
    """What gives ``values`` on the host, waiting for no more than was queued up to here.

    They are copied behind that work, into pinned memory. A GPU that was given more in the
    meantime does not stand still while the host waits.
    """
    if values.device.type != "cuda":
        return lambda: values
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    host.copy_(values, non_blocking=True)
    copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
    copied.record()

    def read() -> Tensor:
        copied.synchronize()
        return host

    return read
