"""Next-token cross-entropy for supervised fine-tuning, computed in chunks of logits."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from dschat_lora.algos.vocabulary import VocabularyPart, add_at_, log_softmax, sum_and_size

IGNORE_INDEX = -100
# Largest number of logits of a chunk: 128 MiB in fp32, which keeps a GPU busy; on a CPU 16,
# for its caches.
MAX_CHUNK_LOGITS = 2**25
MAX_CHUNK_LOGITS_CPU = 2**22


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    *,
    label_smoothing: float = 0.0,
    max_chunk_logits: int | None = None,
    part: VocabularyPart | None = None,
) -> Tensor:
    """Summed cross-entropy of ``softmax(hidden W^T + b)`` against ``targets``.

    Logits are formed for a chunk of positions at a time and turned into the gradient at once,
    so that no tensor holds more than ``max_chunk_logits`` of them. With
    ``p`` the softmax and ``q = (1 - label_smoothing) onehot(target) + label_smoothing / V``
    (section 7 of arXiv:1512.00567), the gradient for one position is ``W^T (p - q)``.

    Args:
        hidden: (N, H), any float dtype; logits are reduced in fp32.
        weight: (V, H) output embedding. Its gradient is computed only if it requires one.
        bias: (V,) or None.
        targets: (N,) int64 in [0, V).
        label_smoothing: share of each target spread evenly over the vocabulary, in [0, 1].
        max_chunk_logits: bound on the logits of a chunk, by default the device's; a chunk has at
            least one position.
        part: of the vocabulary that ``weight`` and ``bias`` hold; None: all of it. With a part,
            the gradient of ``hidden`` is to be summed over the processes.

    Returns:
        Scalar in nats, fp32 (of fp64 input fp64); a sum: only the training loop knows how many
        tokens the whole optimizer step holds.
    """
    rows = chunk_rows(weight, max_chunk_logits, part)
    loss: Tensor = _LinearCrossEntropy.apply(  # type: ignore[no-untyped-call]
        hidden, weight, bias, targets, label_smoothing, rows, part
    )
    return loss


def chunk_rows(
    weight: Tensor, max_chunk_logits: int | None = None, part: VocabularyPart | None = None
) -> int:
    """Positions of a chunk of logits under the (V, H) head ``weight``."""
    by_device = MAX_CHUNK_LOGITS_CPU if weight.device.type == "cpu" else MAX_CHUNK_LOGITS
    columns = weight.shape[0] if part is None else part.most
    return max(1, (max_chunk_logits or by_device) // columns)


def head_logits(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """(N, V) ``hidden W^T + b`` in fp32, of fp64 in fp64, with gradient.

    A GPU keeps the fp32 sums of 16-bit products: rounded to bf16, a token's log-probability would
    be off by some 0.02 nats.
    """
    if _keeps_sums(hidden):
        logits: Tensor = _Fp32Product.apply(hidden, weight)  # type: ignore[no-untyped-call]
        return logits if bias is None else logits.add_(bias)
    logits = F.linear(hidden, weight, bias)
    return logits.to(torch.promote_types(hidden.dtype, torch.float32))


def _keeps_sums(x: Tensor) -> bool:
    """Whether a 16-bit ``x`` is on a device whose products can be fp32."""
    narrow = x.is_cuda and x.dtype in (torch.bfloat16, torch.float16)
    return narrow and torch.version.hip is None and hasattr(torch.ops.aten.mm, "dtype")


class _Fp32Product(torch.autograd.Function):
    """``x W^T`` of 16-bit matrices in fp32, of which torch has no derivative."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return torch.mm(x, weight.t(), out_dtype=torch.float32)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        narrow = grad.to(x.dtype)
        wants_x, wants_weight = ctx.needs_input_grad
        return narrow @ weight if wants_x else None, narrow.T @ x if wants_weight else None


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        smoothing: float,
        rows: int,
        part: VocabularyPart | None,
    ) -> Tensor:
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.empty_like(hidden) if wants_hidden else None
        wide = torch.promote_types(hidden.dtype, torch.float32)
        grad_weight = torch.zeros_like(weight, dtype=wide) if wants_weight else None
        grad_bias = torch.zeros_like(bias, dtype=wide) if wants_bias else None  # type: ignore[arg-type]
        loss = hidden.new_zeros((), dtype=wide)
        for start in range(0, len(targets), rows):
            chunk = slice(start, start + rows)
            logits = head_logits(hidden[chunk], weight, bias)
            logprobs, picked = log_softmax(logits, targets[chunk], part)
            loss -= (1 - smoothing) * picked.sum()
            if smoothing:
                over_vocabulary, size = sum_and_size(logprobs, part)
                loss -= smoothing * over_vocabulary / size
            if not any((wants_hidden, wants_weight, wants_bias)):
                continue
            error = add_at_(logprobs.exp_(), targets[chunk], smoothing - 1.0, part)
            if smoothing:
                error -= smoothing / size
            if grad_bias is not None:
                grad_bias += error.sum(0)
            narrow = error.to(hidden.dtype)
            if grad_hidden is not None:
                grad_hidden[chunk] = narrow @ weight
            if grad_weight is not None:
                grad_weight += narrow.T @ hidden[chunk]
        ctx.save_for_backward(grad_hidden, grad_weight, grad_bias)
        ctx.dtypes = (weight.dtype, None if bias is None else bias.dtype)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden, grad_weight, grad_bias = ctx.saved_tensors
        weight_dtype, bias_dtype = ctx.dtypes
        return (
            None if grad_hidden is None else grad_hidden * grad_loss,
            # In place: of a large vocabulary a second one in fp32 would be gigabytes.
            None if grad_weight is None else grad_weight.mul_(grad_loss).to(weight_dtype),
            None if grad_bias is None else (grad_bias * grad_loss).to(bias_dtype),
            *(None,) * 4,
        )
