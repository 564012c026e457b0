"""Layers with a trainable part beside frozen base weights (LoRA, arXiv:2106.09685).

Every layer adopts the base's parameters under the base's names, so the names in the state
dict stay those of the pretrained model. Only the parameters named ``lora_*``,
``trained_bias`` or ``trained.*`` are trained, and they are always float32. With ``enabled`` False
a layer is its base, bit for bit.

``y = x W^T + b + s (x A^T) B^T`` written out in torch makes four tensors as large as ``y`` (the
base's product, the update, the scaled update, their sum) and keeps 16-bit copies of fp32
factors. :func:`lora_linear` makes one, and keeps what the factors' gradients need: ``x``,
shared with every other layer that reads it, and ``x A^T``, which is r wide.
"""

from collections.abc import Iterable
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dschat_lora.kernels.swiglu import swiglu, swiglu_backward
from dschat_lora.lora.autograd import Context, QuantState

# Since torch 2.8, on CUDA.
_MM_TAKES_TYPE = hasattr(torch.ops.aten.mm, "dtype") and torch.version.hip is None


class Together(Protocol):
    """What computes layers of one input for all of them."""

    def read(self, layer: "LoraLinear", x: Tensor) -> Tensor | None:
        """(..., out) of one of the layers; None where it is to compute by itself."""


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
        casts: copies of both factors to compute with, see
            :class:`~dschat_lora.lora.casts.FactorCasts`.
        shared: what computes the layer together with others of its input, while casts are in use.
        base_class: of the base.
    """

    takes_casts = True
    casts: tuple[Tensor, Tensor] | None = None
    shared: Together | None = None
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

    def forward(self, x: Tensor, gate: Tensor | None = None) -> Tensor:
        """(..., in) -> (..., out), in the dtype of ``x``; given ``gate``, of ``silu(gate) * x``."""
        if not self.enabled:
            x = x if gate is None else gated(x, gate)
            if (state := state_of(self.weight)) is not None:
                return state.linear(x, self.weight, self.bias)
            return (conv1d if self.transposed else F.linear)(x, self.weight, self.bias)
        if self.shared is not None and gate is None:
            together = self.shared.read(self, x)
            if together is not None:
                return together
        scaling, keep = self.scaling, None
        if self.training and self.dropout:
            scaling, keep = adapter_dropout(x, scaling, self.dropout)
        return lora_linear(
            x,
            self.weight,
            active_bias(self),
            *self.factors(),
            scaling,
            keep,
            transposed=self.transposed,
            casts=self.casts,
            gate=gate,
        )

    def factors(self) -> tuple[Tensor, Tensor]:
        """A (rank, in) and B (out, rank) of the update ``scaling * B A``."""
        return self.lora_A, self.lora_B

    def delta(self, lora_A: Tensor, lora_B: Tensor) -> Tensor:  # noqa: N803
        """The update these factors make to ``weight``, in its shape, float32."""
        update = self.scaling * (lora_B.float() @ lora_A.float())
        return update.mT if self.transposed else update

    def extra_repr(self) -> str:
        """Shape and adapter settings, for ``print(model)``."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, r={self.r}, "
            f"scaling={self.scaling:g}, dropout={self.dropout:g}"
        )


