"""Layers with a trainable part beside frozen base weights (LoRA, arXiv:2106.09685).

Every layer adopts the base's parameters under the base's names, so the names in the state
dict stay those of the pretrained model. Only the parameters named ``lora_*``,
``trained_bias`` or ``trained.*`` are trained, and they are always float32. With ``enabled`` False
a layer is its base, bit for bit.
"""

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dschat_lora.lora.matmul import adapter_dropout, lora_linear
from dschat_lora.lora.nf4 import (
    NF4Linear,
    is_quantized,
    nf4_linear,
    value_dtype,
    value_shape,
    values_of,
)
from dschat_lora.lora.parallel import ParallelEmbedding, shard_of


def is_conv1d(module: nn.Module) -> bool:
    """Whether ``module`` is GPT-2's transposed linear layer of transformers: weight (in, out)."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf")


def is_transposed(module: nn.Module) -> bool:
    """Whether the weight of a linear layer is (in, out)."""
    return is_conv1d(module) or bool(getattr(module, "transposed", False))


def conv1d(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``x W + b`` of x (..., in) and W (in, out), in the one rounding that Conv1D makes."""
    if bias is None:
        return F.linear(x, weight.t())
    flat = torch.addmm(bias, x.reshape(-1, x.shape[-1]), weight)
    return flat.view(*x.shape[:-1], weight.shape[1])


def full_shape(parameter: Tensor) -> torch.Size:
    """The parameter's shape, also where ZeRO 3 or a tensor group holds only a part of it here.

    Of a quantised one it is that of its values.
    """
    if (values := value_shape(parameter)) is not None:
        return values
    shape, shard = torch.Size(getattr(parameter, "ds_shape", parameter.shape)), shard_of(parameter)
    return shape if shard is None else shard.full_shape(shape)


def _lora_repr(layer: "LoraLinear | LoraEmbedding") -> str:
    """Shape and adapter settings, for ``print(model)``."""
    return (
        f"in_features={layer.in_features}, out_features={layer.out_features}, r={layer.r}, "
        f"scaling={layer.scaling:g}, dropout={layer.dropout:g}"
    )


class LoraLinear(nn.Module):
    """``x -> x W^T + b + scaling * dropout(x) A^T B^T`` with W frozen.

    Both factors are zero until :func:`dschat_lora.lora.model.init_adapter_` draws them. They
    take part in the input's dtype.

    Attributes:
        weight: (out, in) of the base. bias: (out,) of the base, or None.
        lora_A: (r, in) float32. lora_B: (out, r) float32.
        trained_bias: (out,) float32 in place of ``bias``, or None.
        scaling: factor of the update. enabled: False gives the base.
        transposed: the weight is stored (in, out), as in GPT-2.
        in_features, out_features: of the whole layer, however it is divided.
        casts: copies of both factors to compute with, see :mod:`dschat_lora.lora.casts`.
        base_class: of the base.
    """

    casts: tuple[Tensor, Tensor] | None = None
    lora_A: nn.Parameter  # noqa: N815
    lora_B: nn.Parameter  # noqa: N815
    weight: nn.Parameter
    trained_bias: nn.Parameter | None

    def __init__(self, base: nn.Module, *, r: int, scaling: float, dropout: float = 0.0) -> None:
        super().__init__()
        self.weight, self.bias = base.get_parameter("weight"), base._parameters.get("bias")
        self.base_class, self.transposed = type(base), is_transposed(base)
        sizes = full_shape(self.weight)
        self.in_features, self.out_features = sizes if self.transposed else sizes[::-1]
        self.r, self.scaling, self.dropout, self.enabled = r, scaling, dropout, True
        self.register_parameter("trained_bias", None)
        self.lora_A = zeros(r, self.in_features, device=self.weight.device)
        self.lora_B = zeros(self.out_features, r, device=self.weight.device)
        self.train(base.training)

    def forward(self, x: Tensor) -> Tensor:
        """(..., in) -> (..., out), in the dtype of ``x``."""
        if not self.enabled:
            return _base_function(self)(x, self.weight, self.bias)
        scaling, keep = adapter_dropout(x, self.scaling, self.dropout if self.training else 0.0)
        bias, transposed = active_bias(self), self.transposed
        return lora_linear(
            x,
            self.weight,
            bias,
            *self.factors(),
            scaling,
            keep,
            transposed=transposed,
            casts=self.casts,
        )

    def factors(self) -> tuple[Tensor, Tensor]:
        """A (rank, in) and B (out, rank) of the update ``scaling * B A``."""
        return self.lora_A, self.lora_B

    def delta(self, lora_A: Tensor, lora_B: Tensor) -> Tensor:  # noqa: N803
        """The update these factors make to ``weight``, in its shape, float32."""
        update = self.scaling * (lora_B.float() @ lora_A.float())
        return update.T if self.transposed else update

    extra_repr = _lora_repr


