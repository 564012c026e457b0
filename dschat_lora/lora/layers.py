"""Layers with a trainable part beside frozen base weights (LoRA, arXiv:2106.09685).

Every layer adopts the base's parameters under the base's names, so the names in the state
dict stay those of the pretrained model. Only the parameters named ``lora_*``,
``trained_bias`` or ``trained.*`` learn, and they are always float32. With ``enabled`` False a
layer is its base, bit for bit.
"""

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dschat_lora.lora.groups import Groups
from dschat_lora.lora.matmul import draw_keep, lora_linear
from dschat_lora.lora.parallel import (
    ParallelEmbedding,
    ParallelLinear,
    Shard,
    Split,
    mark_shard,
    own_rows,
    shard_of,
    sum_of_parts,
)


def is_conv1d(module: nn.Module) -> bool:
    """Whether ``module`` is GPT-2's transposed linear layer of transformers: weight (in, out)."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf")


def conv1d(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """``x W + b`` of x (..., in) and W (in, out), in the one rounding that Conv1D makes."""
    flat = torch.addmm(bias, x.reshape(-1, x.shape[-1]), weight)
    return flat.view(*x.shape[:-1], weight.shape[1])


def full_shape(parameter: Tensor) -> torch.Size:
    """The parameter's shape, also where ZeRO 3 or a tensor group holds only a part of it here."""
    shape, shard = torch.Size(getattr(parameter, "ds_shape", parameter.shape)), shard_of(parameter)
    return shape if shard is None else shard.full_shape(shape)


