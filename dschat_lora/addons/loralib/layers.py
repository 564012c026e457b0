"""Layers of microsoft/LoRA's ``loralib`` (arXiv:2106.09685)."""

import math
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dschat_lora.lora.groups import Groups
from dschat_lora.lora.layers import adapter_dropout, draw_keep, lora_linear

Conv = nn.Conv1d | nn.Conv2d | nn.Conv3d


class LoRALayer:
    """What marks the layers of this module: with rank ``r`` of 0 they are plain."""

    merged = False

    def _set_options(self, r: int, alpha: float, dropout: float, merge_weights: bool) -> None:
        self.r, self.lora_alpha, self.merge_weights = r, alpha, merge_weights
        self.lora_dropout = nn.Dropout(dropout)
        self.scaling = alpha / r if r > 0 else 0.0

    @property
    def has_factors(self) -> bool:
        """Whether there is an update."""
        return hasattr(self, "lora_A")


class FrozenLinear(nn.Linear, LoRALayer):
    """A frozen linear layer, stored (in, out) with ``fan_in_fan_out``, and its update."""

    lora_A: nn.Parameter  # noqa: N815
    lora_B: nn.Parameter  # noqa: N815
    groups: Groups | None

    def _set_up(self, *, has_factors: bool, fan_in_fan_out: bool) -> None:
        if self.r > 0:
            self.weight.requires_grad_(False)
        if has_factors:
            groups = self.groups
            rank, outputs = self.r, self.out_features
            if groups is not None:
                rank, outputs = rank * groups.count, sum(groups.enabled_sizes)
            self.lora_A = _factor(self, rank, self.in_features)
            self.lora_B = _factor(self, outputs, self.r)
        self.reset_parameters()
        self.fan_in_fan_out = fan_in_fan_out
        if fan_in_fan_out:
            stored = self.weight.detach().t().contiguous()
            self.weight = nn.Parameter(stored, requires_grad=self.weight.requires_grad)

    def reset_parameters(self) -> None:
        """Draw weight and bias as ``nn.Linear`` does and A alike; zero B."""
        super().reset_parameters()
        if self.has_factors:
            nn.init.kaiming_uniform_(self.lora_A, a=math.sqrt(5))
            nn.init.zeros_(self.lora_B)

    def forward(self, x: Tensor) -> Tensor:
        """(..., in) -> (..., out)."""
        if not self.has_factors:
            weight = self.weight.t() if self.fan_in_fan_out else self.weight
            return F.linear(x, weight, self.bias)
        dropout = self.lora_dropout.p if self.training else 0.0
        scaling, keep = adapter_dropout(x, self.scaling, dropout)
        factors, transposed = (self.lora_A, self._full_b()), self.fan_in_fan_out
        return lora_linear(
            x, self.weight, self.bias, *factors, scaling, keep, transposed=transposed
        )

    def delta(self) -> Tensor:
        """The update of ``weight``, in its shape, float32 or wider."""
        update = self.scaling * (wide(self._full_b()) @ wide(self.lora_A))
        return update.t() if self.fan_in_fan_out else update

    def _full_b(self) -> Tensor:
        return self.lora_B if self.groups is None else self.groups.expand(self.lora_B)


