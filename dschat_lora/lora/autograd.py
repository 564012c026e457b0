"""What the autograd functions of layers get: their context, and states of quantised weights."""

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor


class QuantState(Protocol):
    """What codes of a quantised weight stand for, as :class:`dschat_lora.lora.nf4.NF4State`."""

    @property
    def shape(self) -> torch.Size: ...
    @property
    def transposed(self) -> bool: ...
    @property
    def dtype(self) -> torch.dtype: ...
    def tensors(self) -> dict[str, Tensor]: ...
    def values(self, codes: Tensor, dtype: torch.dtype | None = None) -> Tensor: ...
    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor: ...


class Context(Protocol):
    """What torch hands to the passes of a function with derivatives of its own, and they note."""

    needs_input_grad: tuple[bool, ...]
    saved_tensors: tuple[Any, ...]
    save_for_backward: Callable[..., None]
    set_materialize_grads: Callable[[bool], None]
    back: Callable[[Tensor], Tensor]
    n: int
    ranks: list[int]
    scaling: float
    state: QuantState | None
    transposed: bool
    types: tuple[torch.dtype, torch.dtype]
