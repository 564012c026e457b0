"""What the LoRA product keeps and allocates, against the formula as it reads, and how long."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from statistics import median
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.common.report import PartReport, print_table
from benchmarks.common.shapes import Shape, full_rows, micro_batches, random_model
from benchmarks.common.turns import DeviceTimer
from dschat_lora.engine.build import DTYPES, resolve_dtype
from dschat_lora.engine.distributed import device
from dschat_lora.lora import layers
from dschat_lora.lora.groups import PackedLoraLinear, groups_of_parts
from dschat_lora.lora.layers import LoraLinear, lora_linear, lora_linear_reference
from dschat_lora.models.backbone import Backbone

# r / hidden size is that of r = 128 in OPT-1.3B.
SHAPE = Shape(256, 3, 4, 1024, 512, 512, 16, 2, 64, 64)
WIDTHS = {"opt": 1024, "llama": 688}
OURS, FORMULA, AGAIN = "ours", "formula", "ours, x A^T again"
BASE, LORALIB = "base alone", "loralib"


@dataclass(frozen=True)
class Layer:
    """A square layer that is timed."""

    tokens: int
    width: int
    lora_dim: int
    rounds: int


FULL_LAYERS = [Layer(16384, width, r, 20) for width in (2048, 4096) for r in (16, 128)]
# The packed attention of GPT-2 medium and large, with factors for q and v.
PACKED_LAYERS = [Layer(8 * 512, width, 4, 20) for width in (1024, 1280)]
TINY_LAYERS = [Layer(512, 256, 16, 5)]


def run(report: PartReport, *, tiny: bool) -> None:
    """Count bytes and tensors, time layers in turns; store, print and check."""
    kept = [_kept(architecture, name) for architecture in WIDTHS for name in PRODUCTS]
    tensors = [_tensors(name, product) for name, product in PRODUCTS.items()]
    report.store({"kept_by_a_block": kept, "tensors_of_full_size": tensors})
    for rows in (kept, tensors):
        print_table(list(rows[0]), [list(row.values()) for row in rows])
    times = [row for layer in (TINY_LAYERS if tiny else FULL_LAYERS) for row in _times(layer)]
    report.store({"layers": times})
    print_table(list(times[0]), [list(row.values()) for row in times])
    packed = [row for layer in (TINY_LAYERS if tiny else PACKED_LAYERS) for row in _packed(layer)]
    report.store({"packed": packed})
    print_table(list(packed[0]), [list(row.values()) for row in packed])
    for one, other in zip(kept[::2], kept[1::2], strict=True):
        saves = one["bytes per token"] <= other["bytes per token"]
        copies = one["bytes besides"] >= other["bytes besides"]
        claim = f"{one['model']}: keeps no more a token than the formula, and no copies of factors"
        report.check(claim, saves and not copies)
    own, plain = tensors
    report.check("makes a tensor forward and one backward", own["forward"] == own["backward"] == 1)
    report.check("the formula makes more", min(plain["forward"], plain["backward"]) > 1)


def _formula(*operands: Any, transposed: bool, casts: object, gate: object = None) -> Tensor:
    assert not transposed
    assert casts is gate is None
    return lora_linear_reference(*operands)


PRODUCTS: Mapping[str, Callable[..., Tensor]] = {OURS: lora_linear, FORMULA: _formula}


def _kept(architecture: Any, name: str) -> dict[str, Any]:
    """Bytes that a block keeps of activations, per token and however few tokens there are."""
    shape = replace(SHAPE, architecture=architecture, ffn_size=WIDTHS[architecture])
    with mock.patch.object(layers, "lora_linear", PRODUCTS[name]):
        few, many = (_saved_by_a_block(replace(shape, rows=rows)) for rows in (1, 2))
    per_token = (many - few) / shape.row_length
    return {
        "model": architecture,
        "product": name,
        "bytes per token": per_token,
        "in hidden sizes": per_token / shape.hidden_size,
        "bytes besides": few - per_token * shape.row_length,
    }


def _saved_by_a_block(shape: Shape) -> int:
    # The first block keeps less: embeddings owe no gradient.
    two, three = (_saved_bytes(replace(shape, num_layers=count)) for count in (2, 3))
    return three - two


def _saved_bytes(shape: Shape) -> int:
    """What autograd keeps for the backward pass in bf16, each storage once, but parameters."""
    model = random_model(shape, dtype=torch.bfloat16, device=device())
    (batch,) = micro_batches(full_rows(shape), shape.rows * shape.row_length)
    batch = batch.to(device())
    known = {p.untyped_storage().data_ptr() for p in model.parameters()}
    storages: dict[int, int] = {}
    alive = []  # so that no storage takes another's place

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            storages[storage.data_ptr()] = storage.nbytes()
            alive.append(tensor)
        return tensor

    with saved_tensors_hooks(note, lambda tensor: tensor):
        Backbone(model)(batch.input_ids, batch.position_ids, batch.segment_ids, spans=batch.spans)
    return sum(storages.values())


class _Large(TorchDispatchMode):
    """Counts new tensors of at least so many elements."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size, self.count = size, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        old = {x.data_ptr() for x in args if isinstance(x, Tensor)}
        for each in result if isinstance(result, tuple | list) else [result]:
            is_new = isinstance(each, Tensor) and each.data_ptr() not in old
            self.count += is_new and each.numel() >= self.size
        return result


