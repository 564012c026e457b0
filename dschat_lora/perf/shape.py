"""The shape of a model for FLOP counts: its matmuls and which gradients autograd forms.

:func:`describe` reads modules, never data, so it works on the meta device and on parameters
that ZeRO 3 has partitioned: sizes come from the modules' attributes.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from torch import Tensor, nn

from dschat_lora.lora.experts import LoraExperts
from dschat_lora.lora.layers import LoraLinear, full_shape
from dschat_lora.lora.parallel import ParallelEmbedding
from dschat_lora.lora.trained import TrainedModule
from dschat_lora.perf.architecture import (
    ExpertWeight,
    beside_text,
    expert_weights,
    experts_per_token,
    field,
    layer_sizes,
    lists_experts,
    text_blocks,
    text_config,
)
from dschat_lora.perf.throughput import BlockShape, LinearShape, ModelShape

_DROPOUT_OPTIONS = ("dropout", "resid_pdrop", "hidden_dropout", "hidden_dropout_prob")
_POST_NORMS = ("output.LayerNorm", "post_feedforward_layernorm")  # BERT; Gemma 2, OLMo 2
# What a layer has that carries a state from token to token in place of attention.
_STATE = ("A_log", "time_decay", "slope_rate")
_STATEFUL = re.compile("mamba|delta|lightning|textlinear|rglru|mlstm")
_KEYS = re.compile(r"\.([kv]|kv)_proj\b|\.(key|value)\b|\.[kv]_lin\b")
_LATENT = re.compile(r"\.kv_a_")  # of which keys and values are made
_ATTENTION = re.compile("attn|attention(?!.*norm)|attention$")
# Parts of blocks that read what an encoder made of another input.
_CROSS = ("cross_attn", "encoder_attn", "crossattention", "cross_attention")


def describe(model: nn.Module) -> ModelShape:
    """The shape of a transformers model whose linear layers may carry low-rank updates.

    Layers are known by what they hold: ``lora_A``, or ``in_features``, or the ``nx`` and ``nf``
    of GPT-2's Conv1D, or a fused weight of all experts; a token goes through as many experts as
    the router says. Which inputs need a gradient follows autograd, from ``requires_grad`` flags
    as in training: without a trained embedding or ``enable_input_require_grads``, none is formed
    below the first trained weight. Of a model with several towers the one that reads text counts.

    A model that is divided among tensor-parallel ranks is described like the whole one: what its
    ranks do between them, where products that each repeats count once.

    Raises:
        ValueError: if the blocks are not found, or a size is not known.
    """
    config = text_config(model)
    width = field(config, "hidden_size")
    if width is None:
        raise ValueError(
            f"{type(config).__name__} has no hidden_size, which is needed to count FLOPs and memory"
        )
    named = text_blocks(model)
    blocks = tuple(named.values())
    head = model.get_output_embeddings()  # type: ignore[operator]
    layers = _Layers(config, width)
    # Either it turns embeddings into the residual stream, or it reads the finished stream.
    outside = layers.of(model, skip=(*blocks, head, *beside_text(model).values()))
    stem = [linear for linear in outside if linear.in_features != width]
    top = [linear for linear in outside if linear.in_features == width]
    flows = _embedding_needs_grad(model, tuple(f"{name}." for name in named))
    stem = [replace(x, input_needs_grad=flows and x.in_features > 0) for x in stem]
    flows = flows or any(linear.output_needs_grad for linear in stem)
    shapes = []
    for block in blocks:
        shape, flows = _block(block, flows, layers)
        shapes.append(shape)
    top = [replace(x, input_needs_grad=flows) for x in top]
    heads = [] if head is None else layers.of(head)
    return ModelShape(
        blocks=tuple(shapes),
        outside=(*stem, *top),
        head=replace(heads[0], input_needs_grad=flows) if heads else None,
        hidden_size=width,
        vocab_size=heads[0].out_features if heads else field(config, "vocab_size", 0),
        fused_attention=field(config, "_attn_implementation", "sdpa") != "eager",
    )


@dataclass(frozen=True)
class _Layers:
    """Finds the matmuls of a module by the configuration of the model it is part of."""

    config: object
    width: int  # of the residual stream

    def of(
        self,
        module: nn.Module,
        name: str = "",
        *,
        skip: Sequence[nn.Module | None] = (),
        around: tuple[nn.Module, ...] = (),
        uses: float = 1,
    ) -> list[LinearShape]:
        """Every matmul of a weight within ``module``, in order of registration."""
        if any(module is each for each in skip):
            return []
        if isinstance(module, TrainedModule):
            inner = module.trained if module.enabled else module.base
            return self.of(inner, name, around=around, uses=uses)
        sizes = layer_sizes(module)
        if sizes is not None:
            return [_linear(module, name, *sizes, uses=uses)]
        holders = (module, *reversed(around))
        dot = "." if name else ""
        linears = []
        fused = expert_weights(module, self.width)
        for each in fused:
            number = uses * self._chosen(each.num_experts, holders)
            held = each.adapter or each
            sizes = each.in_features, each.out_features
            linear = _linear(held, name + dot + each.name, *sizes, uses=number)
            linears.append(replace(linear, routed=True))
        listed = lists_experts(module, name)
        if listed:
            uses *= self._chosen(len(module), holders) / len(module)  # type: ignore[arg-type]
        for child, inner in module.named_children():
            if all(child != each.name for each in fused):
                path, within = name + dot + child, (*around, module)
                linears += self.of(inner, path, skip=skip, around=within, uses=uses)
        return [replace(x, routed=True) for x in linears] if listed else linears

    def _chosen(self, count: int, holders: Sequence[nn.Module]) -> int:
        chosen = experts_per_token(holders[:3], self.config)
        if chosen is None:
            raise ValueError(f"the number of active experts per token (of {count}) is unknown")
        return min(chosen, count)


def _linear(
    module: nn.Module | ExpertWeight, name: str, inputs: int, outputs: int, *, uses: float
) -> LinearShape:
    factor: Tensor | None = None
    if getattr(module, "enabled", True):
        factor = getattr(module, "lora_embedding_A", getattr(module, "lora_A", None))
    biases = (getattr(module, attribute, None) for attribute in ("bias", "trained_bias"))
    return LinearShape(
        name=name,
        in_features=inputs,
        out_features=outputs,
        trained=inputs > 0 and bool(module.weight.requires_grad),
        bias_trained=any(bias is not None and bias.requires_grad for bias in biases),
        rank=0 if factor is None else full_shape(factor)[-2],
        adapter_trained=factor is not None and factor.requires_grad,
        whole=factor is not None and isinstance(module, LoraLinear | LoraExperts),
        uses=uses,
    )


def _embedding_needs_grad(model: nn.Module, blocks: tuple[str, ...]) -> bool:
    """Whether the embeddings or their norm train, or their output needs a gradient."""
    if getattr(model, "_require_grads_hooks", None):  # enable_input_require_grads()
        return True
    return any(
        parameter.requires_grad
        for name, module in model.named_modules()
        if not name.startswith(blocks) and layer_sizes(module) is None
        if isinstance(module, nn.Embedding) or "embed" in name
        for parameter in module.parameters(recurse=False)
    )


def _block(block: nn.Module, stream: bool, layers: _Layers) -> tuple[BlockShape, bool]:
    """The block, and whether its output needs a gradient, given whether its input does.

    In each half, attention and MLP, the layer registered last reads what the others produce,
    and those read the normed residual stream.
    """
    config, width = layers.config, layers.width
    # Llama 3.2 Vision leaves out whole blocks where there is no image.
    linears = [] if hasattr(block, _CROSS[0]) else layers.of(block)
    linears = [x for x in linears if not any(word in x.name for word in _CROSS)]
    names = tuple(x.name + end for x in linears for end in (".", "_bias."))
    rest = {n: p for n, p in block.named_parameters() if not f"{n}.".startswith(names)}
    norm_trains = any(parameter.requires_grad for parameter in rest.values())
    needs_grad = stream or norm_trains
    owned = _by_attention(block, linears)
    attention: list[LinearShape] = []
    for of in owned.values():  # the last one, and those of another width, read what others made
        closes = [i > 0 and (x.in_features != width or x is of[-1]) for i, x in enumerate(of)]
        attention += _in_order(of, closes, needs_grad)
    after = stream or any(x.output_needs_grad for x in attention)
    parallel = field(config, "use_parallel_residual", False)
    mlp = [x for x in linears if all(x not in of for of in owned.values())]
    # The same of layers side by side, such as experts, each with a last one of its own.
    parents = [None, *(_parent(x.name) for x in mlp), None]
    closes = [
        i > 1 and (x.in_features != width or parents[i - 1] == parents[i] != parents[i + 1])
        for i, x in enumerate(mlp, start=1)
    ]
    mlp = _in_order(mlp, closes, (stream if parallel else after) or norm_trains)
    modules = ((block.get_submodule(name), of) for name, of in owned.items())
    scored = [
        _attention_sizes(module, of, config)
        for module, of in modules
        if not any(map(_has_state, module.modules()))
    ]
    score_width = sum(each.score_width for each in scored)
    shape = BlockShape(
        attention=tuple(attention),
        mlp=tuple(mlp),
        attention_width=sum(each.value_width for each in scored),
        score_width=score_width,
        heads=max((each.heads for each in scored), default=0),
        cache_width=sum(each.cache_width for each in scored),
        attention_backward=_attention_backward(attention[:-1]),
        recomputed=_recomputed(block, config, attention, mlp),
        norm_width=_norm_width(block, attention, score_width, width),
        has_state=any(map(_has_state, block.modules())),
        uncounted=_uncounted(block, rest) if linears else (),
    )
    return shape, after or norm_trains or any(x.output_needs_grad for x in mlp)


def _by_attention(block: nn.Module, linears: Sequence[LinearShape]) -> dict[str, list[LinearShape]]:
    """The linears of each attention of the block, the output last, by the attention's name."""
    owned: dict[str, list[LinearShape]] = {}
    for name, module in block.named_modules():
        words = f"{_last(name.rstrip('.0123456789'))} {type(module).__name__}".lower()
        inside = any(name.startswith(f"{other}.") for other in owned)
        if inside or not name or isinstance(module, nn.ModuleList) or not _ATTENTION.search(words):
            continue
        own = [x for x in linears if x.name.startswith(f"{name}.")]
        if own:
            owned[name] = sorted(own, key=lambda x: _last(x.name).startswith("o"))
    return owned


