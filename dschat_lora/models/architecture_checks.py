"""Cheap checks on the user's own model before anything is trained on it."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from dschat_lora.lora.parallel import whole_sequences
from dschat_lora.models.backbone import Backbone

# Relative errors allowed. The same kernels run on rows of one shape, so that a sample's states
# may not move with its neighbours; packed and alone the kernels differ, and round differently.
_LEAK = {torch.float32: 1e-5, torch.bfloat16: 1e-3, torch.float16: 1e-3}
_ROUNDING = {torch.float32: 1e-4, torch.bfloat16: 0.1, torch.float16: 0.05}
# The same of tokens that follow, whose number per expert may choose another kernel.
_LATER = {torch.float32: 1e-4, torch.bfloat16: 0.01, torch.float16: 0.01}
# What no rounding explains, not even that which sends a token to another expert.
_WRONG = {torch.float32: 1e-3, torch.bfloat16: 0.3, torch.float16: 0.3}
_LENGTHS = (7, 5, 9)
_FAILURES = (RuntimeError, ValueError, TypeError, IndexError, AttributeError, KeyError)


@dataclass(frozen=True)
class ArchitectureReport:
    """Relative errors found, and what follows from them."""

    leak_error: float  # hidden states of a packed sample when the ones before it change
    packing_error: float  # hidden states of packed samples against each sample alone
    branch_leak_error: float  # hidden states of a tree's second branch when the first changes
    tree_error: float  # hidden states of the two branches of a tree against each sequence alone
    causal_error: float  # hidden states of a sample's first tokens when later ones change
    row_error: float  # hidden states of padded samples, a row for each, against each sample alone
    packing_is_exact: bool  # samples of a packed row do not see each other
    tree_is_exact: bool  # nor do branches, which see what they begin with


@torch.no_grad()
def check_architecture(
    backbone: Backbone, *, vocab_size: int, device: torch.device
) -> ArchitectureReport:
    """Run three short random samples packed, as a tree, and alone; call on every rank.

    The model is in evaluation mode; ids are drawn below ``vocab_size``.

    Raises:
        ValueError: if the model cannot be run, is not causal, or is another model in padded rows.
    """
    kind = type(backbone.model).__name__
    with whole_sequences(backbone.model):
        try:
            report = _probe(backbone, vocab_size, device)
        except torch.OutOfMemoryError:
            raise
        except _FAILURES as error:
            first = str(error).partition("\n")[0]
            raise ValueError(
                f"{kind} cannot be trained: three short samples of random tokens failed "
                f"({type(error).__name__}: {first})"
            ) from error
    if report.causal_error > _LATER[backbone.model.dtype]:
        raise ValueError(
            f"{kind} is not a causal language model: on random tokens, hidden states depend on "
            f"later tokens (relative error {report.causal_error:.1g})"
        )
    if report.row_error > _WRONG[backbone.model.dtype]:
        raise ValueError(
            f"{kind} cannot be trained correctly: hidden states of random samples in padded rows "
            f"differ from those of each sample alone (relative error {report.row_error:.1g})"
        )
    return report


def _probe(backbone: Backbone, vocab_size: int, device: torch.device) -> ArchitectureReport:
    samples, others = (_draw(vocab_size, device, seed=seed) for seed in (0, 1))
    *_, other = others
    others[-1] = samples[-1]
    start, first, second = samples
    alone = torch.cat([_alone(backbone, sample) for sample in samples])
    sequences = torch.cat([_alone(backbone, torch.cat([start, x])) for x in (first, second)])
    known = len(second) // 2
    before = alone[-len(second) :][:known]
    after = _alone(backbone, torch.cat([second[:known], other[known:]]))[:known]
    try:
        packed, changed = (backbone(**_packed(row))[0].float() for row in (samples, others))
        tree, changed_tree = (
            backbone(**_tree(start, x, second))[0].float() for x in (first, others[1])
        )
    except torch.OutOfMemoryError:
        raise
    except _FAILURES:
        # an architecture that takes no mask of ours
        packed = changed = tree = changed_tree = torch.full_like(alone, float("inf"))
    last = slice(-len(second), None)
    along = torch.cat([tree[: -len(second)], tree[: len(start)], tree[last]])
    leak_error, branch_leak_error = (
        _relative(y[last], x[last]) for x, y in ((packed, changed), (tree, changed_tree))
    )
    packing_error, tree_error = _relative(packed, alone), _relative(along, sequences)
    leak, rounding = _LEAK[backbone.model.dtype], _ROUNDING[backbone.model.dtype]
    packing_is_exact = leak_error <= leak and packing_error <= rounding
    rows = _in_rows(backbone, samples, own_mask=backbone.own_mask or not packing_is_exact)
    return ArchitectureReport(
        leak_error,
        packing_error,
        branch_leak_error,
        tree_error,
        causal_error=_relative(after, before),
        row_error=_relative(rows, alone),
        packing_is_exact=packing_is_exact,
        tree_is_exact=branch_leak_error <= leak and tree_error <= rounding,
    )


@torch.no_grad()
def head_error(model: PreTrainedModel, *, vocab_size: int, device: torch.device) -> float:
    """Relative difference of the output embedding's logits from the model's own, on a sample.

    0 where logits are the output embedding applied to hidden states, infinite where they cannot be;
    call on every rank.
    """
    head = model.get_output_embeddings()
    sample = _draw(vocab_size, device, seed=0)[0][None]
    with whole_sequences(model):
        hidden = model.base_model(input_ids=sample, use_cache=False)[0]
        logits = model(input_ids=sample, use_cache=False).logits
        if head is None or hidden.shape[-1] != getattr(head, "in_features", hidden.shape[-1]):
            return float("inf")
        own = head(hidden)
    if own.shape != logits.shape:  # some models leave out padded rows of the head
        return float("inf")
    return _relative(own.float(), logits.float())


def head_is_linear(model: PreTrainedModel, *, vocab_size: int, device: torch.device) -> bool:
    """Whether :func:`head_error` is no more than rounding; call on every rank.

    Both logits come from the same kernels and rows of one shape: a soft cap far above the sample's
    logits must show.
    """
    error = head_error(model, vocab_size=vocab_size, device=device)
    return error <= _LEAK[model.dtype]


def _draw(vocab_size: int, device: torch.device, *, seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randint(0, vocab_size, (length,), generator=generator).to(device)
        for length in _LENGTHS
    ]


def _packed(samples: list[Tensor]) -> dict[str, Any]:
    numbers = [torch.full_like(sample, i) for i, sample in enumerate(samples, start=1)]
    positions = [torch.arange(len(sample), device=sample.device) for sample in samples]
    return {
        "input_ids": torch.cat(samples)[None],
        "position_ids": torch.cat(positions)[None],
        "segment_ids": torch.cat(numbers)[None],
    }


def _tree(start: Tensor, *branches: Tensor) -> dict[str, Any]:
    row = _packed([start, *branches])
    numbers = row["segment_ids"]
    return {
        "input_ids": row["input_ids"],
        "position_ids": row["position_ids"] + len(start) * (numbers > 1),
        "segment_ids": torch.ones_like(numbers),
        "branch_ids": numbers - 1,
    }


def _in_rows(backbone: Backbone, samples: list[Tensor], *, own_mask: bool) -> Tensor:
    """Hidden states of the samples, padded to rows of their own, as they will be trained."""
    packed = [_packed([sample]) for sample in samples]
    rows: dict[str, Any] = {
        name: nn.utils.rnn.pad_sequence([each[name][0] for each in packed], batch_first=True)
        for name in packed[0]
    }
    before, backbone.own_mask = backbone.own_mask, own_mask
    try:
        hidden = backbone(**rows)
    finally:
        backbone.own_mask = before
    pairs = zip(hidden, samples, strict=True)
    return torch.cat([row[: len(sample)] for row, sample in pairs]).float()


def _alone(backbone: Backbone, sample: Tensor) -> Tensor:
    """(n, H) hidden states by the model's own masks and positions."""
    hidden: Tensor = backbone.model.base_model(input_ids=sample[None], use_cache=False)[0]
    return hidden[0].float()


def _relative(value: Tensor, reference: Tensor) -> float:
    """NaN where the reference overflows: its loss is refused by name, no difference tells more."""
    if not torch.isfinite(reference).all():
        return float("nan")
    error = (value - reference).norm() / reference.norm().clamp(min=1e-12)
    return float("inf") if not torch.isfinite(error) else float(error)