def lora_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    lora_A: Tensor,  # noqa: N803
    lora_B: Tensor,  # noqa: N803
    scaling: float,
    keep: Tensor | None = None,
    *,
    transposed: bool = False,
    casts: tuple[Tensor, Tensor] | None = None,
    gate: Tensor | None = None,
) -> Tensor:
    """``x W^T + b + scaling * ((x * keep) A^T) B^T`` for a frozen W.

    Under autocast all of it is computed in autocast's type, else in that of ``x``.

    Args:
        x: (..., in).
        weight: (out, in), frozen as a rule. May be a ZeRO 3 parameter: it is read anew in the
            backward pass, when DeepSpeed has gathered it again. A quantised one is unpacked in
            both passes.
        bias: (out,) or None.
        lora_A: (r, in), any float type.
        lora_B: (out, r), any float type.
        scaling: of the update; with dropout it includes the factor ``1 / (1 - p)``.
        keep: (..., in) bool, True where dropout keeps the input of the adapter; None: everywhere.
        transposed: ``weight`` is (in, out), as in GPT-2's layers.
        casts: ``lora_A`` and ``lora_B`` in the type of the computation; cast here if absent.
        gate: (..., in), in the type of ``x``. Given one, the layer reads ``silu(gate) * x``, which
            the backward pass forms again, so that it is not kept.

    Returns:
        (..., out).
    """
    if not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active():
        values = values_of(weight, x.dtype)
        matrix = values.t() if transposed else values
        x = x if gate is None else F.silu(gate) * x
        return lora_linear_reference(x, matrix, bias, lora_A, lora_B, scaling, keep)
    kind = x.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
    state = state_of(weight)
    return _LoraLinear.apply(  # type: ignore[no-untyped-call]
        x.to(dtype),
        weight if state is not None else weight.to(dtype),
        None if bias is None else bias.to(dtype),
        lora_A,
        lora_B,
        scaling,
        keep,
        transposed,
        *(casts or (None, None)),
        state,
        None if gate is None else gate.to(dtype),
    )


def gated(x: Tensor, gate: Tensor) -> Tensor:
    """``silu(gate) * x`` in one kernel (arXiv:2002.05202, eq. 5), which keeps no more for later."""
    output: Tensor = _SwiGLU.apply(gate, x)  # type: ignore[no-untyped-call]
    return output


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Context, gate: Tensor, x: Tensor) -> Tensor:
        ctx.save_for_backward(gate, x)
        return swiglu(_rows(gate), _rows(x)).view(x.shape)

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor, ...]:
        gate, x = ctx.saved_tensors
        if torch.is_grad_enabled():  # they are to be differentiated themselves
            sigmoid = gate.sigmoid()
            return grad * x * sigmoid * (1 + gate * (1 - sigmoid)), grad * gate * sigmoid
        return tuple(
            y.view(x.shape) for y in swiglu_backward(_rows(grad), _rows(gate), _rows(x), None)
        )


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def scaled_product(first: Tensor, second: Tensor, scaling: float) -> Tensor:
    """``scaling * first @ second`` of (n, k) and (k, m), scaled in the accumulator."""
    output = first.new_empty(len(first), second.shape[1])
    return output.addmm_(first, second, beta=0, alpha=scaling)


def product_as(dtype: torch.dtype, first: Tensor, second: Tensor) -> Tensor:
    """``first @ second`` in another type; on a GPU float32 is not rounded to 16 bits before."""
    if _MM_TAKES_TYPE and first.is_cuda and dtype == torch.float32 and first.dtype.itemsize == 2:
        return torch.mm(first, second, out_dtype=dtype)
    return (first @ second).to(dtype)