class LoraLinear(nn.Module):
    """``x -> x W^T + b + scaling * dropout(x) A^T B^T`` with W frozen.

    Both factors are zero until :func:`dschat_lora.lora.model.init_adapter_` draws them. They
    take part in the input's dtype.

    Attributes:
        weight: (out, in) of the base. bias: (out,) of the base, or None.
        lora_A: (r, in) float32. lora_B: (out, r) float32.
        trained_bias: (out,) float32 in place of ``bias``, or None.
        scaling: factor of the update. enabled: False gives the base.
        split: how weight and factors are divided among a tensor group; None: they are whole.
        groups: of a packed layer with factors for some of its parts, which says their shapes;
            None: one pair of factors for all outputs.
        in_features, out_features: of the whole layer.
    """

    lora_A: nn.Parameter  # noqa: N815
    lora_B: nn.Parameter  # noqa: N815
    trained_bias: nn.Parameter | None
    split: Split | None
    groups: Groups | None

    def __init__(
        self,
        base: nn.Linear | ParallelLinear,
        *,
        r: int,
        scaling: float,
        dropout: float = 0.0,
        groups: Groups | None = None,
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = base.in_features, base.out_features
        self.r, self.scaling, self.dropout, self.enabled = r, scaling, dropout, True
        self.weight, self.bias = base.weight, base.bias
        _add_factors(self, base, groups)

    def forward(self, x: Tensor) -> Tensor:
        """(..., in) -> (..., out), in the dtype of ``x``."""
        return _around(self, x)

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """The layer with the weights of this rank and this bias."""
        if not self.enabled:
            return F.linear(x, self.weight, bias)
        return _adapted(self, x, bias, transposed=False)

    def delta(self, lora_A: Tensor, lora_B: Tensor) -> Tensor:  # noqa: N803
        """The update these factors make to ``weight``, (out, in) float32."""
        return self.scaling * _product(self, lora_A, lora_B)

    def extra_repr(self) -> str:
        """Shape and adapter settings, for ``print(model)``."""
        return _lora_repr(self)


class LoraConv1D(nn.Module):
    """``x -> x W + b + scaling * dropout(x) A^T B^T`` with W (in, out) frozen (GPT-2's layout).

    Attributes as in :class:`LoraLinear`, with ``weight`` (in, out).
    """

    lora_A: nn.Parameter  # noqa: N815
    lora_B: nn.Parameter  # noqa: N815
    trained_bias: nn.Parameter | None
    split: Split | None
    groups: Groups | None

    def __init__(
        self,
        base: nn.Module,
        *,
        r: int,
        scaling: float,
        dropout: float = 0.0,
        groups: Groups | None = None,
    ) -> None:
        super().__init__()
        weight, bias = base.get_parameter("weight"), base.get_parameter("bias")
        self.in_features, self.out_features = full_shape(weight)
        self.r, self.scaling, self.dropout, self.enabled = r, scaling, dropout, True
        self.weight, self.bias = weight, bias
        _add_factors(self, base, groups)

    def forward(self, x: Tensor) -> Tensor:
        """(..., in) -> (..., out), in the dtype of ``x``."""
        return _around(self, x)

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """The layer with the weights of this rank and this bias."""
        if self.enabled:
            return _adapted(self, x, bias, transposed=True)
        if bias is None:
            return F.linear(x, self.weight.t())
        return conv1d(x, self.weight, bias)

    def delta(self, lora_A: Tensor, lora_B: Tensor) -> Tensor:  # noqa: N803
        """The update these factors make to ``weight``, (in, out) float32."""
        return self.scaling * _product(self, lora_A, lora_B).T

    def extra_repr(self) -> str:
        """Shape and adapter settings, for ``print(model)``."""
        return _lora_repr(self)


class LoraEmbedding(nn.Module):
    """``i -> W[i] + scaling * B A[:, i]`` with W frozen; there is no dropout on token ids.

    Attributes:
        weight: (num_embeddings, dim) of the base.
        lora_embedding_A: (r, num_embeddings) float32. lora_embedding_B: (dim, r) float32.
        in_features: num_embeddings. out_features: dim.
        shard: how the vocabulary is divided among a tensor group; None: it is whole.
    """

    def __init__(self, base: nn.Embedding | ParallelEmbedding, *, r: int, scaling: float) -> None:
        super().__init__()
        if base.max_norm is not None:
            raise ValueError("an embedding with max_norm rescales its weights and cannot be frozen")
        self.in_features, self.out_features = base.num_embeddings, base.embedding_dim
        self.padding_idx = base.padding_idx
        self.r, self.scaling, self.dropout, self.enabled = r, scaling, 0.0, True
        self.weight = base.weight
        self.shard = base.shard if isinstance(base, ParallelEmbedding) else None
        columns = None if self.shard is None else Shard(self.shard.group, 1, self.shard.blocks)
        device = base.weight.device
        self.lora_embedding_A = _zeros(r, self.in_features, device=device, shard=columns)
        self.lora_embedding_B = _zeros(self.out_features, r, device=device)
        self.train(base.training)

    def forward(self, ids: Tensor) -> Tensor:
        """(...) int64 -> (..., dim), in the dtype of ``weight``."""
        if self.shard is None:
            return self._rows(ids, self.padding_idx, self.lora_embedding_B)
        own, inside = own_rows(ids, self.shard)
        group = self.shard.group
        # In no row that is kept does the gradient of the padding's own row count.
        ((start, stop),) = self.shard.ranges()
        padding = self.padding_idx
        padding = None if padding is None or not start <= padding < stop else padding - start
        rows = self._rows(own, padding, group.copy(self.lora_embedding_B))
        return sum_of_parts(rows.masked_fill(~inside[..., None], 0.0), group)

    def _rows(self, ids: Tensor, padding_idx: int | None, lora_B: Tensor) -> Tensor:  # noqa: N803
        base = F.embedding(ids, self.weight, padding_idx)
        if not self.enabled:
            return base
        rows = F.embedding(ids, self.lora_embedding_A.T, padding_idx)
        update = self.scaling * F.linear(rows, lora_B)
        return base + update.to(base.dtype)

    def delta(self, lora_A: Tensor, lora_B: Tensor) -> Tensor:  # noqa: N803
        """The update these factors make to ``weight``, (num_embeddings, dim) float32."""
        return self.scaling * (lora_B.float() @ lora_A.float()).T

    def extra_repr(self) -> str:
        """Shape and adapter settings, for ``print(model)``."""
        return _lora_repr(self)


class TrainedBias(nn.Module):
    """A frozen linear layer or layer norm whose bias alone trains, as a float32 copy.

    Attributes:
        weight, bias: of the base, frozen. trained_bias: float32, in place of ``bias``.
    """

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.function = _biased_function(base)
        self.kind, self.enabled = type(base).__name__, True
        self.register_parameter("weight", base._parameters["weight"])
        self.bias = base.get_parameter("bias")
        self.trained_bias = float32_copy(self.bias)
        self.train(base.training)

    def forward(self, x: Tensor) -> Tensor:
        """What the base computes, with the trained bias."""
        return self.function(x, self.weight, _active_bias(self))

    def extra_repr(self) -> str:
        """Which layer the bias belongs to, for ``print(model)``."""
        return f"{self.kind}, features={full_shape(self.bias)[0]}"


class TrainedModule(nn.Module):
    """A module trained in full, as a float32 copy beside the frozen original.

    The copy is independent also where the original's weight is tied to another module's, so
    training an output head never moves the embedding.

    Attributes:
        base: the original. trained: its copy, which computes in float32.
    """

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base, self.enabled = base, True
        self.trained = copy.deepcopy(base).float().requires_grad_(True)
        self.train(base.training)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """What the original returns, in its dtype, computed with the trained weights."""
        if not self.enabled:
            output: Tensor = self.base(*args, **kwargs)
            return output
        # float32, unless DeepSpeed keeps the fp32 masters of all that trains.
        dtype = next(self.trained.parameters()).dtype
        args = tuple(_cast(value, dtype) for value in args)
        kwargs = {name: _cast(value, dtype) for name, value in kwargs.items()}
        output = self.trained(*args, **kwargs)
        return output.to(next(self.base.parameters()).dtype)


LoraLayer = LoraLinear | LoraConv1D | LoraEmbedding
AdapterLayer = LoraLayer | TrainedBias | TrainedModule


def float32_copy(parameter: Tensor) -> nn.Parameter:
    """A trainable float32 copy, on the same device."""
    return nn.Parameter(parameter.detach().to(torch.float32, copy=True))


def _zeros(*shape: int, device: torch.device, shard: Shard | None = None) -> nn.Parameter:
    """Of this rank's part of the shape."""
    size = shape if shard is None else shard.local_shape(shape)
    zeros = nn.Parameter(torch.zeros(size, dtype=torch.float32, device=device))
    mark_shard(zeros, shard)
    return zeros


def full_factors(layer: LoraLinear | LoraConv1D) -> tuple[Tensor, Tensor]:
    """A (rank, in) and B (out, rank) of the update ``s B A``, of packed layers with its zeros."""
    lora_b = layer.lora_B if layer.groups is None else layer.groups.expand(layer.lora_B)
    return layer.lora_A, lora_b


def _add_factors(layer: Any, base: nn.Module, groups: Groups | None) -> None:
    """What the linear layers have beside their base."""
    if groups is not None and sum(groups.sizes) != layer.out_features:
        raise ValueError(f"{layer.out_features} outputs cannot be cut into {list(groups.sizes)}")
    layer.split = base.split if isinstance(base, ParallelLinear) else None
    layer.groups = groups
    assert layer.split is None or groups is None
    layer.register_parameter("trained_bias", None)
    a, b = (None, None) if layer.split is None else layer.split.factors
    device = layer.weight.device
    rank, outputs = layer.r, layer.out_features
    if groups is not None:
        rank, outputs = rank * groups.count, groups.rows
    layer.lora_A = _zeros(rank, layer.in_features, device=device, shard=a)
    layer.lora_B = _zeros(outputs, layer.r, device=device, shard=b)
    layer.train(base.training)


def _product(layer: Any, lora_A: Tensor, lora_B: Tensor) -> Tensor:  # noqa: N803
    """``B A``, (out, in) float32."""
    lora_b = lora_B.float()
    if layer.groups is not None:
        lora_b = layer.groups.expand(lora_b)
    return lora_b @ lora_A.float()


def _around(layer: Any, x: Tensor) -> Tensor:
    if layer.split is None:
        output: Tensor = layer.product(x, _active_bias(layer))
        return output
    output = layer.split.around(x, layer.product, _active_bias(layer))
    return output


def _adapted(layer: Any, x: Tensor, bias: Tensor | None, *, transposed: bool) -> Tensor:
    lora_a, lora_b = full_factors(layer)
    scaling, keep = layer.scaling, None
    if layer.split is not None:
        lora_a, lora_b = layer.split.shared(lora_a, lora_b)
    if layer.training and layer.dropout > 0:
        scaling /= 1 - layer.dropout
        # Drawn for the whole layer on every rank, whose streams stay in step.
        keep = draw_keep(x, layer.dropout, layer.in_features)
        if layer.split is not None:
            keep = layer.split.own_input(keep)
    return lora_linear(x, layer.weight, bias, lora_a, lora_b, scaling, keep, transposed=transposed)


def _active_bias(layer: Any) -> Any:
    if not layer.enabled or layer.trained_bias is None:
        return layer.bias
    split, bias = getattr(layer, "split", None), layer.trained_bias
    return (bias if split is None else split.shared_bias(bias)).to(layer.weight.dtype)


def _biased_function(base: nn.Module) -> Callable[[Tensor, Any, Any], Tensor]:
    if isinstance(base, nn.Linear):
        return F.linear
    if is_conv1d(base):
        return conv1d
    if isinstance(base, nn.LayerNorm):
        shape, eps = base.normalized_shape, base.eps
        return lambda x, weight, bias: F.layer_norm(x, shape, weight, bias, eps)
    raise ValueError(
        f"--train_bias all cannot train the bias of a {type(base).__name__}; "
        "use lora_only, or name the module in --modules_to_save"
    )


def _cast(value: Any, dtype: torch.dtype) -> Any:
    is_float = isinstance(value, Tensor) and value.is_floating_point()
    return value.to(dtype) if is_float else value


def _lora_repr(layer: Any) -> str:
    groups = getattr(layer, "groups", None)
    cut = "" if groups is None else f", groups={groups.sizes}, enabled={groups.enabled}"
    return (
        f"in_features={layer.in_features}, out_features={layer.out_features}, r={layer.r}, "
        f"scaling={layer.scaling:g}, dropout={layer.dropout:g}{cut}"
    )
