"""RMSNorm, SwiGLU and rotary embeddings in few kernels, where transformers has many."""

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from dschat_lora.kernels.rotary import rotate, rotate_plain
from dschat_lora.kernels.support import runs_kernels
from dschat_lora.lora.autograd import Context
from dschat_lora.lora.experts import FUSES_GATE
from dschat_lora.lora.layers import LoraLinear, gated

_AGREES = 1e-5  # relative error in fp32 that is rounding
_GATED = ("gate_proj", "up_proj", "down_proj", "act_fn")  # parts of an MLP
_ROTARY = "apply_rotary_pos_emb"  # in the module of a model's attention
_PLAIN = "plain_layers"  # attribute of a model and its copies


def keep_plain(model: PreTrainedModel) -> None:
    """Have a model's layers computed as transformers does, in decoding too."""
    setattr(model, _PLAIN, True)


def keeps_plain(model: nn.Module) -> bool:
    """Whether :func:`keep_plain` was called."""
    return bool(getattr(model, _PLAIN, False))


def fuse_kernels(model: PreTrainedModel, *, on_cpu: bool = False, mlps: bool = True) -> list[str]:
    """Compute norms, MLPs and rotations by fewer kernels on a GPU, in training and decoding.

    A class of norms or MLPs, and a function that rotates, is replaced if it gives the same on
    random numbers; others, and what is on a CPU, compute as before. What is 16 bits wide is rounded
    once where it was rounded two or three times. The function that rotates is that of all models
    of the type in this process.

    Args:
        model: from transformers; changed in place, weights and their names are not.
        on_cpu: compute so on a CPU too, where it is hardly faster.
        mlps: whether the GPU runs kernels in Triton, by which MLPs are computed.

    Returns:
        the names of what was replaced.
    """
    classes: dict[type[nn.Module], type[nn.Module] | None] = {}
    homes = {sys.modules.get(type(each).__module__, sys) for each in model.modules()}
    for module in model.modules():
        kind = type(module)
        # Some norms of Gemma's have no weight.
        is_norm = "RMSNorm" in kind.__name__ and module._parameters.get("weight") is not None
        if not is_norm and not (mlps and all(name in module._modules for name in _GATED)):
            continue
        if kind not in classes:
            classes[kind] = (_fused_norm if is_norm else _fused_mlp)(module, on_cpu)
        if (fused := classes[kind]) is not None:
            module.__class__ = fused
    replaced = [kind.__name__ for kind, fused in classes.items() if fused is not None]
    for module in model.modules() if mlps else ():
        if getattr(module, "has_gate", False) and _gates_by_silu(module):
            setattr(module, FUSES_GATE, on_cpu)
    for home in homes:
        function = vars(home).get(_ROTARY)
        if function is not None and isinstance(function, _Rotate):
            function.on_cpu |= on_cpu
        elif function is not None and _is_rotation(function):
            vars(home)[_ROTARY] = _Rotate(function, on_cpu)
        else:
            continue
        replaced.append(f"{home.__name__}.{_ROTARY}")
    return replaced


def _fused_norm(norm: Any, on_cpu: bool) -> type[nn.Module] | None:
    """A class that computes as ``norm`` does by torch's own kernel; None where none would."""
    kind, weight = type(norm), norm.weight
    name = "variance_epsilon" if hasattr(norm, "variance_epsilon") else "eps"
    eps = getattr(norm, name, None)
    if weight.dim() != 1 or not isinstance(eps, float):
        return None
    x, scale = _numbers(2, len(weight))
    probe = nn.Module.__new__(kind)
    vars(probe).update(vars(norm), _parameters={"weight": nn.Parameter(scale, requires_grad=False)})
    try:
        expected = kind.forward(probe, x)
    except (AttributeError, RuntimeError, TypeError):
        return None  # one that takes more than a tensor
    offsets = [n for n in (0, 1) if _agree(F.rms_norm(x, x.shape, n + scale, eps), expected)]
    if len(offsets) != 1:  # of none, or of no entry
        return None

    def forward(self: Any, x: Tensor, *rest: object, **options: object) -> Tensor:
        weight, eps = self.weight, getattr(self, name)
        if rest or options or x.dtype != weight.dtype or not (x.is_cuda or on_cpu):
            return kind.forward(self, x, *rest, **options)
        if offsets[0]:  # as Gemma's
            return F.rms_norm(x.float(), weight.shape, 1 + weight.float(), eps).to(x.dtype)
        return F.rms_norm(x, weight.shape, weight, eps)

    return _replacing(kind, forward, keeps_least=not offsets[0])