class Linear(FrozenLinear):
    """``x W^T + b + lora_alpha / r * dropout(x) A^T B^T``: A (r, in), B (out, r)."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        r: int = 0,
        lora_alpha: float = 1,
        lora_dropout: float = 0.0,
        fan_in_fan_out: bool = False,
        merge_weights: bool = True,
        **kwargs: object,
    ) -> None:
        super().__init__(in_features, out_features, **kwargs)  # type: ignore[arg-type]
        self._set_options(r, lora_alpha, lora_dropout, merge_weights)
        self.groups = None
        self._set_up(has_factors=r > 0, fan_in_fan_out=fan_in_fan_out)


class MergedLinear(FrozenLinear):
    """Several linear layers of one input as one, with factors for those of ``enable_lora``.

    A is (k * r, in) and B (outputs of the k enabled groups, r), see :class:`Groups`. With none
    enabled the layer is its frozen base. Groups are equal without ``group_sizes``, of which
    loralib knows nothing.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        r: int = 0,
        lora_alpha: float = 1,
        lora_dropout: float = 0.0,
        enable_lora: Sequence[bool] = (False,),
        fan_in_fan_out: bool = False,
        merge_weights: bool = True,
        *,
        group_sizes: Sequence[int] | None = None,
        **kwargs: object,
    ) -> None:
        super().__init__(in_features, out_features, **kwargs)  # type: ignore[arg-type]
        self._set_options(r, lora_alpha, lora_dropout, merge_weights)
        self.enable_lora = list(enable_lora)
        self._group_sizes = group_sizes
        sizes = _sizes(out_features, self.enable_lora, group_sizes)
        has_factors = r > 0 and any(enable_lora)
        self.groups = Groups(sizes, tuple(map(bool, enable_lora))) if has_factors else None
        self._set_up(has_factors=has_factors, fan_in_fan_out=fan_in_fan_out)

    @property
    def lora_ind(self) -> Tensor:
        """(out,) bool, True at the outputs of enabled groups."""
        sizes = _sizes(self.out_features, self.enable_lora, self._group_sizes)
        chosen = torch.tensor(self.enable_lora, dtype=torch.bool, device=self.weight.device)
        return chosen.repeat_interleave(torch.tensor(sizes, device=self.weight.device))

    def zero_pad(self, x: Tensor) -> Tensor:
        """(outputs of enabled groups, ...) -> (out, ...), zero at those of the others."""
        padded = x.new_zeros(self.out_features, *x.shape[1:])
        return padded.index_put((self.lora_ind,), x)

    def merge_AB(self) -> Tensor:  # noqa: N802
        """The product of the factors without ``scaling``, in the shape of ``weight``."""
        return self.delta() / self.scaling


