"""Convolutions with a low-rank update beside a frozen kernel, in loralib's layout of factors."""

import math
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dschat_lora.lora.matmul import draw_keep

Conv = nn.Conv1d | nn.Conv2d | nn.Conv3d


class LoraConv(nn.Module):
    """``x -> conv(x, W) + b + scaling * conv(dropout(x), D)``, D the elements of B A in W's shape.

    For a kernel of k in each of d dimensions A is (r * k, in * k) and B
    (out / groups * k^(d - 1), r * k), as in loralib, whose rule holds for d = 2 alone, and its
    pull request 157. Where the kernel's sizes differ, the last stands for k and the product of
    the others for k^(d - 1). The update is a convolution of its own, so that a base in 16 bits
    does not round it away. Unlike loralib's, dropout has an effect: on the update's input.

    Attributes:
        conv: the base, whose kernel is frozen: its names in the state dict are those of loralib.
        weight: (out, in / groups, *kernel) of the base. bias: (out,) of the base, or None.
        lora_A, lora_B: float32; absent where r is 0, which gives the base.
        scaling: factor of the update, ``lora_alpha / r``. dropout: on its input, in training.
    """

    lora_A: nn.Parameter  # noqa: N815
    lora_B: nn.Parameter  # noqa: N815

    def __init__(
        self, base: Conv, *, r: int, lora_alpha: float = 1.0, dropout: float = 0.0
    ) -> None:
        """Adopt the parameters of ``base``; A is drawn from the global random state, B is zero."""
        super().__init__()
        self.kernel_size, self.stride, self.dilation = base.kernel_size, base.stride, base.dilation
        self.in_channels, self.out_channels = base.in_channels, base.out_channels
        self.groups, self.padding, self.padding_mode = base.groups, base.padding, base.padding_mode
        # In the order of F.pad: the last dimension first.
        self.padding_amounts = tuple(base._reversed_padding_repeated_twice)
        self.conv = base
        self.r, self.dropout = r, dropout
        self.scaling = lora_alpha / r if r > 0 else 0.0
        if r > 0:
            self.weight.requires_grad_(False)
            *others, last = self.kernel_size
            rows = self.out_channels // self.groups * math.prod(others)
            empty = partial(torch.empty, dtype=torch.float32, device=self.weight.device)
            self.lora_A = nn.Parameter(empty(r * last, self.in_channels * last))
            self.lora_B = nn.Parameter(empty(rows, r * last))
            nn.init.kaiming_uniform_(self.lora_A, a=math.sqrt(5))  # U(+-1/sqrt(columns))
            nn.init.zeros_(self.lora_B)
        self.train(base.training)

    @property
    def weight(self) -> Tensor:
        """The kernel."""
        return self.conv.weight

    @property
    def bias(self) -> Tensor | None:
        """The bias."""
        return self.conv.bias

    def _load_from_state_dict(
        self, state_dict: dict[str, Tensor], prefix: str, *args: object
    ) -> None:
        """Take the base's parameters without ``conv.`` too, as some versions of loralib name them.

        Where both are there they are one.
        """
        for part in ("weight", "bias"):
            value = state_dict.pop(f"{prefix}{part}", None)
            if value is not None:
                state_dict.setdefault(f"{prefix}conv.{part}", value)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def forward(self, x: Tensor) -> Tensor:
        """(B, in, *sizes) -> (B, out, *sizes), also without the batch dimension."""
        output = self._convolve(x, self.weight, self.bias)
        if self.r == 0:
            return output
        adapted = x
        if self.training and self.dropout > 0:
            adapted = x * draw_keep(x, self.dropout) / (1 - self.dropout)
        return output + self._convolve(adapted, self.delta().to(x.dtype), None)

    def delta(self) -> Tensor:
        """The update of ``weight``, in its shape, float32 or wider."""
        wide = torch.promote_types(self.lora_B.dtype, torch.float32)
        product = self.lora_B.to(wide) @ self.lora_A.to(wide)
        return self.scaling * product.view(self.weight.shape)

    def _convolve(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        function: Callable[..., Tensor] = getattr(F, f"conv{len(self.kernel_size)}d")
        padding: str | int | tuple[int, ...] = self.padding
        if self.padding_mode != "zeros":
            x, padding = F.pad(x, self.padding_amounts, mode=self.padding_mode), 0
        return function(x, weight, bias, self.stride, padding, self.dilation, self.groups)

    def extra_repr(self) -> str:
        """Shape and adapter settings, for ``print(model)``."""
        return (
            f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}, r={self.r}, "
            f"scaling={self.scaling:g}, dropout={self.dropout:g}"
        )