def _fused_mlp(mlp: nn.Module, on_cpu: bool) -> type[nn.Module] | None:
    """A class that computes ``down(silu(gate(x)) * up(x))`` as ``mlp`` does, which keeps less."""
    kind = type(mlp)
    x, gate, up, down = _numbers(4, 6, 6)
    parts = {n: partial(F.linear, weight=w) for n, w in zip(_GATED, (gate, up, down), strict=False)}
    probe = nn.Module.__new__(kind)
    vars(probe).update(vars(mlp), _modules=mlp._modules | parts)
    try:
        expected = kind.forward(probe, x)
    except (AttributeError, RuntimeError, TypeError):
        return None  # one that takes more than a tensor
    if not _agree((F.silu(x @ gate.T) * (x @ up.T)) @ down.T, expected):
        return None

    def forward(self: Any, x: Tensor) -> Tensor:
        traced = torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()
        if traced or not (runs_kernels(x.device) or (on_cpu and not x.is_cuda)):
            output: Tensor = kind.forward(self, x)
            return output
        gate, x, down = self.gate_proj(x), self.up_proj(x), self.down_proj
        if torch.is_grad_enabled() and type(down) is LoraLinear and "forward" not in vars(down):
            return down(x, gate)
        return down(gated(x, gate))

    return _replacing(kind, forward, keeps_least=True)


def _gates_by_silu(experts: Any) -> bool:
    x = _numbers(3, 8)
    gate, up = x.chunk(2, -1)
    try:
        return _agree(F.silu(gate) * up, experts._apply_gate(x))
    except (AttributeError, RuntimeError, TypeError):
        return False  # one that takes more than a tensor


def _replacing(
    kind: type[nn.Module], forward: Callable[..., Any], *, keeps_least: bool
) -> type[nn.Module]:
    """``kind`` with another forward pass.

    One that ``keeps_least`` keeps its own inputs for the backward pass: of a norm in their type, of
    an MLP outputs of gate and up, see :func:`dschat_lora.perf.memory.activation_bytes`.
    """
    own = {"forward": forward, "__module__": kind.__module__, "keeps_least": keeps_least}
    return type(kind.__name__, (kind,), own)


class _Rotate:
    """transformers' ``apply_rotary_pos_emb`` by fewer kernels, where they compute what it does."""

    def __init__(self, plain: Callable[..., tuple[Tensor, Tensor]], on_cpu: bool) -> None:
        self.plain, self.on_cpu = plain, on_cpu

    def __call__(
        self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *rest: object, **options: object
    ) -> tuple[Tensor, Tensor]:
        alike = q.dtype == k.dtype == cos.dtype == sin.dtype
        whole = q.shape[-1] == k.shape[-1] == cos.shape[-1] == sin.shape[-1]
        dim = rest[0] if rest else options.get("unsqueeze_dim", 1)
        known = len(rest) <= 1 and not options.keys() - {"unsqueeze_dim"} and dim in (1, 2)
        fits = alike and whole and known and cos.dim() == 3 and (q.is_cuda or self.on_cpu)
        if not fits or torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
            return self.plain(q, k, cos, sin, *rest, **options)
        if dim == 2:
            q, k = q.transpose(1, 2), k.transpose(1, 2)
        if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad):
            q, k = _Rotation.apply(q, k, cos, sin)  # type: ignore[no-untyped-call]
        else:
            q, k = _turn(q, k, cos, sin, False)
        return (q, k) if dim == 1 else (q.transpose(1, 2), k.transpose(1, 2))


class _Rotation(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Context, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        return _turn(q, k, cos, sin, False)

    @staticmethod
    def backward(ctx: Context, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (q, k), (cos, sin) = grads, ctx.saved_tensors
        return *_turn(q, k, cos, sin, True), None, None


def _turn(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, transposed: bool
) -> tuple[Tensor, Tensor]:
    by_plain = q.is_cuda and not runs_kernels(q.device)
    outputs: tuple[Tensor, Tensor]
    outputs = (rotate_plain if by_plain else rotate)(q, k, cos, sin, transposed)
    return outputs


def _is_rotation(function: Callable[..., Any]) -> bool:
    q, k = _numbers(2, 3, 5, 8), _numbers(2, 1, 5, 8)
    cos, sin = _numbers(2, 2, 5, 8)
    try:
        expected = function(q, k, cos, sin)
        pairs = zip(rotate_plain(q, k, cos, sin, False), expected, strict=True)
        return all(_agree(*pair) for pair in pairs)
    except (AttributeError, RuntimeError, TypeError, ValueError):
        return False  # one with other arguments


def _numbers(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def _agree(value: Tensor, expected: Tensor) -> bool:
    alike = value.shape == expected.shape and value.dtype == expected.dtype
    return alike and bool((value - expected).norm() <= _AGREES * expected.norm())
