"""An estimate of the memory a run needs per device, made before it starts.

Assumed: the package's low-rank layers, which keep their input and ``x A^T``, no dropout, pre-norm
blocks with two norms, AdamW in fp32, the loss computed chunk by chunk.
With fused attention the activations are within 3 percent of what autograd keeps on OPT, Llama and
GPT-2, and up to 15 percent low on GPT-NeoX, which keeps q, k and v both before and after rotation.
Of a model that is divided among tensor-parallel ranks, what one of them keeps is estimated.
Not included: temporaries of running kernels but for those of an MLP's backward pass, what an
allocator keeps, fragmentation, device context.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import nn

from dschat_lora.kernels.support import next_power_of_2
from dschat_lora.lora.experts import FUSES_GATE
from dschat_lora.lora.layers import is_quantized, stored_bytes, value_bytes
from dschat_lora.lora.parallel import ParallelLinear, group_of
from dschat_lora.perf.architecture import field, text_config, text_tower
from dschat_lora.perf.shape import chains_of, describe
from dschat_lora.perf.throughput import BlockShape, LinearShape, ModelShape

# Tensors as wide as the MLP that its activation keeps, besides its own result.
_KEPT_BY_ACTIVATION = {"relu": 0, "gelu_new": 4, "gelu_fast": 4}
MAX_CHUNK_LOGITS = 2**25  # of the loss, on a GPU
# Elements; stage3_max_reuse_distance and reduce_bucket_size of our defaults for DeepSpeed.
REUSE_DISTANCE = 1_000_000_000
BUCKET_SIZE = 50_000_000
INPUTS_ON_DEVICE = 2  # of blocks, where the others are in host memory: in use, and on its way


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes on one device, by what they hold."""

    weights: int  # frozen and trained, as stored
    gradients: int  # of trained parameters, beyond what goes as they come (see estimate_memory)
    optimizer: int  # AdamW: mean, square, and the fp32 copy it updates
    activations: int  # kept by the forward pass for the backward pass
    loss: int  # one chunk of logits and its gradient
    temporaries: int = 0  # of the backward pass of the widest MLP, beyond the loss, which is gone
    update: int = 0  # beyond activations and loss, which are gone: gradients of 16-bit weights anew
    gathered: int = 0  # at ZeRO 3, whole weights around the end of the forward pass, and a buffer
    unpacked: int = 0  # the largest 4-bit weight, whole: one is unpacked at a time

    @property
    def total(self) -> int:
        return sum(vars(self).values())


