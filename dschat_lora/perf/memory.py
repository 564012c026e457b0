"""An estimate of the memory a run needs per device, made before it starts.

Assumed: the package's low-rank layers, which keep their input and ``x A^T``, no dropout, pre-norm
blocks with two norms, a dense attention mask, AdamW in fp32, the loss computed chunk by chunk.
With fused attention the activations are within 3 percent of what autograd keeps on OPT, Llama and
GPT-2, and up to 15 percent low on GPT-NeoX, which keeps q, k and v both before and after rotation.
Of a model that is divided among tensor-parallel ranks, what one of them keeps is estimated.
Not included: temporaries of running kernels, fragmentation, device context.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from dschat_lora.lora.nf4 import is_quantized, stored_bytes, value_bytes
from dschat_lora.lora.parallel import ParallelLinear, group_of
from dschat_lora.perf.shape import BlockShape, LinearShape, ModelShape, describe

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
) -> MemoryEstimate:
    """Bytes per device of training ``model``, which may be on the meta device.

    ZeRO divides optimizer state (stage 1 on), gradients (2 on) and weights (3) by ``world_size``,
    the number of data-parallel processes. A micro-batch is ``rows`` of ``length`` positions. With
    ``gradient_checkpointing`` each block's input is kept, and one block's inside at a time; of
    logits, one chunk. ``offload_activations`` leaves all but two of the inputs to the host. Of a
    tensor-parallel model the rank's part counts. ``offload`` leaves optimizer state to the host,
    and at ZeRO 3 weights too. Where a step ``accumulates`` gradients of several micro-batches, they
    lie beside the next one's activations; else those of 16-bit weights come as activations go.
    ``reuse_distance`` and ``bucket_size`` are DeepSpeed's, in elements. ``chunk_logits`` is the
    most logits that the loss forms at a time.

    Raises:
        ValueError: for a model that :func:`dschat_lora.perf.shape.describe` does not understand.
    """
    shape = describe(model)
    width = compute_dtype.itemsize
    parameters = list(model.parameters())
    trained = [p for p in parameters if p.requires_grad]
    narrow = [p for p in trained if p.dtype != torch.float32]
    if narrow:
        zero_stage = max(zero_stage, 1)  # engines keep their fp32 copies so
    sharded = zero_stage == 3 or (zero_stage > 0 and world_size > 1)
    copied = sharded or bool(narrow)
    optimizer = sum(_numel(p) for p in trained) * (12 if copied else 8)
    if offload:
        optimizer = 0
    positions = rows * length
    activations = activation_bytes(
        model,
        shape,
        length=length,
        compute_dtype=compute_dtype,
        gradient_checkpointing=gradient_checkpointing,
        offload_activations=offload_activations,
    )
    loss = _loss_bytes(shape, positions, width, _vocabulary_ranks(model), chunk_logits)
    # DeepSpeed's step of 16-bit weights joins their gradients, and copies them in fp32.
    update = sum(_numel(p) * (p.element_size() + 4) for p in narrow)
    update = 0 if offload else update // (world_size if zero_stage >= 1 else 1)
    weights = parameter_bytes(parameters) // (world_size if zero_stage >= 3 else 1)
    gradients = parameter_bytes(trained) // (world_size if zero_stage >= 2 else 1)
    going = activations * positions + loss
    if narrow and not accumulates:
        gradients, going = max(0, gradients - going), max(0, going - gradients)
    return MemoryEstimate(
        weights=0 if offload and zero_stage >= 3 else weights,
        gradients=gradients,
        optimizer=optimizer // (world_size if zero_stage >= 1 else 1),
        activations=activations * positions,
        loss=loss,
        update=max(0, update - going),
        gathered=0
        if zero_stage < 3
        else _stored_width(parameters, width)
        * (_gathered_elements(parameters, reuse_distance) + bucket_size),
        unpacked=largest_unpacked(parameters),
    )


def largest_unpacked(parameters: Iterable[nn.Parameter]) -> int:
    """Bytes of the values of the largest 4-bit weight; 0 where there is none."""
    return max((value_bytes([parameter]) for parameter in parameters), default=0)


def _stored_width(parameters: list[nn.Parameter], width: int) -> int:
    """Bytes of an element that ZeRO 3 gathers; of a model with 4-bit weights their mean."""
    if not any(is_quantized(p) for p in parameters):
        return width
    return -(-parameter_bytes(parameters) // sum(map(_numel, parameters)))


def _gathered_elements(parameters: list[nn.Parameter], reuse_distance: int) -> int:
    """The most weights that ZeRO 3 holds whole at a time.

    It keeps those that are used again within ``reuse_distance``, which are the last ones before
    the backward pass begins, as many on either side.
    """
    sizes = [_numel(parameter) for parameter in parameters]
    return max(min(sum(sizes), reuse_distance // 2), *sizes)


def parameter_bytes(parameters: Iterable[nn.Parameter]) -> int:
    """Bytes of the whole parameters, as stored."""
    return sum(stored_bytes(p) for p in parameters)


def rows_of(tokens: int, length: int) -> tuple[int, int]:
    """(number of rows of at most ``length`` positions that hold ``tokens``, length of each)."""
    rows = -(-tokens // length)
    return rows, tokens // rows


def cached_token_bytes(model: Any) -> int:
    """Bytes of the keys and values that decoding keeps of one token, on all ranks of a model."""
    config = model.config
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return int(2 * config.num_hidden_layers * heads * size * model.dtype.itemsize)


def activation_bytes(
    model: nn.Module,
    shape: ModelShape,
    *,
    length: int,
    compute_dtype: torch.dtype,
    gradient_checkpointing: bool,
    offload_activations: bool = False,
) -> int:
    """Bytes per position kept between the forward and the backward pass, without the loss.

    ``model``, which ``shape`` describes, names norm and activation in its configuration. Unfused
    attention keeps ``length`` numbers per query and head. With ``gradient_checkpointing`` it is
    the moment when one block is recomputed, with ``offload_activations`` from its input on the
    host.
    """
    width = compute_dtype.itemsize
    config: Any = model.config
    group = group_of(model)
    ranks = 1 if group is None else group.size
    per_feature = _norm_bytes(model, width)
    stream = _stream_width(model, shape)
    norm = stream * per_feature
    heads = config.num_attention_heads // ranks
    activation = getattr(config, "hidden_act", getattr(config, "activation_function", ""))
    inside = [
        _attention_bytes(block, shape, heads, length, norm, width, ranks)
        + _mlp_bytes(block, shape, activation, norm, width, ranks)
        for block in shape.blocks
    ]
    mask = length * width  # one (B, 1, T, T) for all blocks
    outside = shape.hidden_size * per_feature + mask
    outside += sum(_input_bytes([x], x.in_features, width) for x in shape.outside)
    if gradient_checkpointing:
        inputs = min(len(inside), INPUTS_ON_DEVICE) if offload_activations else len(inside)
        return outside + inputs * stream * width + max(inside)
    return outside + sum(inside)


def offloaded_bytes(model: nn.Module, *, positions: int, compute_dtype: torch.dtype) -> int:
    """Bytes of host memory that the inputs of all blocks take for so many positions.

    torch sets pinned memory aside in powers of two.
    """
    shape = describe(model)
    each = positions * _stream_width(model, shape) * compute_dtype.itemsize
    return len(shape.blocks) * (1 << max(0, each - 1).bit_length())


def _stream_width(model: nn.Module, shape: ModelShape) -> int:
    """Features of a position between the layers of the blocks; ranks may share the tokens there."""
    group = group_of(model)
    shares = 1 if group is None or not group.sequence_parallel else group.size
    return shape.hidden_size // shares


def _vocabulary_ranks(model: Any) -> int:
    """Number of ranks that share the logits; an adapted head computes all of them on each."""
    head = model.get_output_embeddings()
    return head.split.group.size if isinstance(head, ParallelLinear) else 1


def _norm_bytes(model: nn.Module, width: int) -> int:
    """Bytes per element that a norm keeps of its input.

    LayerNorm is one kernel. RMSNorm is written out: it keeps a copy in fp32, and its result
    before the weight if that trains.
    """
    rms = [module for module in model.modules() if "RMSNorm" in type(module).__name__]
    if not rms:
        return width
    return 4 + (width if any(p.requires_grad for p in rms[0].parameters()) else 0)


def _attention_bytes(
    block: BlockShape, shape: ModelShape, heads: int, length: int, norm: int, width: int, ranks: int
) -> int:
    if not block.attention:
        return 0
    *readers, output = block.attention
    kept = norm if readers[0].input_needs_grad else 0
    kept += _input_bytes(readers, shape.hidden_size, width)
    queries = block.attention_width // ranks * width
    if block.attention_backward and shape.fused_attention:
        # q, k, v (repeated for grouped queries), the result and its log-sum-exp
        kept += 4 * queries + 4 * heads
        return kept + output.rank * width
    if block.attention_backward:
        # The softmax is taken in fp32 and kept once more in the compute type.
        kept += 3 * queries + heads * length * (4 if width == 4 else 4 + width)
    return kept + _input_bytes([output], output.in_features // ranks, width)


def _mlp_bytes(
    block: BlockShape, shape: ModelShape, activation: str, norm: int, width: int, ranks: int
) -> int:
    if not block.mlp:
        return 0
    *readers, down = block.mlp
    kept = norm if readers[0].input_needs_grad else 0
    kept += _input_bytes(readers, shape.hidden_size, width)
    if down.input_needs_grad:
        # Gated: input and output of the activation, and its multiplier.
        gated = len(readers) > 1
        tensors = 3 if gated else _KEPT_BY_ACTIVATION.get(activation, 1)
        result_kept = down.saves_input or activation == "relu"
        kept += (tensors + result_kept) * (down.in_features // ranks) * width
        return kept + (down.rank * width if down.adapter_trained else 0)
    return kept + _input_bytes([down], down.in_features // ranks, width)


def _input_bytes(linears: list[LinearShape], features: int, width: int) -> int:
    """The input that ``linears`` share, if any of them reads it again, and each ``x A^T``."""
    shared = features if any(x.saves_input for x in linears) else 0
    return (shared + sum(x.rank for x in linears if x.adapter_trained)) * width


def _loss_bytes(
    shape: ModelShape, positions: int, width: int, ranks: int, chunk_logits: int
) -> int:
    """One chunk: logits, their fp32 copy, the fp32 error, its copy; and gradients to keep.

    The gradient of a head is summed in fp32, to which a chunk's is added.
    """
    if shape.head is None:
        return 0
    chunk = min(positions * -(-shape.vocab_size // ranks), chunk_logits)
    per_logit = 8 if width == 4 else 2 * width + 8
    gradients = positions * shape.hidden_size * width
    if shape.head.trained:
        gradients += (4 + width) * shape.vocab_size * shape.hidden_size
    return chunk * per_logit + gradients


def _numel(parameter: nn.Parameter) -> int:
    """Size of the whole parameter, of which ZeRO 3 may hold a part."""
    return int(getattr(parameter, "ds_numel", parameter.numel()))
