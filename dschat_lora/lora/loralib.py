"""The names of microsoft/LoRA's ``loralib``, for code written for it (arXiv:2106.09685).

``import dschat_lora.lora.loralib as lora`` takes the place of ``import loralib as lora``: the same
constructors, initial values, names and shapes in the state dict. Where loralib goes wrong it
differs:

* Weights are never merged in place, so a state dict saved after ``eval()`` holds the base, and no
  value drifts. ``merge_weights`` is accepted and without effect; :func:`merged_copy` merges.
* ``train()`` and ``eval()`` return the layer; every layer pickles.
* Convolutions take any kernel, their names stand once in the state dict, and dropout applies.
* MergedLinear takes groups of unequal sizes, and none enabled gives the frozen base.
* Factors are float32 whatever the base's type.
"""

import copy
import math
from collections.abc import Sequence
from typing import Any, Literal, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dschat_lora.lora.conv import Conv, LoraConv
from dschat_lora.lora.groups import Groups
from dschat_lora.lora.layers import AdapterLayer
from dschat_lora.lora.matmul import adapter_dropout, lora_linear

ModuleT = TypeVar("ModuleT", bound=nn.Module)
Bias = Literal["none", "all", "lora_only"]


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


class _Linear(nn.Linear, LoRALayer):
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
        update = self.scaling * (_wide(self._full_b()) @ _wide(self.lora_A))
        return update.t() if self.fan_in_fan_out else update

    def _full_b(self) -> Tensor:
        return self.lora_B if self.groups is None else self.groups.expand(self.lora_B)


class Linear(_Linear):
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
        **kwargs: Any,
    ) -> None:
        super().__init__(in_features, out_features, **kwargs)
        self._set_options(r, lora_alpha, lora_dropout, merge_weights)
        self.groups = None
        self._set_up(has_factors=r > 0, fan_in_fan_out=fan_in_fan_out)


class MergedLinear(_Linear):
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
        **kwargs: Any,
    ) -> None:
        super().__init__(in_features, out_features, **kwargs)
        self._set_options(r, lora_alpha, lora_dropout, merge_weights)
        self.enable_lora = list(enable_lora)
        sizes = _sizes(out_features, self.enable_lora, group_sizes)
        has_factors = r > 0 and any(enable_lora)
        self.groups = Groups(sizes, tuple(map(bool, enable_lora))) if has_factors else None
        self._set_up(has_factors=has_factors, fan_in_fan_out=fan_in_fan_out)


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
        **kwargs: Any,
    ) -> None:
        super().__init__(num_embeddings, embedding_dim, **kwargs)
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
        return self.scaling * (_wide(self.lora_B) @ _wide(self.lora_A)).t()


class _Conv(LoraConv, LoRALayer):
    """A convolution of any kernel, see :class:`dschat_lora.lora.conv.LoraConv`."""

    kind: type[Conv]

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | tuple[int, ...],
        r: int = 0,
        lora_alpha: float = 1,
        lora_dropout: float = 0.0,
        merge_weights: bool = True,
        **kwargs: Any,
    ) -> None:
        base = self.kind(in_channels, out_channels, kernel_size, **kwargs)  # type: ignore[arg-type]
        base.reset_parameters()  # loralib draws it twice; then the same seed gives its A
        super().__init__(base, r=r, lora_alpha=lora_alpha, dropout=lora_dropout)
        self._set_options(r, lora_alpha, lora_dropout, merge_weights)

    @property
    def conv(self) -> "_Conv":
        """The layer itself, which loralib keeps in an attribute."""
        return self

    def _load_from_state_dict(
        self, state_dict: dict[str, Tensor], prefix: str, *args: object
    ) -> None:
        """Take loralib's names too: its base stands under ``conv.``, in some versions twice."""
        for part in ("weight", "bias"):
            value = state_dict.pop(f"{prefix}conv.{part}", None)
            if value is not None:
                state_dict.setdefault(f"{prefix}{part}", value)
        super()._load_from_state_dict(state_dict, prefix, *args)


class Conv1d(_Conv):
    """``nn.Conv1d`` with a low-rank update."""

    kind = nn.Conv1d


class Conv2d(_Conv):
    """``nn.Conv2d`` with a low-rank update."""

    kind = nn.Conv2d


class Conv3d(_Conv):
    """``nn.Conv3d`` with a low-rank update."""

    kind = nn.Conv3d


def mark_only_lora_as_trainable(model: nn.Module, bias: Bias = "none") -> None:
    """Freeze what is no factor, but for no, all, or adapted layers' biases (none, all, lora_only).

    Raises:
        ValueError: at another ``bias``; nothing is frozen then.
    """
    _check_bias(bias)
    for name, parameter in model.named_parameters():
        if "lora_" not in name:
            parameter.requires_grad_(bias == "all" and "bias" in name)
    if bias == "lora_only":
        for module in model.modules():
            own = getattr(module, "bias", None)
            if isinstance(module, LoRALayer) and own is not None:
                own.requires_grad_(True)


def lora_state_dict(model: nn.Module, bias: Bias = "none") -> dict[str, Tensor]:
    """Factors and the biases of ``bias`` (lora_only: of layers with factors), by name.

    Buffers are none of them, whatever their name: GPT-2's causal masks were called ``bias``.

    Raises:
        ValueError: at another ``bias``.
    """
    _check_bias(bias)
    names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    adapted = {f"{name.partition('lora_')[0]}bias" for name in names if "lora_" in name}
    biases = {name for name in names if "bias" in name}
    wanted = {"none": set[str](), "all": biases, "lora_only": adapted & names}[bias]
    state = model.state_dict()
    return {name: state[name] for name in state if name in wanted or "lora_" in name}


@torch.no_grad()
def merged_copy(module: ModuleT) -> ModuleT:
    """A copy whose layers are plain (``r`` 0) and hold ``W + update``; ``module`` stays as it is.

    The update is added in float32 and rounded once to the type of W. A weight tied to another
    module's is its own in the copy.

    Raises:
        ValueError: at a layer of :func:`dschat_lora.lora.model.apply_lora`, which
            :func:`dschat_lora.lora.merge.merged_state_dict` merges.
    """
    merged = copy.deepcopy(module)
    for name, layer in merged.named_modules():
        if isinstance(layer, AdapterLayer):
            raise ValueError(f"{name} was adapted by apply_lora: merge it by merged_state_dict")
        if isinstance(layer, _Linear | Embedding | LoraConv) and layer.r > 0:
            _make_plain(layer)
    return merged


def _make_plain(layer: _Linear | Embedding | LoraConv) -> None:
    if hasattr(layer, "lora_A"):
        weight = _wide(layer.weight) + layer.delta()
        layer.weight = nn.Parameter(weight.to(layer.weight.dtype))
        del layer.lora_A, layer.lora_B
    layer.weight.requires_grad_(True)
    layer.r, layer.scaling = 0, 0.0


def _wide(tensor: Tensor) -> Tensor:
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


def _check_bias(bias: str) -> None:
    if bias not in ("none", "all", "lora_only"):
        raise ValueError(f"bias must be none, all or lora_only, got {bias!r}")
