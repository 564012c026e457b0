"""The shape of a model for FLOP counts: its matmuls and which gradients autograd forms.

:func:`describe` reads modules, never data, so it works on the meta device and on parameters
that ZeRO 3 has partitioned: sizes come from the modules' attributes.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from dschat_lora.lora.layers import LoraLinear, TrainedBias, TrainedModule, full_shape, is_conv1d
from dschat_lora.lora.nf4 import NF4Linear
from dschat_lora.lora.parallel import ParallelLinear

_EXPERT_OPTIONS = ("num_local_experts", "num_experts", "n_routed_experts")
_DROPOUT_OPTIONS = ("dropout", "resid_pdrop", "hidden_dropout", "hidden_dropout_prob")
_POST_NORMS = ("output.LayerNorm", "post_feedforward_layernorm")  # BERT; Gemma 2, OLMo 2


@dataclass(frozen=True)
class LinearShape:
    """One ``x W^T + s (x A^T) B^T``. FLOPs are per position; a multiply-add counts two.

    A low-rank update of an embedding has ``in_features = 0``: looking up a row is no matmul.
    """

    name: str
    in_features: int
    out_features: int
    trained: bool  # W receives a gradient
    bias_trained: bool = False
    rank: int = 0  # of the update, of all parts of a packed layer together; 0 without one
    adapter_trained: bool = False
    whole: bool = False  # base and update are one operation, run as a whole or not at all
    input_needs_grad: bool = True

    @property
    def saves_input(self) -> bool:
        """Whether the backward pass reads x: the gradients of W and of A do."""
        return self.trained or self.adapter_trained

    @property
    def output_needs_grad(self) -> bool:
        return self.input_needs_grad or self.saves_input or self.bias_trained

    @property
    def base(self) -> int:
        """FLOPs of ``x W^T``, and of each of the two products of its backward pass."""
        return 2 * self.in_features * self.out_features

    @property
    def forward(self) -> int:
        return self.base + 2 * self.rank * (self.in_features + self.out_features)

    @property
    def backward(self) -> int:
        flops = (self.input_needs_grad + self.trained) * self.base
        if self.adapter_trained:  # gradients of A and B
            flops += 2 * self.rank * (self.in_features + self.out_features)
        if self.adapter_trained or self.input_needs_grad:  # dY B, the gradient of x A^T
            flops += 2 * self.rank * self.out_features
        if self.input_needs_grad:  # (dY B) A
            flops += 2 * self.rank * self.in_features
        return flops


@dataclass(frozen=True)
class BlockShape:
    """One transformer block, which is also the unit of gradient checkpointing."""

    attention: tuple[LinearShape, ...]  # q, k, v in some order, or fused; then the output
    mlp: tuple[LinearShape, ...]  # up, or gate and up; then down
    attention_width: int  # query heads x head dimension, 0 without attention
    # How many of dP, dV, dQ, dK autograd forms; below 4 only where q, k, v need none.
    attention_backward: int
    recomputed: int  # FLOPs per position of the linears which checkpointing runs again

    @property
    def linears(self) -> tuple[LinearShape, ...]:
        return (*self.attention, *self.mlp)


@dataclass(frozen=True)
class ModelShape:
    """Everything :mod:`dschat_lora.perf.flops` needs to know about a model."""

    blocks: tuple[BlockShape, ...]
    outside: tuple[LinearShape, ...]  # other linears run on every position: projections, score
    head: LinearShape | None  # the language-model head; None on a reward model
    hidden_size: int
    vocab_size: int
    fused_attention: bool  # the kernel forms the scores again in the backward pass

    @property
    def num_layers(self) -> int:
        return len(self.blocks)

    @property
    def lora_dim(self) -> int:
        """The largest rank in use, 0 without LoRA."""
        linears = (*self.outside, *(x for block in self.blocks for x in block.linears))
        return max((linear.rank for linear in linears), default=0)


def describe(model: nn.Module) -> ModelShape:
    """The shape of a transformers model whose linear layers may carry low-rank updates.

    Layers are known by what they hold: ``lora_A``, or ``in_features``, or the ``nx`` and ``nf``
    of GPT-2's Conv1D. Which inputs need a gradient follows autograd, from ``requires_grad`` flags
    as in training: without a trained embedding or ``enable_input_require_grads``, none is formed
    below the first trained weight.

    A model that is divided among tensor-parallel ranks is described like the whole one: what its
    ranks do between them, where products that each repeats count once.

    Raises:
        ValueError: if the blocks are not found, or are a mixture of experts, where the number
            of tokens a layer sees depends on the data.
    """
    config: Any = model.config
    for option in _EXPERT_OPTIONS:
        if getattr(config, option, None):
            raise ValueError(
                f"{type(model).__name__} has {option} = {getattr(config, option)}: FLOPs are "
                "counted for dense models, not for a mixture of experts"
            )
    prefix, blocks = _find_blocks(model, config.num_hidden_layers)
    head = model.get_output_embeddings()  # type: ignore[operator]
    outside = _linears(model, skip=(blocks, head))
    # Either it turns embeddings into the residual stream, or it reads the finished stream.
    stem = [linear for linear in outside if linear.in_features != config.hidden_size]
    top = [linear for linear in outside if linear.in_features == config.hidden_size]
    flows = _embedding_needs_grad(model, prefix)
    stem = [replace(x, input_needs_grad=flows and x.in_features > 0) for x in stem]
    flows = flows or any(linear.output_needs_grad for linear in stem)
    shapes = []
    for block in blocks:
        shape, flows = _block(block, flows, config)
        shapes.append(shape)
    top, heads = _fed(top, flows), _fed([] if head is None else _linears(head), flows)
    return ModelShape(
        blocks=tuple(shapes),
        outside=(*stem, *top),
        head=heads[0] if heads else None,
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        fused_attention=getattr(config, "_attn_implementation", "sdpa") != "eager",
    )


def _find_blocks(model: nn.Module, count: int) -> tuple[str, nn.ModuleList]:
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return name + ".", module
    raise ValueError(
        f"{type(model).__name__} holds no list of {count} blocks (num_hidden_layers); "
        "FLOPs are counted for models whose blocks form one nn.ModuleList"
    )


def _linears(
    module: nn.Module, name: str = "", *, skip: Sequence[nn.Module | None] = ()
) -> list[LinearShape]:
    """Every matmul of a weight within ``module``, in order of registration."""
    if module in skip:
        return []
    if isinstance(module, TrainedModule):
        return _linears(module.trained if module.enabled else module.base, name)
    sizes = _sizes(module)
    if sizes is not None:
        return [_linear(module, name, *sizes)]
    dot = "." if name else ""
    return [
        linear
        for child, inner in module.named_children()
        for linear in _linears(inner, name + dot + child, skip=skip)
    ]


def _sizes(module: Any) -> tuple[int, int] | None:
    """(in, out) of a layer that multiplies by its weight or by low-rank factors, else None."""
    if hasattr(module, "lora_embedding_A"):
        return 0, module.out_features
    if hasattr(module, "lora_A") or isinstance(module, nn.Linear | ParallelLinear | NF4Linear):
        return module.in_features, module.out_features
    if is_conv1d(module):
        return module.nx, module.nf
    if isinstance(module, TrainedBias) and module.kind in ("Linear", "Conv1D", "NF4Linear"):
        inputs, outputs = full_shape(module.weight)
        return (inputs, outputs) if module.transposed else (outputs, inputs)
    return None


def _linear(module: Any, name: str, inputs: int, outputs: int) -> LinearShape:
    factor: Tensor | None = None
    if getattr(module, "enabled", True):
        factor = getattr(module, "lora_embedding_A", getattr(module, "lora_A", None))
    biases = (getattr(module, attribute, None) for attribute in ("bias", "trained_bias"))
    return LinearShape(
        name=name,
        in_features=inputs,
        out_features=outputs,
        trained=inputs > 0 and module.weight.requires_grad,
        bias_trained=any(bias is not None and bias.requires_grad for bias in biases),
        rank=0 if factor is None else full_shape(factor)[0],
        adapter_trained=factor is not None and factor.requires_grad,
        whole=factor is not None and isinstance(module, LoraLinear),
    )


def _fed(linears: Sequence[LinearShape], needs_grad: bool) -> list[LinearShape]:
    return [replace(linear, input_needs_grad=needs_grad) for linear in linears]


def _embedding_needs_grad(model: nn.Module, prefix: str) -> bool:
    """Whether the embeddings or their norm train, or their output needs a gradient."""
    if getattr(model, "_require_grads_hooks", None):  # enable_input_require_grads()
        return True
    return any(
        parameter.requires_grad
        for name, module in model.named_modules()
        if not name.startswith(prefix) and _sizes(module) is None
        if isinstance(module, nn.Embedding) or "embed" in name
        for parameter in module.parameters(recurse=False)
    )


def _block(block: nn.Module, stream: bool, config: object) -> tuple[BlockShape, bool]:
    """The block, and whether its output needs a gradient, given whether its input does.

    In each half, attention and MLP, the layer registered last reads what the others produce,
    and those read the normed residual stream.
    """
    linears = _linears(block)
    names = tuple(linear.name + "." for linear in linears)
    norm_trains = any(
        parameter.requires_grad
        for name, parameter in block.named_parameters()
        if not name.startswith(names)
    )
    attention = [x for x in linears if "attn" in x.name or "attention" in x.name]
    mlp = [x for x in linears if x not in attention]
    attention = _half(attention, stream or norm_trains)
    after = stream or any(x.output_needs_grad for x in attention)
    parallel = getattr(config, "use_parallel_residual", False)
    mlp = _half(mlp, (stream if parallel else after) or norm_trains)
    shape = BlockShape(
        attention=tuple(attention),
        mlp=tuple(mlp),
        attention_width=attention[-1].in_features if attention else 0,
        attention_backward=_attention_backward(attention[:-1]),
        recomputed=_recomputed([*attention, *mlp], tail_saves=_tail_saves(block, config)),
    )
    return shape, after or norm_trains or any(x.output_needs_grad for x in mlp)


def _half(linears: Sequence[LinearShape], needs_grad: bool) -> list[LinearShape]:
    readers = _fed(linears[:-1], needs_grad)
    # An MLP of one layer reads the stream itself.
    needs_grad = any(x.output_needs_grad for x in readers) if readers else needs_grad
    return [*readers, *_fed(linears[-1:], needs_grad)]


def _attention_backward(readers: Sequence[LinearShape]) -> int:
    """How many of dP = dO V^T, dV = P^T dO, dQ = dS K and dK = dS^T Q autograd forms."""
    initials = [x.name.rpartition(".")[2][0] for x in readers]  # q_proj, key, ...
    if set(initials) == set("qkv"):
        needs = {i: x.output_needs_grad for i, x in zip(initials, readers, strict=True)}
    else:  # one fused layer, or other names, stand for all three
        needs = dict.fromkeys("qkv", any(x.output_needs_grad for x in readers))
    return (needs["q"] or needs["k"]) + sum(needs.values())


def _tail_saves(block: nn.Module, config: object) -> bool:
    """Whether something after the last linear of a block keeps a tensor: a norm, a dropout."""
    post_norm = not getattr(config, "do_layer_norm_before", True) or any(
        name.endswith(_POST_NORMS) for name, _ in block.named_modules()
    )
    return post_norm or any(getattr(config, option, 0) for option in _DROPOUT_OPTIONS)


def _recomputed(linears: Sequence[LinearShape], *, tail_saves: bool) -> int:
    """FLOPs per position that a checkpointed block runs a second time.

    Non-reentrant checkpointing stops right before the operation that takes the last tensor it
    still wants. With ``base(x) + s (x A^T) B^T`` written out that is the product with B of the
    last layer in need of a gradient, without an update that layer's own matmul.
    """
    last = max((i for i, x in enumerate(linears) if x.output_needs_grad), default=None)
    if last is None:
        return 0
    if tail_saves:
        return sum(x.forward for x in linears)
    final = linears[last]
    skipped = 2 * final.rank * final.out_features if final.rank else final.base
    skipped *= not final.whole
    return sum(x.forward for x in linears[: last + 1]) - skipped
