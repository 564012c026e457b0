"""LoRA of experts whose weights are fused: one 3-D parameter for all experts of a layer.

transformers 5 holds mixtures of experts so. PEFT adapts such a parameter by ``target_parameters``:
each expert has a pair of factors of its own. Here the parameter gives way to a module of its name,
:class:`LoraExperts`, and tokens run sorted by expert: an expert that no token was sent to costs
nothing.
"""

from collections.abc import Callable, Iterator
from itertools import pairwise
from types import MethodType
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from dschat_lora.kernels.support import runs_kernels
from dschat_lora.kernels.swiglu import swiglu, swiglu_backward
from dschat_lora.lora.autograd import Context
from dschat_lora.lora.layers import full_shape, gated, state_of, zeros
from dschat_lora.lora.names import EXPERT_WEIGHTS
from dschat_lora.lora.nf4 import NF4State, quantize

FUSES_GATE = "fuses_gate"  # attribute of modules of experts: whether on a CPU too
_ALIGNMENT = 16  # bytes; of rows and matrices of a grouped product


class Routing(NamedTuple):
    """Which rows go to which experts: S rows sorted by expert, of tokens that chose k experts."""

    experts: Tensor  # (S,) of each row
    ends: Tensor  # (E,) int32, the number of rows of all experts up to each
    tokens: Tensor  # (S,) the token of each row
    num_tokens: int


class FusedExperts(Protocol):
    """What transformers' modules of fused experts have."""

    num_experts: int
    has_gate: bool
    has_bias: bool
    is_transposed: bool
    act_fn: Callable[[Tensor], Tensor]
    _apply_gate: Callable[[Tensor], Tensor]
    post_expert_norm: Callable[[Tensor], Tensor]


