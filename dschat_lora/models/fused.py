"""RMSNorm and rotary embeddings in few kernels, where transformers has many operations."""

import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

_AGREES = 1e-5  # relative error in fp32 that is rounding
_ROTARY = "apply_rotary_pos_emb"  # in the module of a model's attention
_PLAIN = "plain_layers"  # attribute of a model and its copies


def keep_plain(model: PreTrainedModel) -> None:
    """Have a model's layers computed as transformers does, in decoding too."""
    setattr(model, _PLAIN, True)


def keeps_plain(model: nn.Module) -> bool:
    """Whether :func:`keep_plain` was called."""
    return bool(getattr(model, _PLAIN, False))


def fuse_kernels(model: PreTrainedModel, *, on_cpu: bool = False) -> list[str]:
    """Compute norms and rotations of a model by fewer kernels on a GPU, in training and decoding.

    A class of norms, and a function that rotates, is replaced if it gives the same on random
    numbers; others, and what is on a CPU, compute as before. What is 16 bits wide is rounded once
    where it was rounded two or three times. The function that rotates is that of all models of the
    type in this process.

    Args:
        model: from transformers; changed in place, weights and their names are not.
        on_cpu: compute so on a CPU too, where it is hardly faster.

    Returns:
        the names of what was replaced.
    """
    classes: dict[type[nn.Module], type[nn.Module] | None] = {}
    homes = {sys.modules.get(type(each).__module__, sys) for each in model.modules()}
    for module in model.modules():
        kind = type(module)
        if "RMSNorm" not in kind.__name__ or module._parameters.get("weight") is None:
            continue  # some of Gemma's have no weight
        if kind not in classes:
            classes[kind] = _fused_norm(module, on_cpu)
        if (fused := classes[kind]) is not None:
            module.__class__ = fused
    found = [kind.__name__ for kind, fused in classes.items() if fused is not None]
    for home in homes:
        rotate = vars(home).get(_ROTARY)
        if rotate is not None and isinstance(rotate, _Rotate):
            rotate.on_cpu |= on_cpu
        elif rotate is not None and _is_rotation(rotate):
            vars(home)[_ROTARY] = _Rotate(rotate, on_cpu)
        else:
            continue
        found.append(f"{home.__name__}.{_ROTARY}")
    return found


def _fused_norm(norm: Any, on_cpu: bool) -> type[nn.Module] | None:
    """A class that computes as ``norm`` does by torch's own kernel; None where none would."""
    kind, weight = type(norm), norm.weight
    name = "variance_epsilon" if hasattr(norm, "variance_epsilon") else "eps"
    eps = getattr(norm, name, None)
    if weight.dim() != 1 or not isinstance(eps, float):
        return None
    x, scale = _numbers(2, len(weight))
    probe: Any = nn.Module.__new__(kind)
    vars(probe).update(vars(norm), _parameters={"weight": nn.Parameter(scale, requires_grad=False)})
    try:
        expected = kind.forward(probe, x)
    except (AttributeError, RuntimeError, TypeError):
        return None  # one that takes more than a tensor
    offsets = [n for n in (0, 1) if _agree(F.rms_norm(x, x.shape, n + scale, eps), expected)]
    if len(offsets) != 1:  # of none, or of no entry
        return None

    def forward(self: Any, x: Tensor, *rest: Any, **options: Any) -> Tensor:
        weight, eps = self.weight, getattr(self, name)
        if rest or options or x.dtype != weight.dtype or not (x.is_cuda or on_cpu):
            return kind.forward(self, x, *rest, **options)
        if offsets[0]:  # as Gemma's
            return F.rms_norm(x.float(), weight.shape, 1 + weight.float(), eps).to(x.dtype)
        return F.rms_norm(x, weight.shape, weight, eps)

    return type(kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__})


class _Rotate:
    """transformers' ``apply_rotary_pos_emb`` by fewer kernels, where they compute what it does."""

    def __init__(self, plain: Callable[..., tuple[Tensor, Tensor]], on_cpu: bool) -> None:
        self.plain, self.on_cpu = plain, on_cpu

    def __call__(
        self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *rest: Any, **options: Any
    ) -> tuple[Tensor, Tensor]:
        alike = q.dtype == k.dtype == cos.dtype == sin.dtype
        whole = q.shape[-1] == k.shape[-1] == cos.shape[-1] == sin.shape[-1]
        dim = rest[0] if rest else options.get("unsqueeze_dim", 1)
        known = len(rest) <= 1 and not options.keys() - {"unsqueeze_dim"} and isinstance(dim, int)
        fits = alike and whole and known and cos.dim() == 3 and (q.is_cuda or self.on_cpu)
        if not fits or torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
            return self.plain(q, k, cos, sin, *rest, **options)
        cos, sin = cos.unsqueeze(dim), sin.unsqueeze(dim)
        if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad):
            rotate: Any = _Rotation.apply
            return rotate(q, cos, sin), rotate(k, cos, sin)
        both = _adjacent(q, k) if dim == 1 else None
        if both is None:
            return _rotated(q, cos, sin), _rotated(k, cos, sin)
        queries, keys = torch.split(_rotated(both, cos, sin), [q.shape[1], k.shape[1]], dim=1)
        return queries, keys


class _Rotation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotated(x, cos, sin)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return _rotated(grads[0], *ctx.saved_tensors, transposed=True), None, None


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, *, transposed: bool = False) -> Tensor:
    """``x cos + (-x2, x1) sin``, of the halves x1 and x2 of the last dimension; or its transpose.

    That is what a gradient takes: the other way round, each half by the sines of the other.
    """
    (x1, x2), (first, second) = x.chunk(2, -1), sin.chunk(2, -1)
    output = x * cos
    y1, y2 = output.chunk(2, -1)
    to_first, to_second = (second, first) if transposed else (first, second)
    y1.addcmul_(x2, to_first, value=1 if transposed else -1)
    y2.addcmul_(x1, to_second, value=-1 if transposed else 1)
    return output


def _adjacent(q: Tensor, k: Tensor) -> Tensor | None:
    """(B, heads + key heads, T, D) view of both where they are parts of one product, else None."""
    rows, heads, tokens, size = q.shape
    row, _, token, _ = q.stride()
    for x in (q, k):  # as they lie, but for dimensions of one entry
        places = zip(x.shape, x.stride(), (row, size, token, 1), strict=True)
        if any(count > 1 and step != expected for count, step, expected in places):
            return None
    beside = k.storage_offset() - q.storage_offset() == heads * size
    if not beside or q.untyped_storage().data_ptr() != k.untyped_storage().data_ptr():
        return None
    return q.as_strided((rows, heads + k.shape[1], tokens, size), (row, size, token, 1))


def _is_rotation(rotate: Callable[..., Any]) -> bool:
    q, k = _numbers(2, 3, 5, 8), _numbers(2, 1, 5, 8)
    cos, sin = _numbers(2, 2, 5, 8)
    try:
        expected = rotate(q, k, cos, sin)
        pairs = zip((q, k), expected, strict=True)
        return all(_agree(_rotated(x, cos[:, None], sin[:, None]), y) for x, y in pairs)
    except (AttributeError, RuntimeError, TypeError, ValueError):
        return False  # one with other arguments


def _numbers(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def _agree(found: Tensor, expected: Tensor) -> bool:
    alike = found.shape == expected.shape and found.dtype == expected.dtype
    return alike and bool((found - expected).norm() <= _AGREES * expected.norm())
