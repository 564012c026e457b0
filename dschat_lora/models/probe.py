"""Cheap checks on the user's own model before anything is trained on it."""

from dataclasses import dataclass

import torch
from torch import Tensor

from dschat_lora.models.causal_lm import CausalLMLoss

# Relative errors allowed. The same kernels run on rows of one shape, so that a sample's states
# may not move with its neighbours; packed and alone the kernels differ, and round differently.
_LEAK = {torch.float32: 1e-5, torch.bfloat16: 1e-3, torch.float16: 1e-3}
_ROUNDING = {torch.float32: 1e-4, torch.bfloat16: 0.1, torch.float16: 0.05}
_LENGTHS = (7, 5, 9)


@dataclass(frozen=True)
class ProbeReport:
    """Relative errors found, and what follows from them."""

    leak_error: float  # hidden states of a packed sample when the ones before it change
    packing_error: float  # hidden states of packed samples against each sample alone
    head_error: float  # loss from hidden states against loss from the model's own logits
    packing_is_exact: bool  # samples of a packed row do not see each other
    head_is_linear: bool  # logits are the output embedding applied to hidden states


@torch.no_grad()
def probe(model: CausalLMLoss, *, vocab_size: int, device: torch.device) -> ProbeReport:
    """Run three short random samples packed into a row and one by one; call on every rank.

    Args:
        model: in evaluation mode.
        vocab_size: ids below it are drawn.
        device: where the model computes.
    """
    generator = torch.Generator().manual_seed(0)

    def draw(length: int) -> Tensor:
        return torch.randint(0, vocab_size, (length,), generator=generator).to(device)

    samples = [draw(length) for length in _LENGTHS]
    others = [*(draw(length) for length in _LENGTHS[:-1]), samples[-1]]
    alone = torch.cat([_alone(model, sample) for sample in samples])
    last = slice(-_LENGTHS[-1], None)
    try:
        packed, changed = (
            model.hidden_states(**_packed(row))[0].float() for row in (samples, others)
        )
        leak_error = _relative(changed[last], packed[last])
        packing_error = _relative(packed, alone)
    except (RuntimeError, ValueError, TypeError, IndexError):
        leak_error = packing_error = float("inf")  # an architecture that takes no mask of ours
    head_error = _head_error(model, samples[0])
    dtype = model.model.dtype
    return ProbeReport(
        leak_error,
        packing_error,
        head_error,
        packing_is_exact=leak_error <= _LEAK[dtype] and packing_error <= _ROUNDING[dtype],
        head_is_linear=head_error <= _ROUNDING[dtype],
    )


def _head_error(model: CausalLMLoss, sample: Tensor) -> float:
    """Relative error of the loss from hidden states, on one sample under the model's mask."""
    batch = _packed([sample])
    before = model.own_mask, model.full_logits
    losses = []
    for full_logits in (False, True):
        model.own_mask, model.full_logits = True, full_logits
        losses.append(model(**batch, labels=batch["input_ids"]))
    model.own_mask, model.full_logits = before
    return _relative(*losses)


def _packed(samples: list[Tensor]) -> dict[str, Tensor]:
    numbers = [torch.full_like(sample, i) for i, sample in enumerate(samples, start=1)]
    positions = [torch.arange(len(sample), device=sample.device) for sample in samples]
    return {
        "input_ids": torch.cat(samples)[None],
        "position_ids": torch.cat(positions)[None],
        "segment_ids": torch.cat(numbers)[None],
    }


def _alone(model: CausalLMLoss, sample: Tensor) -> Tensor:
    """(n, H) hidden states by the model's own masks and positions."""
    hidden: Tensor = model.model.base_model(input_ids=sample[None], use_cache=False)[0]
    return hidden[0].float()


def _relative(value: Tensor, reference: Tensor) -> float:
    error = (value - reference).norm() / reference.norm().clamp(min=1e-12)
    return float("inf") if not torch.isfinite(error) else float(error)
