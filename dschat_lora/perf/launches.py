"""How many kernels a pass launches on a GPU, and the seconds that launching and their work take.

Counts are by rule from the modules: of blocks of OPT, Llama and Qwen3 what a simulated GPU counts.
Experts count as one layer of each size, a recurrence like attention.
"""

from dataclasses import dataclass, replace
from typing import Self

from torch import nn

from dschat_lora.perf.architecture import text_blocks
from dschat_lora.perf.shape import describe
from dschat_lora.perf.throughput import BlockShape, ModelShape, step_flops

# Share of a card's dense peak that training is taken to reach: measured 0.38 to 0.45 with OPT-1.3B
# on an H200, in training and scoring.
EFFICIENCY = 0.4
# Of the host for a kernel of training, Python and the engine included: eight micro-batches of 2,048
# tokens took 67 us (a Llama of a billion parameters) and 53 us (OPT-125M) a kernel on an H100.
LAUNCH_SECONDS = 6e-5
# What a kernel of a CUDA graph takes beside its reading, on an H200 and an H100 2 to 8 us.
REPLAY_SECONDS = 4e-6
_OUTSIDE, _OUTSIDE_DECODING = 80, 18  # embedding, last norm, head, optimizer; and sampling
# Forward, forward and backward, and decoding: of an RMSNorm by one kernel, of a LayerNorm, of an
# RMSNorm by parts; of attention, activation and residuals, without rotation, with it, by parts.
_NORM, _LAYER_NORM, _NORM_BY_PARTS = (1, 2, 1), (1, 2, 1), (8, 22, 8)
_REST, _REST_ROTATED, _REST_BY_PARTS = (6, 12, 6), (5, 12, 7), (14, 45, 17)
# Of decoding a layer of Llama's or OPT's form: two norms, attention, and four products with what
# follows each: heads, a residual, the activation, a residual.
_DECODING = 2 + 1 + 4 * 2
_FORMS = (
    {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"},
    {"self_attn", "activation_fn", "self_attn_layer_norm", "fc1", "fc2", "final_layer_norm"},
)
_TRAINED = 18  # of the optimizer, for a weight that trains without an adapter


@dataclass(frozen=True)
class Launches:
    """Kernels of a pass over one micro-batch, or of one step of decoding."""

    forward: int
    training: int  # forward and backward
    decoding: int  # layers of one input are one product, adapters beside them
    blocks: int = 0  # of ``training``, those between embedding and last norm: what a graph records


@dataclass(frozen=True)
class PassSeconds:
    """Time of training on a GPU by estimate: of a micro-batch, or of a step."""

    work: float  # of kernels
    launching: float  # of the host, of each kernel that is in no CUDA graph
    replaying: float = 0.0  # of kernels in CUDA graphs, beside their work
    blocks: int = 0  # kernels that graphs could hold, of those that are launched

    def recorded(self) -> Self:
        """The same with CUDA graphs, which hold what is between embedding and last norm."""
        return replace(
            self,
            launching=self.launching - self.blocks * LAUNCH_SECONDS,
            replaying=self.blocks * REPLAY_SECONDS,
            blocks=0,
        )

    @property
    def total(self) -> float:
        """Of all: the host launches kernels while those before them run.

        Beside graphs it launches a few, in turn with them; that counts as if nothing ran then.
        """
        if self.replaying:
            return self.work + self.replaying + self.launching
        return max(self.work, self.launching)


def count_launches(
    model: nn.Module,
    *,
    fused: bool = True,
    recomputes: bool = False,
    shape: ModelShape | None = None,
) -> Launches:
    """Kernels of a transformers model whose linear layers may carry low-rank updates.

    Args:
        model: on any device, the meta device too.
        fused: norms and rotations as ``--fused_kernels`` computes them.
        recomputes: whether blocks run forward twice.
        shape: as :func:`describe` gives it, where the caller has it.

    Raises:
        ValueError: for an architecture that is not understood.
    """
    rotates = any("Rotary" in type(module).__name__ for module in model.modules())
    rest = (_REST_ROTATED if fused else _REST_BY_PARTS) if rotates else _REST
    rms = _NORM if fused else _NORM_BY_PARTS
    totals, updates = [0, 0, 0], 0
    blocks = text_blocks(model).values()
    for block, sizes in zip(blocks, (shape or describe(model)).blocks, strict=True):
        kinds = [type(each).__name__ for each in block.modules()]
        parts = [rms if "RMS" in kind else _LAYER_NORM for kind in kinds if "Norm" in kind]
        forward, training, decoding = map(sum, zip(rest, *parts, _linears(sizes), strict=True))
        if fused and {*block._modules} in _FORMS:
            decoding = _DECODING
        totals = [totals[0] + forward, totals[1] + training, totals[2] + decoding]
        updates += _TRAINED * sum(x.trained and not x.adapter_trained for x in sizes.linears)
    forward, training, decoding = totals
    training += forward * recomputes
    return Launches(
        forward + _OUTSIDE // 2,
        training + updates + _OUTSIDE,
        decoding + _OUTSIDE_DECODING,
        blocks=training,
    )


def _linears(shape: BlockShape) -> tuple[int, int, int]:
    packed = shape.attention[:-1], shape.attention[-1:], shape.mlp[:-1], shape.mlp[-1:]
    # Of layers of one input A is one product, its gradient too, and what it adds to that of x.
    shared = [len(each) - 1 for each in packed if each and all(x.adapter_trained for x in each)]
    return (
        sum(3 if linear.rank else 1 for linear in shape.linears) - sum(shared),
        sum(
            8 if x.adapter_trained else (3 if x.rank else 1) + x.input_needs_grad + x.trained
            for x in shape.linears
        )
        - 3 * sum(shared),
        sum(1 + any(linear.rank for linear in each) for each in packed if each),
    )


def pass_seconds(
    model: nn.Module,
    *,
    tokens: int,
    length: int,
    peak: float,
    recomputes: bool,
    fused: bool = True,
) -> PassSeconds:
    """Time of training on a micro-batch of ``tokens``, all trained on, in samples of ``length``.

    ``peak`` is the card's dense TFLOP/s. The rest is as for :func:`count_launches`.

    Raises:
        ValueError: for an architecture that is not understood.
    """
    shape = describe(model)
    flops = step_flops(
        shape,
        num_tokens=tokens,
        num_attended=tokens * (length + 1) / 2,
        num_targets=tokens,
        gradient_checkpointing=recomputes,
    )
    launches = count_launches(model, fused=fused, recomputes=recomputes, shape=shape)
    return PassSeconds(
        work=flops.hardware / (EFFICIENCY * peak * 1e12),
        launching=launches.training * LAUNCH_SECONDS,
        blocks=launches.blocks,
    )