def _in_order(
    linears: Sequence[LinearShape], closes: Sequence[bool], needs_grad: bool
) -> list[LinearShape]:
    """The linears with whether they read what others made, and whether that needs a gradient."""
    ordered: list[LinearShape] = []
    marked = [replace(x, closes=each) for x, each in zip(linears, closes, strict=True)]
    for chain in chains_of(marked):
        made = needs_grad
        for x in chain:
            ordered.append(replace(x, input_needs_grad=made if x.closes else needs_grad))
            made |= ordered[-1].output_needs_grad
    return ordered


def chains_of(linears: Sequence[LinearShape]) -> list[list[LinearShape]]:
    """Layers side by side, each with those whose results it reads before it."""
    chains: list[list[LinearShape]] = []
    for x in linears:
        before = chains[-1][-1] if chains else None
        apart = before is None or before.closes or _parent(before.name) != _parent(x.name)
        if apart and not x.closes:
            chains.append([])
        chains[-1].append(x)
    return chains


def _parent(name: str) -> str:
    return name.rpartition(".")[0]


class _AttentionSizes(NamedTuple):
    """Sizes of an attention that scores each token against others."""

    value_width: int
    score_width: int
    heads: int
    cache_width: int


def _attention_sizes(
    module: nn.Module, linears: Sequence[LinearShape], config: object
) -> _AttentionSizes:
    """By the layers of ``module``, the output last, and by what it says of its heads."""
    *readers, output = linears
    values = score = int(output.in_features * output.uses)
    of_value = getattr(module, "v_head_dim", None)
    of_query = getattr(module, "qk_head_dim", None) or getattr(module, "head_dim", None)
    if of_value and of_query:
        score = values * of_query // of_value
    heads = field(config, "num_attention_heads")
    if not isinstance(heads, int):
        size = of_value or of_query
        if not size:
            raise ValueError(f"{type(module).__name__} does not say how many heads it has")
        heads = values // size
    keys = [x for x in readers if _KEYS.search(x.name)]
    if getattr(module, "is_kv_shared_layer", False):
        cached = 0
    elif latent := [x for x in readers if _LATENT.search(x.name)]:
        cached = latent[0].out_features
    elif keys:
        both = len(keys) == 1 and "kv" not in keys[0].name  # keys are values too
        cached = sum(x.out_features for x in keys) * (1 + both)
    else:  # fused with the queries
        cached = sum(x.out_features for x in readers) - score
    return _AttentionSizes(values, score, heads, cached)