def _layer(width: int, lora_dim: int, dtype: torch.dtype) -> LoraLinear:
    base = nn.Linear(width, width, device=device(), dtype=dtype).requires_grad_(False)
    layer = LoraLinear(base, r=lora_dim, scaling=2.0)
    for factor in (layer.lora_A, layer.lora_B):
        nn.init.normal_(factor, std=0.02)
    return layer


def _tensors(name: str, product: Callable[..., Tensor]) -> dict[str, Any]:
    """Tensors as large as the input that a layer makes, results included."""
    layer = _layer(64, 4, torch.bfloat16)
    x = torch.randn(128, 64, device=device(), dtype=torch.bfloat16, requires_grad=True)
    with mock.patch.object(layers, "lora_linear", product):
        with _Large(x.numel()) as forward:
            output = layer(x)
        gradient = torch.ones_like(output)
        with _Large(x.numel()) as backward:
            output.backward(gradient)
    return {"product": name, "forward": forward.count, "backward": backward.count}


def _times(size: Layer) -> list[dict[str, Any]]:
    """Milliseconds of a layer forward and backward, in turns; a CPU's of processor time."""
    dtype = DTYPES[resolve_dtype("auto")]
    layer = _layer(size.width, size.lora_dim, dtype)
    x = torch.randn(size.tokens, size.width, device=device(), dtype=dtype, requires_grad=True)
    gradient = torch.randn_like(x)
    contexts: dict[str, Callable[[], AbstractContextManager[Any]]] = {
        OURS: nullcontext,
        FORMULA: partial(mock.patch.object, layers, "lora_linear", _formula),
        AGAIN: partial(_inner_again, layer, x),
    }
    facts = {"tokens": size.tokens, "width": size.width, "r": size.lora_dim}
    steps = {
        name: partial(_step, layer, x, gradient, context) for name, context in contexts.items()
    }
    return [facts | row for row in _in_turns(steps, size.rounds)]


def _step(
    layer: nn.Module,
    x: Tensor,
    gradient: Tensor,
    context: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> None:
    with context():
        layer(x).backward(gradient)


def _in_turns(steps: Mapping[str, Callable[[], None]], rounds: int) -> list[dict[str, Any]]:
    """Milliseconds of each step, and in times of the first's, round by round: medians."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(rounds + 2):
        for name, step in steps.items():
            with DeviceTimer() as timer:
                step()
            if number >= 2:
                times[name].append(timer.milliseconds)
    first = next(iter(times.values()))
    return [
        {
            "product": name,
            "ms": median(values),
            "x ours": median(a / b for a, b in zip(values, first, strict=True)),
        }
        for name, values in times.items()
    ]


def _packed(size: Layer) -> list[dict[str, Any]]:
    """The same of GPT-2's packed attention with factors for q and v, against loralib's layer."""
    dtype, width = DTYPES[resolve_dtype("auto")], size.width
    base = nn.Linear(width, 3 * width, device=device(), dtype=dtype).requires_grad_(False)
    groups = groups_of_parts((width, width, width), ("q", "v"))
    contenders: dict[str, nn.Module] = {
        OURS: PackedLoraLinear(base, r=size.lora_dim, scaling=8.0, groups=groups),
        BASE: base,
    }
    if find_spec("loralib") is not None:
        import loralib

        options = {"r": size.lora_dim, "lora_alpha": 32, "enable_lora": [True, False, True]}
        other = loralib.MergedLinear(width, 3 * width, merge_weights=False, **options)
        contenders[LORALIB] = other.to(device(), dtype)
        loralib.mark_only_lora_as_trainable(other)
    x = torch.randn(size.tokens, width, device=device(), dtype=dtype, requires_grad=True)
    gradient = torch.randn(size.tokens, 3 * width, device=device(), dtype=dtype)
    facts = {"tokens": size.tokens, "width": width, "r": size.lora_dim, "parts": "q v"}
    steps = {name: partial(_step, layer, x, gradient) for name, layer in contenders.items()}
    return [facts | row for row in _in_turns(steps, size.rounds)]


def _inner_again(layer: LoraLinear, x: Tensor) -> AbstractContextManager[Any]:
    """Forget ``x A^T``, and form it once more in the backward pass."""
    shape, a = (len(x), layer.r), layer.lora_A
    return saved_tensors_hooks(
        lambda kept: None if kept.shape == shape else kept,
        lambda kept: F.linear(x.detach(), a.detach().to(x.dtype)) if kept is None else kept,
    )