def estimate_memory(
    model: nn.Module,
    *,
    rows: int,
    length: int,
    compute_dtype: torch.dtype,
    gradient_checkpointing: bool,
    zero_stage: int,
    world_size: int,
    offload: bool = False,
    offload_activations: bool = False,
    accumulates: bool = True,
    reuse_distance: int = REUSE_DISTANCE,
    bucket_size: int = BUCKET_SIZE,
    chunk_logits: int = MAX_CHUNK_LOGITS,
    logit_bytes: int | None = None,
    context_parallel_size: int = 1,
    mask_bytes: int = 0,
    has_temporaries: bool = True,
) -> MemoryEstimate:
    """Bytes per device of training ``model``, which may be on the meta device.

    ZeRO divides optimizer state (stage 1 on), gradients (2 on) and weights (3) by ``world_size``,
    the number of data-parallel processes. A micro-batch is ``rows`` of ``length`` positions. With
    ``gradient_checkpointing`` each block's input is kept, and one block's inside at a time.
    ``offload_activations`` leaves all but two of the inputs to the host. Of a tensor-parallel model
    the rank's part counts. ``offload`` leaves optimizer state to the host, and at ZeRO 3 weights
    too. Where a step ``accumulates`` gradients of several micro-batches, they lie beside the next
    one's activations; else those of 16-bit weights come as activations go. ``reuse_distance`` and
    ``bucket_size`` are DeepSpeed's, in elements. ``chunk_logits`` is the most logits that the loss
    forms at a time, and ``logit_bytes`` what it takes for each where it is not cross-entropy, and
    forms them whole on every rank. Of ``context_parallel_size`` processes each has its share of the
    positions. Masks take ``mask_bytes`` for each (query, key) pair of a row. Without
    ``has_temporaries`` those of the backward pass are left out.

    Raises:
        ValueError: for a model that :func:`dschat_lora.perf.shape.describe` does not understand.
    """
    shape, width, parameters = describe(model), compute_dtype.itemsize, [*model.parameters()]
    narrow = any(p.requires_grad and p.dtype != torch.float32 for p in parameters)
    zero_stage = max(zero_stage, int(narrow))  # engines keep their fp32 copies so
    states = _state_bytes(parameters, zero_stage, world_size, offload=offload)
    weights, gradients, optimizer, update = states
    positions = -(-rows * length // context_parallel_size)
    activations = rows * length**2 * mask_bytes + positions * activation_bytes(
        *(model, shape),
        length=length,
        compute_dtype=compute_dtype,
        gradient_checkpointing=gradient_checkpointing,
        offload_activations=offload_activations,
    )
    chunk, head = _loss_bytes(model, shape, positions, width, chunk_logits, logit_bytes)
    by_backward = _KeptBytes.of(model, shape, length, width).by_backward
    backward = positions * max(map(by_backward, set(shape.blocks)), default=0)
    temporaries, loss = max(0, backward - chunk) * has_temporaries, chunk + head
    going = activations + loss + temporaries
    if narrow and not accumulates:
        gradients, going = max(0, gradients - going), max(0, going - gradients)
    gathered = _gathered_bytes(parameters, width, reuse_distance, bucket_size)
    return MemoryEstimate(
        weights=weights,
        gradients=gradients,
        optimizer=optimizer,
        activations=activations,
        loss=loss,
        temporaries=temporaries,
        update=max(0, update - going),
        gathered=gathered * (zero_stage == 3),
        unpacked=largest_unpacked(parameters),
    )


def _state_bytes(
    parameters: Sequence[nn.Parameter], zero_stage: int, world_size: int, *, offload: bool
) -> tuple[int, int, int, int]:
    """Of a device: weights, gradients, AdamW's state, and what its update makes anew.

    DeepSpeed's step of 16-bit weights joins their gradients, and copies them in fp32. ``offload``
    leaves AdamW's state to the host, and at ZeRO 3 the weights.
    """
    trained = [p for p in parameters if p.requires_grad]
    narrow = [p for p in trained if p.dtype != torch.float32]
    copied = narrow or zero_stage == 3 or (zero_stage > 0 and world_size > 1)
    whole = (
        (3, parameter_bytes(parameters)),
        (2, parameter_bytes(trained)),
        (1, sum(map(_numel, trained)) * (12 if copied else 8)),
        (1, sum(_numel(p) * (p.element_size() + 4) for p in narrow)),
    )
    weights, gradients, optimizer, update = (
        size // (world_size if zero_stage >= divided_from else 1) for divided_from, size in whole
    )
    if offload:
        return weights * (zero_stage < 3), gradients, 0, 0
    return weights, gradients, optimizer, update


def largest_unpacked(parameters: Iterable[nn.Parameter]) -> int:
    """Bytes of the values of the largest 4-bit weight; 0 where there is none."""
    return max((value_bytes([parameter]) for parameter in parameters), default=0)


def _gathered_bytes(
    parameters: list[nn.Parameter], width: int, reuse_distance: int, bucket_size: int
) -> int:
    """The most weights that ZeRO 3 holds whole at a time, and a bucket of gradients.

    It keeps those that are used again within ``reuse_distance``, which are the last ones before
    the backward pass begins, as many on either side. Of a model with 4-bit weights an element takes
    the mean.
    """
    sizes = list(map(_numel, parameters))
    if any(is_quantized(p) for p in parameters):
        width = -(-parameter_bytes(parameters) // sum(sizes))
    return width * (max(min(sum(sizes), reuse_distance // 2), *sizes) + bucket_size)


def parameter_bytes(parameters: Iterable[nn.Parameter]) -> int:
    """Bytes of the whole parameters, as stored."""
    return sum(stored_bytes(p) for p in parameters)


def rows_of(tokens: int, length: int) -> tuple[int, int]:
    """(number of rows of at most ``length`` positions that hold ``tokens``, length of each)."""
    rows = -(-tokens // length)
    return rows, tokens // rows


def cached_token_bytes(model: nn.Module) -> int:
    """Bytes of the keys and values that decoding keeps of one token, on all ranks of a model.

    What layers with a state keep is of one size, however long a sequence is, and does not count.

    Raises:
        ValueError: for a model that :func:`dschat_lora.perf.shape.describe` does not understand.
    """
    dtype: torch.dtype = model.dtype  # type: ignore[assignment]
    return sum(block.cache_width for block in describe(model).blocks) * dtype.itemsize


def activation_bytes(
    model: nn.Module,
    shape: ModelShape,
    *,
    length: int,
    compute_dtype: torch.dtype,
    gradient_checkpointing: bool,
    offload_activations: bool = False,
) -> int:
    """Bytes per position kept between the forward and the backward pass, without loss and masks.

    ``model``, which ``shape`` describes, names norm and activation in its configuration. Unfused
    attention keeps ``length`` numbers per query and head. With ``gradient_checkpointing`` it is
    the moment when one block is recomputed, with ``offload_activations`` from its input on the
    host.
    """
    kept = _KeptBytes.of(model, shape, length, compute_dtype.itemsize)
    inside = [
        round(kept.by_attention(block) + kept.by_layers(block.mlp))
        + block.norm_width * kept.per_feature
        for block in shape.blocks
    ]
    outside = shape.hidden_size * kept.per_feature
    outside += round(sum(kept.inputs([x], x.in_features) for x in shape.outside))
    if gradient_checkpointing:
        inputs = min(len(inside), INPUTS_ON_DEVICE) if offload_activations else len(inside)
        return outside + inputs * _stream_width(model, shape) * kept.width + max(inside)
    return outside + sum(inside)


def offloaded_bytes(model: nn.Module, *, positions: int, compute_dtype: torch.dtype) -> int:
    """Bytes of host memory that the inputs of all blocks take for so many positions.

    torch sets pinned memory aside in powers of two.
    """
    shape = describe(model)
    each = positions * _stream_width(model, shape) * compute_dtype.itemsize
    return len(shape.blocks) * next_power_of_2(each)


def _stream_width(model: nn.Module, shape: ModelShape) -> int:
    """Features of a position between the layers of the blocks; ranks may share the tokens there."""
    group = group_of(model)
    shares = 1 if group is None or not group.sequence_parallel else group.size
    return shape.hidden_size // shares


@dataclass(frozen=True)
class _KeptBytes:
    """Bytes per position that the halves of a block keep for the backward pass, and take in it."""

    shape: ModelShape
    width: int  # bytes of a number
    length: int
    per_feature: int  # bytes of a norm for each number that it reads
    norm: int  # of the residual stream
    activation: str
    ranks: int
    # Of MLPs, and of experts, whether outputs of gate and up alone are kept.
    fused_mlps: tuple[bool, bool]

    @classmethod
    def of(cls, model: nn.Module, shape: ModelShape, length: int, width: int) -> Self:
        """By the modules of ``model``, which ``shape`` describes."""
        config, group = text_config(model), group_of(model)
        modules = [*text_tower(model)[1].modules()]
        # LayerNorm is one kernel, as is a fused RMSNorm. One that is written out keeps a copy of
        # its input in fp32, and its result before the weight if that trains.
        rms = next((m for m in modules if "RMSNorm" in type(m).__name__), None)
        per_feature = width
        if rms is not None and not getattr(rms, "keeps_least", False):
            per_feature = 4 + width * any(p.requires_grad for p in rms.parameters())
        return cls(
            shape,
            width,
            length,
            per_feature,
            norm=_stream_width(model, shape) * per_feature,
            activation=str(field(config, "hidden_act", field(config, "activation_function", ""))),
            ranks=1 if group is None else group.size,
            fused_mlps=(
                any(getattr(m, "keeps_least", False) for m in modules if hasattr(m, "gate_proj")),
                any(hasattr(m, FUSES_GATE) for m in modules),
            ),
        )

    def by_attention(self, block: BlockShape) -> float:
        if not block.attention_width:  # none, or with a state, which its kernel makes again
            return self.by_layers(block.attention)
        *readers, output = block.attention
        direct = [x for x in readers if not x.closes]
        kept = float(self.norm if readers[0].input_needs_grad else 0)
        kept += self.inputs(direct, self.shape.hidden_size)
        for x in readers:  # of a latent, which a norm made
            if x.closes:
                kept += x.in_features * self.per_feature * x.input_needs_grad
                kept += self.inputs([x], x.in_features)
        scores, values = (
            n // self.ranks * self.width for n in (block.score_width, block.attention_width)
        )
        heads = block.heads // self.ranks
        if block.attention_backward and self.shape.fused_attention:
            # q, k, v (repeated for grouped queries), the result and its log-sum-exp
            return kept + 2 * scores + 2 * values + 4 * heads + output.rank * self.width
        if block.attention_backward:
            # The softmax is taken in fp32 and kept once more in the compute type.
            kept += 2 * scores + values
            kept += heads * self.length * (4 if self.width == 4 else 4 + self.width)
        return kept + self.inputs([output], output.in_features // self.ranks)

    def by_layers(self, linears: Sequence[LinearShape]) -> float:
        """Of layers that read the normed stream, and of those that read what these make."""
        if not linears:
            return 0
        kept = float(self.norm if linears[0].input_needs_grad else 0)
        shared = [x for x in linears if not x.closes and not x.routed]
        kept += self.inputs(shared, self.shape.hidden_size)
        return kept + sum(self.by_chain(chain) for chain in chains_of(linears))

    def by_chain(self, chain: Sequence[LinearShape]) -> float:
        """Of one MLP or expert; its input counts where it is a copy of the tokens routed to it."""
        *readers, down = chain
        uses = down.uses
        kept = self.inputs(readers, self.shape.hidden_size) if down.routed else 0
        if not down.closes:  # a router takes the softmax of its scores in fp32
            return kept + 4 * down.out_features * down.input_needs_grad
        if down.routed and down.output_needs_grad:
            # What is multiplied by the router's weights; two places in the order of experts.
            kept += uses * (self.shape.hidden_size * self.width + 16)
        features = down.in_features // self.ranks
        if not down.input_needs_grad:
            return kept + self.inputs([down], features)
        # Gated: input and output of the activation, and its multiplier.
        made = sum(x.out_features for x in readers)
        gated = len(readers) > 1 or made == 2 * down.in_features
        tensors = 3 if gated else _KEPT_BY_ACTIVATION.get(self.activation, 1)
        tensors += down.saves_input or self.activation == "relu"
        # Experts without adapters compute by transformers' own kernels.
        ours = not down.routed or any(x.adapter_trained for x in chain)
        if gated and self.fused_mlps[down.routed] and ours:
            tensors = 2 + (down.saves_input and not self.forms_input(down))
        kept += uses * tensors * features * self.width
        return kept + uses * (down.rank * self.width if down.adapter_trained else 0)

    def inputs(self, linears: Sequence[LinearShape], features: int) -> float:
        """The input that ``linears`` share, if any of them reads it again, and each ``x A^T``."""
        shared = max((x.uses for x in linears if x.saves_input), default=0) * features
        ranks = sum(x.uses * x.rank for x in linears if x.adapter_trained)
        return (shared + ranks) * self.width

    def forms_input(self, down: LinearShape) -> bool:
        """Whether the last layer of a fused MLP forms its input again in the backward pass."""
        return down.whole and not down.trained and self.ranks == 1

    def by_backward(self, block: BlockShape) -> int:
        """What a block's backward pass takes at most beside what was kept.

        In its MLP: gradients of a gate's three tensors, or before and after another activation.
        What its last layer kept of its input is gone by then, unless the activation kept that.
        """
        most, stays = 0, self.activation == "relu"
        for *readers, down in chains_of(block.mlp):
            if not (readers and down.closes and down.input_needs_grad):
                continue
            gated = sum(x.out_features for x in readers) == 2 * down.in_features
            forms = self.fused_mlps[down.routed] and self.forms_input(down)
            goes = down.saves_input and not forms
            tensors = 3 - goes if gated else 2 - (goes and not stays)
            most = max(most, round(down.uses * tensors * down.in_features))
        return most * self.width // self.ranks


def _loss_bytes(
    model: nn.Module,
    shape: ModelShape,
    positions: int,
    width: int,
    chunk_logits: int,
    logit_bytes: int | None,
) -> tuple[int, int]:
    """Of one chunk: logits, their fp32 copy, the fp32 error, its copy; and of gradients to keep.

    The gradient of a head is summed in fp32, to which a chunk's is added. Ranks share the logits,
    but those of an adapted head, of which each computes all.
    """
    if shape.head is None:
        return 0, 0
    head = model.get_output_embeddings()  # type: ignore[operator]
    shared = isinstance(head, ParallelLinear) and logit_bytes is None
    ranks = head.split.group.size if shared else 1
    chunk = min(positions * -(-shape.vocab_size // ranks), chunk_logits)
    per_logit = logit_bytes or (8 if width == 4 else 2 * width + 8)
    gradients = positions * shape.hidden_size * width
    if shape.head.trained:
        gradients += (4 + width) * shape.vocab_size * shape.hidden_size
    return chunk * per_logit, gradients


def _numel(parameter: nn.Parameter) -> int:
    """Size of the whole parameter, of which ZeRO 3 may hold a part."""
    return int(getattr(parameter, "ds_numel", parameter.numel()))