def _norm_width(
    block: nn.Module, attention: Sequence[LinearShape], queries: int, width: int
) -> int:
    """Numbers of a position that norms of queries and keys, and of what halves return, read."""
    names = [n for n, module in block.named_modules() if "Norm" in type(module).__name__]
    own = sum("." not in name for name in names)
    keys = sum(x.out_features for x in attention if _last(x.name).startswith("k_"))
    read = {"q_norm": queries, "k_norm": keys}
    return max(0, own - 2) * width + sum(read.get(_last(name), 0) for name in names)


def _uncounted(block: nn.Module, rest: Mapping[str, nn.Parameter]) -> tuple[str, ...]:
    """Weights of products that are not understood; what chooses the tokens to attend to."""

    def multiplies(name: str, parameter: nn.Parameter) -> bool:
        owner = block.get_submodule(_parent(name))
        if _has_state(owner):
            return False  # counted as its state
        if "bias" in name or any(word in name for word in _CROSS):
            return False
        looked_up = nn.Embedding | ParallelEmbedding | nn.modules.conv._ConvNd
        return len(full_shape(parameter)) >= 2 and not isinstance(owner, looked_up)

    indexers = [name for name, _ in block.named_modules() if _last(name) == "indexer"]
    return (*indexers, *(name for name, p in rest.items() if multiplies(name, p)))