class LoraExperts(nn.Module):
    """``x_e -> x_e W_e^T + scaling * x_e A_e^T B_e^T`` for the rows of every expert e, W frozen.

    The update has no dropout, as in PEFT.

    Attributes:
        weight: (E, out, in) of the base, or (E, in, out) if ``transposed``.
        lora_A: (E, r, in) float32. lora_B: (E, out, r) float32.
        scaling: factor of the update. enabled: False gives the base.
        num_experts, in_features, out_features: E, and those of one expert.
        casts: copies of both factors to compute with, see
            :class:`~dschat_lora.lora.casts.FactorCasts`.
    """

    takes_casts = True
    casts: tuple[Tensor, Tensor] | None = None
    dropout = 0.0
    trained_bias = None

    def __init__(
        self, weight: nn.Parameter, *, r: int, scaling: float, transposed: bool = False
    ) -> None:
        super().__init__()
        self.weight, self.transposed = weight, transposed
        self.num_experts, rows, columns = full_shape(weight)
        self.out_features, self.in_features = (columns, rows) if transposed else (rows, columns)
        self.r, self.scaling, self.enabled = r, scaling, True
        self.lora_A = zeros(self.num_experts, r, self.in_features, device=weight.device)
        self.lora_B = zeros(self.num_experts, self.out_features, r, device=weight.device)

    def forward(self, x: Tensor, routing: Routing, gate: Tensor | None = None) -> Tensor:
        """(S, in) rows sorted by expert -> (S, out); given ``gate``, of ``silu(gate) * x``.

        That product is formed again in the backward pass.
        """
        if not self.enabled:
            x = x if gate is None else gated(x, gate)
            return expert_linear(x, self.weight, routing.ends, transposed=self.transposed)
        kind = x.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
        output: Tensor = _LoraExperts.apply(  # type: ignore[no-untyped-call]
            x.to(dtype),
            self.weight if state_of(self.weight) is not None else self.weight.to(dtype),
            self.lora_A,
            self.lora_B,
            routing.ends,
            self.scaling,
            self.transposed,
            *(self.casts or (None, None)),
            state_of(self.weight),
            None if gate is None else gate.to(dtype),
        )
        return output

    def empty_casts(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Room for copies of A and B, of a rank that grouped products take as it is.

        What is added to the rank is 0, and stays so.
        """
        like = self.lora_A.new_empty(0, dtype=dtype)
        rank = self.r + (_missing(like, self.r) if _has_kernel(like) else 0)
        down = like.new_zeros(self.num_experts, rank, self.in_features)
        return down, like.new_zeros(self.num_experts, self.out_features, rank)

    def delta(self, lora_A: Tensor, lora_B: Tensor) -> Tensor:  # noqa: N803
        """The update these factors make to ``weight``, in its shape, float32."""
        update = self.scaling * (lora_B.float() @ lora_A.float())
        return update.transpose(1, 2) if self.transposed else update

    def extra_repr(self) -> str:
        """Shape and adapter settings, for ``print(model)``."""
        return (
            f"num_experts={self.num_experts}, in_features={self.in_features}, "
            f"out_features={self.out_features}, r={self.r}, scaling={self.scaling:g}"
        )


def fused_experts(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Modules of fused experts with their names, those that transformers' kernels may compute."""
    for name, module in model.named_modules():
        down = getattr(module, "down_proj", None)
        if isinstance(down, nn.Module):
            down = getattr(down, "weight", None)
        is_fused = isinstance(down, nn.Parameter) and len(full_shape(down)) == 3
        if is_fused and hasattr(module, "_apply_gate") and hasattr(module, "is_transposed"):
            yield name, module


def expert_weights(model: nn.Module) -> dict[str, tuple[nn.Module, str]]:
    """The fused weights of experts by name, in model order, with their module and own name."""
    return {
        f"{name}.{weight}": (module, weight)
        for name, module in fused_experts(model)
        for weight in EXPERT_WEIGHTS
        if getattr(module, weight, None) is not None
    }


def expert_holders(module: nn.Module) -> dict[str, tuple[nn.Module, str]]:
    """The fused weights of experts by their names in ``module``: whose parameter each is."""
    holders = {}
    for weight in EXPERT_WEIGHTS:
        if (own := getattr(module, weight, None)) is not None:
            holders[weight] = (own, "weight") if isinstance(own, nn.Module) else (module, weight)
    return holders


def adapt_experts(module: nn.Module, weight: str, *, r: int, scaling: float) -> None:
    """Put factors beside a fused weight of ``module``, in place."""
    base, transposed = module.get_parameter(weight), bool(module.is_transposed)
    lora = LoraExperts(base, r=r, scaling=scaling, transposed=transposed)
    compute_by(module, weight, lora.train(module.training))


def compute_by(module: nn.Module, weight: str, layer: nn.Module) -> None:
    """Have a module of experts multiply by ``layer`` in place of its fused weight."""
    del module._parameters[weight]
    setattr(module, weight, layer)
    module.forward = MethodType(_routed, module)


def quantize_experts(module: nn.Module, weight: str, *, dtype: torch.dtype) -> None:
    """Have ``module`` hold a fused weight, which is on the meta device, in NF4."""
    module._parameters[weight] = quantize(module.get_parameter(weight), dtype=dtype)
    module.forward = MethodType(_routed, module)


def expert_linear(x: Tensor, weight: Tensor, ends: Tensor, *, transposed: bool = False) -> Tensor:
    """``x_e W_e^T`` for the rows x_e of every expert e.

    Args:
        x: (S, in) rows sorted by expert.
        weight: (E, out, in), or (E, in, out) if ``transposed``; quantised or not.
        ends: (E,), as in :class:`Routing`.
        transposed: how ``weight`` is stored.

    Returns:
        (S, out).
    """
    if (state := state_of(weight)) is not None:
        args = x, weight, ends, transposed, state
        output: Tensor = _QuantizedExperts.apply(*args)  # type: ignore[no-untyped-call]
        return output
    weight = weight.to(x.dtype)
    return grouped(x, weight if transposed else weight.transpose(1, 2), ends)


def _routed(
    module: FusedExperts, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """(T, H) outputs for (T, H) states, each token's weighted sum over the k experts it chose.

    Which they are, and the factors of their outputs, is (T, k).
    """
    count, chosen = top_k_index.shape
    experts, order = top_k_index.flatten().sort(stable=True)
    numbers = torch.arange(module.num_experts, device=experts.device)
    ends = torch.searchsorted(experts, numbers, right=True).int()
    routing = Routing(experts, ends, order // chosen, count)
    rows = hidden_states[routing.tokens]
    gate = None
    if not module.has_gate:
        inner = module.act_fn(_product(module, "up_proj", rows, routing))
    elif _fuses_gate(module, rows):
        gate, inner = _product(module, "gate_up_proj", rows, routing).chunk(2, dim=-1)
    else:
        inner = module._apply_gate(_product(module, "gate_up_proj", rows, routing))
    outputs = _product(module, "down_proj", inner, routing, gate)
    if getattr(module, "has_post_expert_norm", False):
        outputs = module.post_expert_norm(outputs)
    outputs = outputs * top_k_weights.flatten()[order, None]
    # Back in the order of tokens, whose k outputs are added: no sum depends on another order.
    summed: Tensor = outputs[order.argsort()].view(count, chosen, -1).sum(1)
    return summed.to(hidden_states.dtype)


def _fuses_gate(module: FusedExperts, x: Tensor) -> bool:
    """Whether ``module``, which gates by SiLU, is to do so by one kernel; on a CPU if asked to."""
    on_cpu = getattr(module, FUSES_GATE, None)
    traced = torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()
    if on_cpu is None or traced:
        return False
    return runs_kernels(x.device) or (on_cpu and not x.is_cuda)


def _product(
    module: FusedExperts, weight: str, x: Tensor, routing: Routing, gate: Tensor | None = None
) -> Tensor:
    """(S, out) of (S, in) rows, with the bias of each row's expert; of ``silu(gate) * x``."""
    own = getattr(module, weight)
    if gate is not None and not isinstance(own, LoraExperts):
        x, gate = gated(x, gate), None
    if isinstance(own, LoraExperts):
        output: Tensor = own(x, routing, gate)
    elif isinstance(own, nn.Module):
        output = own(x, routing)
    else:
        output = expert_linear(x, own, routing.ends, transposed=module.is_transposed)
    bias = getattr(module, f"{weight}_bias", None) if module.has_bias else None
    return output if bias is None else output + bias[routing.experts].to(output.dtype)


class _QuantizedExperts(torch.autograd.Function):
    """Keeps the codes for the backward pass: the values would take the room that they save."""

    @staticmethod
    def forward(
        ctx: Context,
        x: Tensor,
        weight: Tensor,
        ends: Tensor,
        transposed: bool,
        state: NF4State,
    ) -> Tensor:
        ctx.save_for_backward(weight, ends)
        ctx.state, ctx.transposed = state, transposed
        values = state.values(weight.detach(), x.dtype)
        return grouped(x, values if transposed else values.transpose(1, 2), ends)

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        weight, ends = ctx.saved_tensors
        assert ctx.state is not None
        values = ctx.state.values(weight, grad.dtype)
        grad_x = grouped(grad, values.transpose(1, 2) if ctx.transposed else values, ends)
        return grad_x, *[None] * 4


class _LoraExperts(torch.autograd.Function):
    """Grouped products; weights are read anew in the backward pass, when ZeRO 3 has them again."""

    @staticmethod
    def forward(
        ctx: Context,
        x: Tensor,
        weight: Tensor,
        lora_A: Tensor,  # noqa: N803
        lora_B: Tensor,  # noqa: N803
        ends: Tensor,
        scaling: float,
        transposed: bool,
        down: Tensor | None,
        up: Tensor | None,
        state: NF4State | None,
        gate: Tensor | None,
    ) -> Tensor:
        down, up = (lora_A if down is None else down), (lora_B if up is None else up)
        rows = x if gate is None else swiglu(gate, x)
        values = weight if state is None else state.values(weight.detach(), x.dtype)
        output = grouped(rows, values if transposed else values.transpose(1, 2), ends)
        del values
        inner = grouped(rows, down.to(x.dtype).transpose(1, 2), ends)
        output.add_(grouped(inner, up.to(x.dtype).transpose(1, 2), ends), alpha=scaling)
        ctx.save_for_backward(x, weight, lora_A, lora_B, down, up, inner, ends, gate)
        ctx.scaling, ctx.transposed, ctx.state = scaling, transposed, state
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, lora_A, lora_B, down, up, inner, ends, gate = ctx.saved_tensors  # noqa: N806
        wants_x, wants_weight, wants_a, wants_b = ctx.needs_input_grad[:4]
        wants_x = wants_x or ctx.needs_input_grad[10]
        grad_inner = grouped(grad, up.to(grad.dtype), ends).mul_(ctx.scaling)
        rank, rows = lora_A.shape[1], x
        grad_x = grad_gate = grad_weight = grad_a = grad_b = None
        if wants_x:
            values = weight if ctx.state is None else ctx.state.values(weight, grad.dtype)
            grad_x = grouped(grad, values.transpose(1, 2) if ctx.transposed else values, ends)
            del values
            grad_x.add_(grouped(grad_inner, down.to(grad.dtype), ends))
        if gate is not None and grad_x is not None:
            # The product of both takes the place of its gradient.
            rows = grad_x
            grad_gate, grad_x = swiglu_backward(rows, gate, x, rows)
        elif gate is not None:
            rows = swiglu(gate, x)
        empty = torch.diff(ends, prepend=ends.new_zeros(1)) == 0
        if wants_a:  # copies may have more rows than the rank
            grad_a = _grouped_gradient(grad_inner, rows, ends, empty)[:, :rank].to(lora_A.dtype)
        if wants_b:
            grad_b = _grouped_gradient(grad, inner, ends, empty).mul_(ctx.scaling)
            grad_b = grad_b[..., :rank].to(lora_B.dtype)
        if wants_weight:
            left, right = (rows, grad) if ctx.transposed else (grad, rows)
            grad_weight = _grouped_gradient(left, right, ends, empty)
        return grad_x, grad_weight, grad_a, grad_b, *[None] * 6, grad_gate


def grouped(x: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    """(S, out): the rows of each group times its matrix of (E, in, out)."""
    if not _has_kernel(x):
        bounds = zip(_bounds(ends), matrices, strict=True)
        return torch.cat([x[a:b] @ matrix for (a, b), matrix in bounds])
    inner, outer = _missing(x, x.shape[1]), _missing(x, matrices.shape[2])
    if inner or outer:  # a small rank, as a rule
        x, matrices = F.pad(x, (0, inner)), F.pad(matrices, (0, outer, 0, inner))
    product: Tensor = F.grouped_mm(_aligned(x), _aligned(matrices), offs=ends)
    return product[:, : product.shape[1] - outer].contiguous() if outer else product


def _grouped_gradient(left: Tensor, right: Tensor, ends: Tensor, empty: Tensor) -> Tensor:
    """(E, m, n): of each group of rows of (S, m) and (S, n), left^T right; zero where it is empty.

    That is the gradient of a group's matrix. ``empty`` is (E,) bool.
    """
    if not _has_kernel(left):
        return torch.stack([left[a:b].t() @ right[a:b] for a, b in _bounds(ends)])
    m, n = left.shape[1], right.shape[1]
    left, right = (
        F.pad(x, (0, missing)) if (missing := _missing(x, x.shape[1])) else x for x in (left, right)
    )
    # Of groups without rows some kernels write nothing.
    product = F.grouped_mm(_aligned(left).t(), _aligned(right), offs=ends)
    return product.masked_fill_(empty[:, None, None], 0)[:, :m, :n]


def _has_kernel(x: Tensor) -> bool:
    """Whether torch multiplies groups on this device without being told their sizes."""
    if not hasattr(F, "grouped_mm") or x.dtype == torch.float64:
        return False
    if x.device.type == "cuda":
        return torch.cuda.get_device_capability(x.device) >= (8, 0)
    # Before, on a CPU, memory had to be aligned, which that of loaded files is not.
    return torch.torch_version.TorchVersion(torch.__version__) >= "2.11"


def _missing(x: Tensor, features: int) -> int:
    """Features to add until a row of them fills the bytes that a grouped product wants."""
    return -features % (_ALIGNMENT // x.element_size())


def _aligned(tensor: Tensor) -> Tensor:
    """The tensor, where a grouped product takes its strides; else a copy."""
    strides = [stride for stride in tensor.stride() if stride != 1]
    fits = 1 in tensor.stride()[-2:] and not any(_missing(tensor, each) for each in strides)
    return tensor if fits else tensor.contiguous()


def _bounds(ends: Tensor) -> Iterator[tuple[int, int]]:
    return pairwise([0, *ends.tolist()])