class _LoraLinear(torch.autograd.Function):
    """Products of matrices: the leading dimensions of ``x`` are one."""

    @staticmethod
    def forward(
        ctx: Context,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        lora_A: Tensor,  # noqa: N803
        lora_B: Tensor,  # noqa: N803
        scaling: float,
        keep: Tensor | None,
        transposed: bool,
        down: Tensor | None,
        up: Tensor | None,
        state: QuantState | None,
        gate: Tensor | None,
    ) -> Tensor:
        # The parameters themselves are kept: casts are made again, and shards gathered again.
        down, up = (lora_A if down is None else down), (lora_B if up is None else up)
        rows = _rows(x) if gate is None else swiglu(_rows(gate), _rows(x))
        values = weight if state is None else state.values(weight.detach(), x.dtype)
        output = F.linear(rows, values.t() if transposed else values, bias)
        del values
        adapted = rows if keep is None else rows * keep.reshape(rows.shape)
        inner = scaled_product(adapted, down.to(x.dtype).t(), scaling)
        output.addmm_(inner, up.to(x.dtype).t())
        ctx.save_for_backward(x, weight, lora_A, lora_B, down, up, keep, inner, gate)
        ctx.scaling, ctx.transposed, ctx.state = scaling, transposed, state
        ctx.types = lora_A.dtype, lora_B.dtype
        # No view of what nothing else holds: some models write into it (Falcon, OLMo).
        shape = [*x.shape[:-1], output.shape[-1]]
        return torch.ops.aten._unsafe_view(output, shape)

    @staticmethod
    def backward(ctx: Context, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, lora_A, lora_B, down, up, keep, inner, gate = ctx.saved_tensors  # noqa: N806
        if torch.is_grad_enabled():  # they are to be differentiated themselves
            return _graph_of_gradients(ctx, grad_output, x, weight, lora_A, lora_B, keep, gate)
        wants_x, wants_weight, wants_bias, wants_a, wants_b = ctx.needs_input_grad[:5]
        wants_x = wants_x or ctx.needs_input_grad[11]
        rows, grad = _rows(x), _rows(grad_output)
        if keep is not None:
            keep = keep.reshape(rows.shape)
        grad_inner = scaled_product(grad, up.to(grad.dtype), ctx.scaling)
        grad_x = grad_gate = grad_a = grad_b = None
        if wants_x:
            # Unpacked again: kept, the values would take the room that four bits save.
            values = weight if ctx.state is None else ctx.state.values(weight, grad.dtype)
            grad_x = grad @ (values.t() if ctx.transposed else values)
            del values
            if keep is None:
                grad_x.addmm_(grad_inner, down.to(grad.dtype))
            else:
                grad_x.add_((grad_inner @ down.to(grad.dtype)).mul_(keep))
        if gate is not None and grad_x is not None:
            # The product of both takes the place of its gradient.
            rows, gated_rows = grad_x, (_rows(gate), rows)
            grad_gate, grad_x = (y.view(x.shape) for y in swiglu_backward(rows, *gated_rows, rows))
        elif gate is not None:
            rows = swiglu(_rows(gate), rows)
        if wants_a:
            adapted = rows if keep is None else rows * keep
            grad_a = product_as(ctx.types[0], grad_inner.t(), adapted)
        if wants_b:
            grad_b = product_as(ctx.types[1], grad.t(), inner)
        grad_bias = grad.sum(0) if wants_bias else None
        grad_matrix = grad.t() @ rows if wants_weight else None
        if grad_matrix is not None and ctx.transposed:
            grad_matrix = grad_matrix.t()
        grad_x = None if grad_x is None else grad_x.view(x.shape)
        return grad_x, grad_matrix, grad_bias, grad_a, grad_b, *[None] * 6, grad_gate


def _graph_of_gradients(
    ctx: Context,
    grad_output: Tensor,
    x: Tensor,
    weight: Tensor,
    lora_A: Tensor,  # noqa: N803
    lora_B: Tensor,  # noqa: N803
    keep: Tensor | None,
    gate: Tensor | None,
) -> tuple[Tensor | None, ...]:
    """The gradients of :class:`_LoraLinear` by torch's own operations, which have derivatives."""
    values = weight if ctx.state is None else ctx.state.values(weight, x.dtype)
    matrix = values.t() if ctx.transposed else values
    read = x if gate is None else F.silu(gate) * x
    output = lora_linear_reference(read, matrix, None, lora_A, lora_B, ctx.scaling, keep)
    inputs = {0: x, 1: weight, 3: lora_A, 4: lora_B, 11: x if gate is None else gate}
    chosen = {i: each for i, each in inputs.items() if ctx.needs_input_grad[i]}
    gradients: list[Tensor | None] = [None] * 12
    if chosen:
        wanted = torch.autograd.grad(output, [*chosen.values()], grad_output, create_graph=True)
        for i, gradient in zip(chosen, wanted, strict=True):
            gradients[i] = gradient
    if ctx.needs_input_grad[2]:
        gradients[2] = grad_output.reshape(-1, grad_output.shape[-1]).sum(0)
    return tuple(gradients)


def lora_linear_reference(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    lora_A: Tensor,  # noqa: N803
    lora_B: Tensor,  # noqa: N803
    scaling: float,
    keep: Tensor | None = None,
) -> Tensor:
    """What :func:`lora_linear` computes, as the formula reads (arXiv:2106.09685, eq. 3)."""
    adapted = x if keep is None else x * keep
    update = F.linear(F.linear(adapted, lora_A.to(x.dtype)), lora_B.to(x.dtype))
    return F.linear(x, weight, bias) + scaling * update


def adapter_dropout(
    x: Tensor, scaling: float, dropout: float, features: int | None = None
) -> tuple[float, Tensor | None]:
    """``scaling`` and ``keep`` for :func:`lora_linear` under dropout of the adapter's input."""
    if dropout == 0:
        return scaling, None
    return scaling / (1 - dropout), draw_keep(x, dropout, features)


def draw_keep(x: Tensor, dropout: float, features: int | None = None) -> Tensor:
    """(..., features) bool, by default (..., in), True with probability ``1 - dropout``."""
    shape = (*x.shape[:-1], x.shape[-1] if features is None else features)
    # Not by bernoulli_(), of which inductor of torch 2.13 makes something else.
    return torch.rand(shape, device=x.device) >= dropout


class LoraEmbedding(nn.Module):
    """``i -> W[i] + scaling * B A[:, i]`` with W frozen; there is no dropout on token ids.

    Attributes:
        weight: (num_embeddings, dim) of the base.
        lora_embedding_A: (r, num_embeddings) float32. lora_embedding_B: (dim, r) float32.
        in_features: num_embeddings. out_features: dim.
    """

    def __init__(self, base: nn.Embedding, *, r: int, scaling: float) -> None:
        """Adopt the weight of ``base``, an ``nn.Embedding`` or one divided among ranks."""
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

    extra_repr = LoraLinear.extra_repr


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


def active_bias(layer: Any) -> Tensor | None:
    """The trained bias in the weight's type, if the layer has one; else that of the base."""
    bias: Tensor | None = layer.bias
    if layer.trained_bias is not None:
        bias = layer.trained_bias.to(value_dtype(layer.weight))
    return bias


def zeros(*shape: int, device: torch.device) -> nn.Parameter:
    """A trainable float32 tensor."""
    return nn.Parameter(torch.zeros(shape, dtype=torch.float32, device=device))


def full_shape(parameter: Tensor) -> torch.Size:
    """The parameter's shape, also where ZeRO 3 or a tensor group holds only a part of it here.

    Of a quantised one it is that of its values.
    """
    if (values := value_shape(parameter)) is not None:
        return values
    shape = torch.Size(getattr(parameter, "ds_shape", parameter.shape))
    shard = getattr(parameter, "tensor_shard", None)
    return shape if shard is None else torch.Size(shard.full_shape(shape))


def state_of(weight: object) -> QuantState | None:
    """What the codes of a quantised weight stand for; None for another tensor."""
    return getattr(weight, "nf4", None)


def is_quantized(weight: object) -> bool:
    """Whether a parameter holds codes."""
    return state_of(weight) is not None


def value_dtype(weight: Tensor) -> torch.dtype:
    """The type in which the values of a weight take part in a product."""
    return (state_of(weight) or weight).dtype


def value_shape(weight: Tensor) -> torch.Size | None:
    """The shape of a quantised weight's values; None for any other tensor."""
    if (state := state_of(weight)) is None:
        return None
    return torch.Size(state.shape[::-1] if state.transposed else state.shape)


def values_of(weight: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """The values of a weight, quantised or not, in ``dtype`` (default: its own)."""
    if (state := state_of(weight)) is not None:
        return state.values(weight.data, dtype)
    return weight if dtype is None else weight.to(dtype)


def stored_bytes(parameter: Tensor) -> int:
    """Bytes of a whole parameter as it is stored, of a quantised one with its scales."""
    numel = int(getattr(parameter, "ds_numel", parameter.numel()))
    state = state_of(parameter)
    scales = [] if state is None else state.tensors().values()
    return numel * parameter.element_size() + sum(t.numel() * t.element_size() for t in scales)


def value_bytes(parameters: Iterable[Tensor]) -> int:
    """Bytes of the values of those parameters that are quantised."""
    states = filter(None, map(state_of, parameters))
    return sum(state.shape.numel() * state.dtype.itemsize for state in states)