class LoraEmbedding(nn.Module):
    """``i -> W[i] + scaling * B A[:, i]`` with W frozen; there is no dropout on token ids.

    Attributes:
        weight: (num_embeddings, dim) of the base.
        lora_embedding_A: (r, num_embeddings) float32. lora_embedding_B: (dim, r) float32.
        in_features: num_embeddings. out_features: dim.
    """

    def __init__(self, base: nn.Embedding | ParallelEmbedding, *, r: int, scaling: float) -> None:
        super().__init__()
        if base.max_norm is not None:
            raise ValueError("an embedding with max_norm rescales its weights and cannot be frozen")
        self.in_features, self.out_features = base.num_embeddings, base.embedding_dim
        self.padding_idx = base.padding_idx
        self.r, self.scaling, self.dropout, self.enabled = r, scaling, 0.0, True
        self.weight = base.weight
        self.lora_embedding_A = zeros(r, self.in_features, device=base.weight.device)
        self.lora_embedding_B = zeros(self.out_features, r, device=base.weight.device)
        self.train(base.training)

    def forward(self, ids: Tensor) -> Tensor:
        """(...) int64 -> (..., dim), in the dtype of ``weight``."""
        return self.rows(ids, self.padding_idx, self.lora_embedding_B)

    def rows(self, ids: Tensor, padding_idx: int | None, lora_B: Tensor) -> Tensor:  # noqa: N803
        """Rows of the updated table, by their numbers in the part of it that is here."""
        base = F.embedding(ids, self.weight, padding_idx)
        if not self.enabled:
            return base
        rows = F.embedding(ids, self.lora_embedding_A.T, padding_idx)
        update = self.scaling * F.linear(rows, lora_B)
        return base + update.to(base.dtype)

    def delta(self, lora_A: Tensor, lora_B: Tensor) -> Tensor:  # noqa: N803
        """The update these factors make to ``weight``, (num_embeddings, dim) float32."""
        return self.scaling * (lora_B.float() @ lora_A.float()).T

    extra_repr = _lora_repr


class TrainedBias(nn.Module):
    """A frozen linear layer or layer norm whose bias alone trains, as a float32 copy.

    Attributes:
        weight, bias: of the base, frozen. trained_bias: float32, in place of ``bias``.
    """

    weight: nn.Parameter

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.function = _biased_function(base)
        self.kind, self.enabled = type(base).__name__, True
        self.transposed = is_transposed(base)
        self.register_parameter("weight", base._parameters["weight"])
        self.bias = base.get_parameter("bias")
        self.trained_bias = float32_copy(self.bias)
        self.train(base.training)

    def forward(self, x: Tensor) -> Tensor:
        """What the base computes, with the trained bias."""
        return self.function(x, self.weight, active_bias(self) if self.enabled else self.bias)

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
        self.trained = float32_module(base).requires_grad_(True)
        self.train(base.training)

    def forward(self, *args: object, **kwargs: object) -> Any:
        """What the original returns, in its dtype, computed with the trained weights.

        That may be a tuple, as of a router of experts.
        """
        if not self.enabled:
            return self.base(*args, **kwargs)
        # float32, unless DeepSpeed keeps the fp32 masters of all that trains.
        dtype = next(self.trained.parameters()).dtype
        args = tuple(_cast(value, dtype) for value in args)
        kwargs = {name: _cast(value, dtype) for name, value in kwargs.items()}
        output = self.trained(*args, **kwargs)
        dtype = next(self.base.parameters()).dtype
        if isinstance(output, tuple):
            return tuple(_cast(value, dtype) for value in output)
        return _cast(output, dtype)


def active_bias(layer: LoraLinear | TrainedBias) -> Tensor | None:
    """The trained bias in the weight's type, if the layer has one; else that of the base."""
    if layer.trained_bias is None:
        return layer.bias
    return layer.trained_bias.to(value_dtype(layer.weight))


def float32_copy(parameter: Tensor) -> nn.Parameter:
    """A trainable float32 copy, on the same device."""
    return nn.Parameter(parameter.detach().to(torch.float32, copy=True))


def float32_module(base: nn.Module) -> nn.Module:
    """A float32 copy of a module, whose quantised layers become plain ones."""
    if isinstance(base, NF4Linear):
        if base.transposed:
            raise ValueError(
                "--modules_to_save: a Conv1D layer in 4 bits cannot be trained in full; adapt it "
                "by --target_modules, or use --base_bits 16"
            )
        bias = base._parameters["bias"]
        plain = nn.Linear(base.in_features, base.out_features, bias is not None, device="meta")
        plain.weight = nn.Parameter(values_of(base.weight, torch.float32))
        plain.register_parameter("bias", None if bias is None else float32_copy(bias))
        return plain.train(base.training)
    inner = {id(m): float32_module(m) for m in base.modules() if isinstance(m, NF4Linear)}
    return copy.deepcopy(base, inner).float()


def zeros(*shape: int, device: torch.device) -> nn.Parameter:
    """A trainable float32 tensor."""
    return nn.Parameter(torch.zeros(shape, dtype=torch.float32, device=device))


def _base_function(layer: LoraLinear) -> Callable[[Tensor, Any, Any], Tensor]:
    if is_quantized(layer.weight):
        return nf4_linear
    return conv1d if layer.transposed else F.linear


def _biased_function(base: nn.Module) -> Callable[[Tensor, Any, Any], Tensor]:
    if isinstance(base, NF4Linear):
        return nf4_linear
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


def _cast(value: object, dtype: torch.dtype) -> object:
    if isinstance(value, Tensor) and value.is_floating_point():
        return value.to(dtype)
    return value
