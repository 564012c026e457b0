"""Inputs of recomputed blocks in host memory, between the forward and the backward pass.

Pinned memory and a stream of its own let a GPU copy while it computes: each input leaves as soon
as its block is queued, and the next one comes back while a block is computed again. Two inputs at
a time are on the device beside that of the block at work.
"""

import weakref
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

# Inputs on their way at a time; with fewer, one that is fetched would be given up again.
IN_TRANSIT = 2


def offload_inputs(model: nn.Module) -> None:
    """Keep the input of each recomputed block in host memory; values stay bit for bit.

    Call it after :func:`~dschat_lora.models.build.recompute_blocks`. Without a GPU the inputs are
    copied all the same, and no memory is saved.
    """
    copies = HostCopies()
    for module in model.modules():
        if getattr(module, "gradient_checkpointing", False):
            checkpoint: Any = module._gradient_checkpointing_func
            around = partial(checkpoint_offloaded, copies, checkpoint)
            module._gradient_checkpointing_func = around  # type: ignore[assignment]


def checkpoint_offloaded(
    copies: "HostCopies", checkpoint: Callable[..., Any], function: Callable[..., Any], *inputs: Any
) -> Any:
    """``checkpoint(function, *inputs)`` that keeps the first of ``inputs`` in ``copies``.

    That is the hidden states, the one input that each block has for itself: masks and tables of
    positions, which all blocks share, stay where they are. ``checkpoint`` is torch's without
    re-entering, which saves its inputs as autograd does.

    Raises:
        ValueError: if the first input is no tensor, so that there is nothing to move.
    """
    hidden = inputs[0] if inputs else None
    if not isinstance(hidden, Tensor):
        raise ValueError(
            "--offload_activations: the blocks of this model are not given their hidden states "
            "first; drop the option"
        )

    # Not the tensor itself: autograd keeps both functions as long as what they return.
    kind = hidden.shape, hidden.dtype

    def keep(tensor: Tensor) -> "Tensor | HostCopy":
        return copies.keep(tensor) if (tensor.shape, tensor.dtype) == kind else tensor

    def take(kept: "Tensor | HostCopy") -> Tensor:
        return kept if isinstance(kept, Tensor) else copies.take(kept)

    with saved_tensors_hooks(keep, take):
        return checkpoint(function, *inputs)


class HostCopy:
    """A tensor in host memory, pinned if it came from a GPU.

    Attributes:
        here: the same on the device, while it is on its way to the host or back; else None.
        done: recorded on the copying stream at the end of the last copy of a GPU's tensor.
        before: the copy that was made before this one and is wanted after it, if it lives.
    """

    def __init__(self, tensor: Tensor, before: "HostCopy | None") -> None:
        on_gpu = tensor.device.type == "cuda"
        self.device = tensor.device
        self.here = tensor if on_gpu else None
        self.host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=on_gpu)
        self.done = torch.cuda.Event() if on_gpu else None  # type: ignore[no-untyped-call]
        self.before = (lambda: None) if before is None else weakref.ref(before)


class HostCopies:
    """Copies of the inputs of a model's blocks, taken in the reverse order as a rule.

    What is being copied is referred to until the computing stream has waited for the copy: its
    memory is not used again before.
    """

    def __init__(self) -> None:
        self._stream: torch.cuda.Stream | None = None
        self._moving: deque[HostCopy] = deque()
        self._last: Callable[[], HostCopy | None] = lambda: None

    def keep(self, tensor: Tensor) -> HostCopy:
        """Copy a tensor to the host; on a GPU while it goes on computing."""
        tensor = tensor.detach()  # or the copy would keep the graph by which it is kept
        copy = HostCopy(tensor, self._last())
        self._last = weakref.ref(copy)
        if copy.done is None:
            copy.host.copy_(tensor)
        else:
            self._move(copy, copy.host, tensor)
        return copy

    def take(self, copy: HostCopy) -> Tensor:
        """The tensor on its device again, ready for what is queued next; may be taken twice."""
        if copy.done is None:
            return copy.host
        if copy.here is None:
            self._fetch(copy)
        torch.cuda.current_stream().wait_event(copy.done)
        here, copy.here = copy.here, None
        before = copy.before()
        if before is not None and before.here is None:
            self._fetch(before)
        assert here is not None
        return here

    def _fetch(self, copy: HostCopy) -> None:
        host = copy.host
        copy.here = torch.empty(host.shape, dtype=host.dtype, device=copy.device)
        self._move(copy, copy.here, host)

    def _move(self, copy: HostCopy, target: Tensor, source: Tensor) -> None:
        """Queue a copy behind what is queued on the computing stream."""
        if self._stream is None:
            self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        computing = torch.cuda.current_stream()
        self._stream.wait_stream(computing)
        assert copy.done is not None
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
            copy.done.record(self._stream)
        if copy in self._moving:
            self._moving.remove(copy)
        self._moving.append(copy)
        if len(self._moving) > IN_TRANSIT:
            oldest = self._moving.popleft()
            assert oldest.done is not None
            computing.wait_event(oldest.done)
            oldest.here = None