def _last(name: str) -> str:
    return name.rpartition(".")[2]


def _has_state(module: nn.Module) -> bool:
    return _STATEFUL.search(type(module).__name__.lower()) is not None or any(
        hasattr(module, name) for name in _STATE
    )


def _attention_backward(readers: Sequence[LinearShape]) -> int:
    """How many of dP = dO V^T, dV = P^T dO, dQ = dS K and dK = dS^T Q autograd forms."""
    initials = [_last(x.name)[0] for x in readers]  # q_proj, key, ...
    if set(initials) == set("qkv"):
        needs = {i: x.output_needs_grad for i, x in zip(initials, readers, strict=True)}
    else:  # one fused layer, or other names, stand for all three
        needs = dict.fromkeys("qkv", any(x.output_needs_grad for x in readers))
    return (needs["q"] or needs["k"]) + sum(needs.values())


def _recomputed(
    block: nn.Module,
    config: object,
    attention: Sequence[LinearShape],
    mlp: Sequence[LinearShape],
) -> float:
    """FLOPs per position that a checkpointed block runs a second time.

    Non-reentrant checkpointing stops right before the operation that takes the last tensor it
    still wants. With ``base(x) + s (x A^T) B^T`` written out that is the product with B of the
    last layer in need of a gradient, without an update that layer's own matmul. Nothing is skipped
    where something after the last layer keeps a tensor: a norm, a dropout, or the product with the
    router's weights, which need a gradient.
    """
    linears = [*attention, *mlp]
    last = max((i for i, x in enumerate(linears) if x.output_needs_grad), default=None)
    if last is None:
        return 0
    post_norm = not field(config, "do_layer_norm_before", True) or any(
        name.endswith(_POST_NORMS) for name, _ in block.named_modules()
    )
    dropout = any(field(config, name, 0) for name in _DROPOUT_OPTIONS)
    if post_norm or dropout or any(x.routed and x.output_needs_grad for x in mlp):
        return sum(x.forward for x in linears)
    final = linears[last]
    skipped = final.low_rank * final.out_features if final.rank else final.base
    skipped *= not final.whole
    return sum(x.forward for x in linears[: last + 1]) - skipped
