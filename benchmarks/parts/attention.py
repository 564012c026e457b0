"""Whether attention keeps the sequences of a row apart in 16 bits, each kernel that is there."""

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.common.report import PartReport, print_table
from benchmarks.common.shapes import PAD_ID, Shape, mixed_rows, random_base
from dschat_lora.data.batch import PairCollator, SampleCollator
from dschat_lora.data.samples import PairSample, SequenceSample
from dschat_lora.engine.build import DTYPES
from dschat_lora.engine.distributed import device
from dschat_lora.models.backbone import Backbone
from dschat_lora.models.causal_lm import CausalLMLogprobs, CausalLMLoss

FULL = Shape(256, 2, 4, 512, 512, 1024, 0, 4, 512, 256)
TINY = Shape(64, 2, 4, 128, 128, 64, 0, 2, 48, 24)
WIDER = 5.0  # weights: so much that a wrong mask is seen in the loss
# Relative errors: a kernel may have twice those of the dense mask, and this on top of it.
EPSILON = 1e-3
DENSE, BY_SEQUENCE, FLEX = "dense mask", "by sequence", "flex"
Found = tuple[Tensor, Tensor]  # loss, and the gradients of all weights in one vector


@dataclass(frozen=True)
class RowKind:
    """Rows of one kind."""

    batch: Any
    sequences: Sequence[tuple[Any, int]]  # tokens of each by itself, and the first that counts


def run(report: PartReport, *, tiny: bool) -> None:
    """Compare loss and gradients with fp32's of each sequence by itself; store, print, check."""
    rows: list[dict[str, Any]] = []
    for architecture in ("opt", "llama"):
        shape = replace(TINY if tiny else FULL, architecture=architecture)
        for name in ("bf16", "fp16"):
            for what, kind in _kinds(shape).items():
                head = {"model": architecture, "type": name, "rows": what}
                rows += [head | row for row in _compare(shape, DTYPES[name], kind)]
                report.store({"errors": rows})
    print_table(list(rows[0]), [list(row.values()) for row in rows])
    for row in (row for row in rows if row["attention"] != DENSE):
        name = f"{row['model']}, {row['type']}, {row['rows']}, {row['attention']}"
        report.check(f"{name}: no less exact than a dense mask", is_as_exact(row, rows))


def is_as_exact(row: dict[str, Any], rows: Sequence[dict[str, Any]]) -> bool:
    """Whether its errors are at most twice those of the dense mask on the same."""
    same = [each for each in rows if all(each[k] == row[k] for k in ("model", "type", "rows"))]
    (dense,) = (each for each in same if each["attention"] == DENSE)
    return all(row[of] <= 2 * dense[of] + EPSILON for of in ("loss", "gradient"))


def _compare(shape: Shape, dtype: torch.dtype, kind: RowKind) -> Iterator[dict[str, Any]]:
    """Relative errors of each way to attend."""
    model = random_base(shape, dtype=dtype, device=device())
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(WIDER)
    exact = _found(copy.deepcopy(model).float(), lambda plain: _by_sequence(plain, kind))
    for name in _attentions(model):
        if name == FLEX:
            model.set_attn_implementation("flex_attention")
        loss, gradient = _found(model, lambda each, name=name: _in_rows(each, kind, name))  # type: ignore[misc]
        yield {
            "attention": name,
            "loss": _error(loss, exact[0]),
            "gradient": _error(gradient, exact[1]),
        }


def _attentions(model: Any) -> list[str]:
    """What this device has; without a GPU torch has no gradient for flex attention."""
    spans = [BY_SEQUENCE] if Backbone(model).skips_padding(device()) else []
    return [DENSE, *spans, *([FLEX] if device().type == "cuda" else [])]


def _found(model: Any, loss_of: Callable[[Any], Tensor]) -> Found:
    model.zero_grad(set_to_none=True)
    loss = loss_of(model)
    loss.backward()  # type: ignore[no-untyped-call]
    gradients = [p.grad.float().flatten() for p in model.parameters() if p.grad is not None]
    return loss.detach().float(), torch.cat(gradients)


def _in_rows(model: Any, kind: RowKind, attention: str) -> Tensor:
    """Mean loss per predicted token, all sequences in their rows."""
    batch = kind.batch.to(device())
    is_tree = hasattr(batch, "branch_ids")
    network: Any = (CausalLMLogprobs if is_tree else CausalLMLoss)(model)
    network.backbone.by_spans = attention == BY_SEQUENCE
    names = ["input_ids", "position_ids", "segment_ids", "logit_positions", "target_ids", "spans"]
    names += ["branch_ids"] if is_tree else []
    found: Tensor = network(**{name: getattr(batch, name) for name in names})
    return (-found.sum() if is_tree else found) / len(batch.target_ids)


def _by_sequence(model: Any, kind: RowKind) -> Tensor:
    """The same by transformers alone, a sequence a call."""
    losses = []
    for tokens, first in kind.sequences:
        ids = torch.from_numpy(tokens).long().to(device())
        logits = model(input_ids=ids[None], use_cache=False).logits[0]
        picked = logits[:-1].log_softmax(-1).gather(-1, ids[1:, None])[:, 0]
        losses.append(-picked[first - 1 :])
    return torch.cat(losses).mean()


def _kinds(shape: Shape) -> dict[str, RowKind]:
    """Packed samples, and pairs of answers as trees, some rows with padding."""
    rows = mixed_rows(shape)
    samples = [sample for row in rows for sample in row]
    pairs = [_pair(sample, shape) for sample in samples]
    # Half of a sample is its prompt.
    alone = [(s.input_ids, max(1, len(s.input_ids) // 2)) for s in samples]
    both = [(ids, pair.prompt_length) for pair in pairs for ids in (pair.chosen, pair.rejected)]
    half = len(pairs) // 2
    trees = PairCollator(PAD_ID, "shared")([pairs[:half], pairs[half:]])
    return {
        "samples": RowKind(SampleCollator(PAD_ID)(rows), alone),
        "trees": RowKind(trees, both),
    }


def _pair(sample: SequenceSample, shape: Shape) -> PairSample:
    """A sample's second half against other tokens, of which there are fewer."""
    ids, start = sample.input_ids, len(sample.input_ids) // 2
    other = (ids[start + 1 :] + 1) % shape.vocab_size
    return PairSample(
        np.concatenate([ids, other]).astype(np.int32),
        prompt_length=start,
        shared_length=start,
        chosen_length=len(ids) - start,
        margin=0.0,
        reference=(np.nan, np.nan),
    )


def _error(value: Tensor, exact: Tensor) -> float:
    return float((value - exact).norm() / exact.norm())
