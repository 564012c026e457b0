"""Cheap checks on the user's own model before anything is trained on it."""

from dataclasses import dataclass

import torch
from torch import Tensor

from dschat_lora.models.causal_lm import CausalLMLoss

# Relative error allowed by rounding alone; a leak between samples is 0.05 and more.
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.03, torch.float16: 0.01}
_LENGTHS = (7, 5, 9)


@dataclass(frozen=True)
class ProbeReport:
    """Relative errors found, and what follows from them."""

    packing_error: float  # hidden states of packed samples against each sample alone
    head_error: float  # loss from hidden states against loss from the model's own logits
    tolerance: float

    @property
    def packing_is_exact(self) -> bool:
        """Whether samples of a packed row do not see each other."""
        return self.packing_error <= self.tolerance

    @property
    def head_is_linear(self) -> bool:
        """Whether the model's logits are its output embedding applied to hidden states."""
        return self.head_error <= self.tolerance


@torch.no_grad()
def probe(model: CausalLMLoss, *, vocab_size: int, device: torch.device) -> ProbeReport:
    """Run three short random samples packed into a row and one by one; call on every rank.

    Args:
        model: in evaluation mode.
        vocab_size: ids below it are drawn.
        device: where the model computes.
    """
    generator = torch.Generator().manual_seed(0)
    samples = [torch.randint(0, vocab_size, (n,), generator=generator) for n in _LENGTHS]
    alone = [_alone(model, sample.to(device)) for sample in samples]
    tolerance = _TOLERANCE[model.model.dtype]
    row = {name: value.to(device) for name, value in _packed(samples).items()}
    try:
        packed = model.hidden_states(**row)[0].float()
        packing_error = _relative(packed, torch.cat(alone))
    except (RuntimeError, ValueError, TypeError, IndexError):
        packing_error = float("inf")  # an architecture that takes no mask of ours
    return ProbeReport(packing_error, _head_error(model, samples[0].to(device)), tolerance)


def _head_error(model: CausalLMLoss, sample: Tensor) -> float:
    """Relative error of the loss from hidden states, on one sample under the model's mask."""
    batch = {name: value.to(sample.device) for name, value in _packed([sample]).items()}
    before = model.own_mask, model.full_logits
    losses = []
    for full_logits in (False, True):
        model.own_mask, model.full_logits = True, full_logits
        losses.append(model(**batch, labels=batch["input_ids"]))
    model.own_mask, model.full_logits = before
    return _relative(*losses)


def _packed(samples: list[Tensor]) -> dict[str, Tensor]:
    return {
        "input_ids": torch.cat(samples)[None],
        "position_ids": torch.cat([torch.arange(len(s)) for s in samples])[None],
        "segment_ids": torch.cat(
            [torch.full((len(s),), i) for i, s in enumerate(samples, start=1)]
        )[None],
    }


def _alone(model: CausalLMLoss, sample: Tensor) -> Tensor:
    """(n, H) hidden states by the model's own masks and positions."""
    hidden: Tensor = model.model.base_model(input_ids=sample[None], use_cache=False)[0]
    return hidden[0].float()


def _relative(value: Tensor, reference: Tensor) -> float:
    error = (value - reference).norm() / reference.norm().clamp(min=1e-12)
    return float("inf") if not torch.isfinite(error) else float(error)
