"""How many kernels a pass launches on a GPU, and how long launching them takes.

Counts are by rule from the modules: of blocks of OPT, Llama and Qwen3 what a simulated GPU counts.
Experts count as one layer of each size, a recurrence like attention.
"""

from dataclasses import dataclass

from torch import nn

from dschat_lora.config.groups import LoadConfig
from dschat_lora.engine.distributed import device
from dschat_lora.perf.architecture import text_blocks
from dschat_lora.perf.shape import describe
from dschat_lora.perf.throughput import BlockShape, LinearShape, device_peak, step_flops
from dschat_lora.runtime.memory import TrainedModel

# Share of a card's dense peak that training is taken to reach: measured 0.38 to 0.45 with OPT-1.3B
# on an H200, in training and scoring.
EFFICIENCY = 0.4
# Of the host for a kernel of training, Python and the engine included: eight micro-batches of 2,048
# tokens took 67 us (a Llama of a billion parameters) and 53 us (OPT-125M) a kernel on an H100.
LAUNCH_SECONDS = 6e-5
_OUTSIDE, _OUTSIDE_DECODING = 80, 20  # embedding, last norm, head, optimizer; and sampling
# Forward, forward and backward, and decoding: of an RMSNorm by one kernel, of a LayerNorm, of an
# RMSNorm by parts; of attention, activation and residuals, without rotation, with it, by parts.
_NORM, _LAYER_NORM, _NORM_BY_PARTS = (1, 3, 1), (1, 2, 1), (8, 22, 8)
_REST, _REST_ROTATED, _REST_BY_PARTS = (6, 14, 6), (10, 34, 10), (14, 48, 17)
_APART = 3  # of decoding, where norms make queries and keys two tensors, each to be rotated
_TRAINED = 18  # of the optimizer, for a weight that trains without an adapter


@dataclass(frozen=True)
class Launches:
    """Kernels of a pass over one micro-batch, or of one step of decoding."""

    forward: int
    training: int  # forward and backward
    decoding: int  # layers of one input are one product, adapters beside them


def count_launches(model: nn.Module, *, fused: bool = True, recomputes: bool = False) -> Launches:
    """Kernels of a transformers model whose linear layers may carry low-rank updates.

    Args:
        model: on any device, the meta device too.
        fused: norms and rotations as ``--fused_kernels`` computes them.
        recomputes: whether blocks run forward twice.

    Raises:
        ValueError: for an architecture that is not understood.
    """
    rotates = any("Rotary" in type(module).__name__ for module in model.modules())
    rest = (_REST_ROTATED if fused else _REST_BY_PARTS) if rotates else _REST
    rms = _NORM if fused else _NORM_BY_PARTS
    totals = [0, 0, 0]
    blocks = text_blocks(model).values()
    for block, shape in zip(blocks, describe(model).blocks, strict=True):
        norms = {name: type(each).__name__ for name, each in block.named_modules()}
        norms = {name: kind for name, kind in norms.items() if "Norm" in kind}
        parts = [rms if "RMS" in kind else _LAYER_NORM for kind in norms.values()]
        totals = [sum(column) for column in zip(totals, rest, *parts, _linears(shape), strict=True)]
        apart = rest is _REST_ROTATED and any(name.endswith("q_norm") for name in norms)
        totals[2] += _APART * apart
    forward, training, decoding = totals
    training += forward * recomputes + _OUTSIDE
    return Launches(forward + _OUTSIDE // 2, training, decoding + _OUTSIDE_DECODING)


def _linears(shape: BlockShape) -> tuple[int, int, int]:
    packed = shape.attention[:-1], shape.attention[-1:], shape.mlp[:-1], shape.mlp[-1:]
    return (
        sum(3 if linear.rank else 1 for linear in shape.linears),
        sum(map(_training, shape.linears)),
        sum(1 + any(linear.rank for linear in each) for each in packed if each),
    )


def _training(linear: LinearShape) -> int:
    if linear.adapter_trained:
        return 8
    weight = linear.trained * (1 + _TRAINED)
    return (3 if linear.rank else 1) + linear.input_needs_grad + weight


def launch_advice(launching: float, work: float, *, compiled: bool) -> str | None:
    """What helps where launching a pass's kernels takes more seconds than their work does."""
    if launching <= work:
        return None
    more = "" if compiled else ", and --compile launches fewer"
    return (
        f"launching kernels takes about {launching * 1e3:.0f} ms and their work {work * 1e3:.0f} "
        f"ms by estimate: larger micro-batches use the GPU better{more}"
    )


def micro_batch_advice(trained: TrainedModel, load: LoadConfig) -> str | None:
    """:func:`launch_advice` of training on a full micro-batch; None where nothing is known."""
    model, peak = trained.model, device_peak(device(), trained.settings.torch_dtype)
    fused, recomputes = load.fused_kernels != "off", trained.recomputes
    if peak is None:
        return None
    try:
        shape = describe(model)
        launches = count_launches(model, fused=fused, recomputes=recomputes).training
    except ValueError:
        return None
    rows, length = trained.grid(trained.rows, trained.length)
    tokens = rows * length // trained.length * trained.length
    flops = step_flops(
        shape,
        num_tokens=tokens,
        num_attended=tokens * (trained.length + 1) / 2,
        num_targets=tokens,
        gradient_checkpointing=recomputes,
    )
    work = flops.hardware / (EFFICIENCY * peak * 1e12)
    return launch_advice(launches * LAUNCH_SECONDS, work, compiled=load.compile)