class Embedding(nn.Embedding, LoRALayer):
    """``i -> W[i] + lora_alpha / r * B A[:, i]``: A (r, num_embeddings), B (embedding_dim, r)."""

    lora_A: nn.Parameter  # noqa: N815
    lora_B: nn.Parameter  # noqa: N815

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        r: int = 0,
        lora_alpha: float = 1,
        merge_weights: bool = True,
        **kwargs: object,
    ) -> None:
        super().__init__(num_embeddings, embedding_dim, **kwargs)  # type: ignore[arg-type]
        self._set_options(r, lora_alpha, 0.0, merge_weights)
        if r > 0:
            if self.max_norm is not None:
                raise ValueError(
                    "an embedding with max_norm rescales its weights and cannot be frozen"
                )
            self.weight.requires_grad_(False)
            self.lora_A = _factor(self, r, num_embeddings)
            self.lora_B = _factor(self, embedding_dim, r)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw weight and B from N(0, 1); zero A."""
        super().reset_parameters()
        if self.has_factors:
            nn.init.zeros_(self.lora_A)
            nn.init.normal_(self.lora_B)

    def forward(self, ids: Tensor) -> Tensor:
        """(...) integers -> (..., embedding_dim)."""
        base = super().forward(ids)
        if not self.has_factors:
            return base
        rows = F.embedding(
            ids, self.lora_A.t(), self.padding_idx, scale_grad_by_freq=self.scale_grad_by_freq
        )
        return base + (self.scaling * F.linear(rows, self.lora_B)).to(base.dtype)

    def delta(self) -> Tensor:
        """The update of ``weight``, in its shape, float32 or wider."""
        return self.scaling * (wide(self.lora_B) @ wide(self.lora_A)).t()


class ConvLoRA(nn.Module, LoRALayer):
    """``x -> conv(x, W) + b + scaling * conv(dropout(x), D)``, D the elements of B A in W's shape.

    For a kernel of k in each of d dimensions A is (r * k, in * k) and B
    (out / groups * k^(d - 1), r * k), as in loralib, whose rule holds for d = 2 alone, and its
    pull request 157. Where the kernel's sizes differ, the last stands for k and the product of
    the others for k^(d - 1). The update is a convolution of its own, so that a base in 16 bits
    does not round it away. Unlike loralib's, dropout has an effect: on the update's input.
    ``conv_module`` makes the base from the sizes and ``kwargs``.

    Attributes:
        conv: the base, whose kernel is frozen: its names in the state dict are those of loralib.
        weight: (out, in / groups, *kernel) of the base. bias: (out,) of the base, or None.
        lora_A, lora_B: float32; absent where r is 0, which gives the base.
        scaling: factor of the update, ``lora_alpha / r``.
    """

    lora_A: nn.Parameter  # noqa: N815
    lora_B: nn.Parameter  # noqa: N815

    def __init__(
        self,
        conv_module: Callable[..., Conv],
        in_channels: int,
        out_channels: int,
        kernel_size: int | tuple[int, ...],
        r: int = 0,
        lora_alpha: float = 1,
        lora_dropout: float = 0.0,
        merge_weights: bool = True,
        **kwargs: object,
    ) -> None:
        """A is drawn from the global random state, B is zero."""
        super().__init__()
        self.conv = base = conv_module(in_channels, out_channels, kernel_size, **kwargs)
        base.reset_parameters()  # loralib draws it twice; then the same seed gives its A
        self._set_options(r, lora_alpha, lora_dropout, merge_weights)
        # In the order of F.pad: the last dimension first.
        self.padding_amounts = tuple(base._reversed_padding_repeated_twice)
        if r > 0:
            self.weight.requires_grad_(False)
            *others, last = base.kernel_size
            rows = base.out_channels // base.groups * math.prod(others)
            empty = partial(torch.empty, dtype=torch.float32, device=self.weight.device)
            self.lora_A = nn.Parameter(empty(r * last, base.in_channels * last))
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
        adapted, dropout = x, self.lora_dropout.p
        if self.training and dropout > 0:
            adapted = x * draw_keep(x, dropout) / (1 - dropout)
        return output + self._convolve(adapted, self.delta().to(x.dtype), None)

    def delta(self) -> Tensor:
        """The update of ``weight``, in its shape, float32 or wider."""
        return self.scaling * (wide(self.lora_B) @ wide(self.lora_A)).view(self.weight.shape)

    def _convolve(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        base = self.conv
        function: Callable[..., Tensor] = getattr(F, f"conv{len(base.kernel_size)}d")
        padding: str | int | tuple[int, ...] = base.padding
        if base.padding_mode != "zeros":
            x, padding = F.pad(x, self.padding_amounts, mode=base.padding_mode), 0
        return function(x, weight, bias, base.stride, padding, base.dilation, base.groups)

    def extra_repr(self) -> str:
        """Adapter settings, for ``print(model)``, beside those of the base."""
        return f"r={self.r}, scaling={self.scaling:g}"


class Conv1d(ConvLoRA):
    """``nn.Conv1d`` with a low-rank update."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(nn.Conv1d, *args, **kwargs)  # type: ignore[arg-type]


class Conv2d(ConvLoRA):
    """``nn.Conv2d`` with a low-rank update."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(nn.Conv2d, *args, **kwargs)  # type: ignore[arg-type]


class Conv3d(ConvLoRA):
    """``nn.Conv3d`` with a low-rank update."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(nn.Conv3d, *args, **kwargs)  # type: ignore[arg-type]


def wide(tensor: Tensor) -> Tensor:
    """In float32, or in its own type where that is wider."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def _factor(layer: nn.Linear | nn.Embedding, *shape: int) -> nn.Parameter:
    return nn.Parameter(layer.weight.new_zeros(shape, dtype=torch.float32))


def _sizes(
    outputs: int, enable_lora: Sequence[bool], group_sizes: Sequence[int] | None
) -> tuple[int, ...]:
    count = len(enable_lora)
    if group_sizes is None:
        if count == 0 or outputs % count:
            raise ValueError(
                f"enable_lora has {count} groups, into which {outputs} outputs cannot be cut "
                "equally; give group_sizes"
            )
        return (outputs // count,) * count
    if len(group_sizes) != count or sum(group_sizes) != outputs:
        raise ValueError(
            f"group_sizes {list(group_sizes)} must be {count} numbers that add up to {outputs}"
        )
    return tuple(group_sizes)
