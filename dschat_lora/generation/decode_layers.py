"""Layers of Llama's and OPT's form in few kernels, for steps of one token a row on a GPU.

A layer is computed so if its class gives the same on random numbers; others, and prompts, are
computed by the layer as it is.
"""

import copy
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from dschat_lora.generation.kv_cache import KVCache, attend_by_products
from dschat_lora.generation.stacked_linears import StackedLinears
from dschat_lora.kernels.heads import place_heads
from dschat_lora.kernels.low_rank import low_rank_residual, low_rank_swiglu
from dschat_lora.kernels.norms import rms_norm_rows
from dschat_lora.kernels.support import runs_kernels
from dschat_lora.kernels.swiglu import swiglu
from dschat_lora.models.backbone import cache_argument
from dschat_lora.models.fused import keeps_plain

if TYPE_CHECKING:
    from transformers.models.llama.modeling_llama import LlamaAttention as Attention
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer as Layer
    from transformers.models.llama.modeling_llama import LlamaRMSNorm as Norm

    from dschat_lora.generation.slot_cache import SlotCache

# By type of model what makes forwards of its layers, if anything does, by what was tried.
_MAKERS: WeakKeyDictionary[type, dict[object, Callable[..., Any] | None]] = WeakKeyDictionary()
Stacks = Mapping[tuple[nn.Module, ...], StackedLinears]
_LLAMA = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
_OPT = {"self_attn", "activation_fn", "self_attn_layer_norm", "fc1", "fc2", "final_layer_norm"}
_HEADS, _NORMS = ("q_proj", "k_proj", "v_proj"), ("q_norm", "k_norm")
_MLP = {"gate_proj", "up_proj", "down_proj", "act_fn"}
_PROBE = "dschat_lora_probe"
_AGREES = 1e-5  # relative error in fp32 that is rounding
# Of a layer of the same class on which it is tried; an entry that a configuration lacks stays so.
_SMALL = {
    **{"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16},
    **{"intermediate_size": 48, "ffn_dim": 48, "moe_intermediate_size": 16, "num_experts": 4},
    **{"num_experts_per_tok": 2, "num_local_experts": 4},
}


def decoding_forwards(model: nn.Module, stacks: Stacks) -> dict[nn.Module, Callable[..., Any]]:
    """Forwards of a model's layers that take fewer kernels, where the model's device runs them.

    Args:
        model: from transformers; other models have none.
        stacks: products of linear layers that read one input, of those that have been stacked.
    """
    parameter = next(model.parameters(), None)
    if parameter is None or not runs_kernels(parameter.device) or keeps_plain(model):
        return {}
    makers = _MAKERS.setdefault(type(model), {})
    forwards: dict[nn.Module, Callable[..., Any]] = {}
    for layer in model.modules():
        kind = _kind(layer)
        if kind is None or "forward" in vars(layer):
            continue
        attention: Attention = layer.self_attn
        simple = {k: v for k, v in vars(attention).items() if isinstance(v, bool | int | str)}
        simple.pop("layer_idx", None)
        key = (type(layer), attention.config.to_json_string(), *sorted(simple.items()))
        if key not in makers:
            tried = (partial(kind, windows=windows) for windows in (False, True))
            makers[key] = next((make for make in tried if _agrees(layer, make)), None)
        if (make := makers[key]) is not None:
            forwards[layer] = make(layer, stacks)
    return forwards


def _kind(layer: nn.Module) -> "type[DecodeLayer] | None":
    """What computes layers with such parts, if anything does."""
    names = {*layer._modules}
    attention: Attention | None = layer._modules.get("self_attn")
    if attention is None or any(getattr(m, "split", None) is not None for m in layer.modules()):
        return None  # a part of it is on another rank
    output = "o_proj" if names == _LLAMA else "out_proj"
    parts = {*attention._modules} - {*_HEADS, output}
    size = getattr(attention, "head_dim", None)
    if parts not in (set(), {*_NORMS}) or not isinstance(size, int) or size % 2:
        return None
    return LlamaLayer if names == _LLAMA else OPTLayer if names == _OPT and not parts else None


class DecodeLayer:
    """A layer's forward; what is no step of one token a row goes to the layer itself.

    Args:
        layer: of transformers, in evaluation mode.
        stacks: see :func:`decoding_forwards`.
        windows: whether attention is told how far it reaches.
    """

    def __init__(self, layer: nn.Module, stacks: Stacks, *, windows: bool) -> None:
        self.layer: Layer = layer
        self.attention: Attention = layer.get_submodule("self_attn")
        self._stacks, self._plain = stacks, type(layer).forward
        self._cache = str(cache_argument(layer))
        window = getattr(self.attention.config, "sliding_window", None)
        window = getattr(self.attention, "sliding_window", window)
        self._options = {"dropout": 0.0} | ({"sliding_window": window} if windows else {})
        # Those whose own calls are left out.
        self._inner = [m for m in layer.modules() if m is not layer]

    def __call__(self, hidden: Tensor, *args: object, **options: Any) -> object:
        """(B, T, H) hidden states after the layer."""
        columns = getattr(options.get(self._cache), "step_columns", lambda: None)()
        steps = columns is not None and hidden.shape[1] == 1 and not args
        hooks = any(m._forward_hooks or m._forward_pre_hooks for m in self._inner)
        attend = ALL_ATTENTION_FUNCTIONS.get(self.attention.config._attn_implementation)
        plain = self.layer.training or torch.is_grad_enabled() or hooks or attend is None
        if plain or not steps or not self.takes(hidden, options):
            return self._plain(self.layer, hidden, *args, **options)
        cache: KVCache | SlotCache = options.pop(self._cache)
        return self.step(hidden[:, 0], partial(self.attend, attend, cache), options)[:, None]

    def takes(self, hidden: Tensor, options: Mapping[str, Any]) -> bool:
        """Whether a step with these options is computed here."""
        return True

    def step(self, x: Tensor, attend: Callable[..., Tensor], options: dict[str, Any]) -> Tensor:
        """(B, H) hidden states after the layer."""
        raise NotImplementedError

    def attend(
        self,
        function: Callable[..., Any],
        cache: "KVCache | SlotCache",
        x: Tensor,
        angles: tuple[Tensor | None, Tensor | None],
        options: dict[str, Any],
    ) -> Tensor:
        """(B, heads x D) attention's output for (B, H) inputs, whose keys and values are stored."""
        attention = self.attention
        norms = [attention._modules.get(name) for name in _NORMS]
        weights, eps = [None if n is None else n.weight for n in norms], _eps(norms[0])
        heads = self._heads(x)

        def write(keys: Tensor, values: Tensor, columns: Tensor) -> None:
            place_heads(*heads, *angles, *weights, eps, keys, values, columns)

        query, key, value = (part[:, :, None] for part in heads[:3])
        keys, values = cache.update(key, value, attention.layer_idx, write=write)
        mask, options = options.pop("attention_mask", None), options | self._options
        output, _ = function(
            attention, query, keys, values, mask, scaling=attention.scaling, **options
        )
        return output.reshape(len(x), -1)

    def _heads(self, x: Tensor) -> tuple[Any, ...]:
        """Products of queries, keys and values by head, and the update that is to be added."""
        layers = tuple(self.attention.get_submodule(name) for name in _HEADS)
        stack, inner, up, scaling = self._stacks.get(layers), None, None, 0.0
        if stack is None:
            parts = tuple(layer(x) for layer in layers)
        else:
            products, out = stack.products(x), sum(stack.sizes)
            parts = torch.split(products[:, :out], stack.sizes, dim=1)
            if stack.up is not None:
                inner, up, scaling = products[:, out:], stack.up, stack.scaling
        size = self.attention.head_dim
        return *(part.unflatten(1, (-1, size)) for part in parts), inner, up, scaling

    def add(self, residual: Tensor, layer: nn.Module, x: Tensor) -> Tensor:
        """``residual`` and the output of a layer for (B, in) x."""
        stack = self._stacks.get((layer,))
        if stack is None:
            return residual + layer(x)
        if stack.up is None and stack.bias is None:
            return torch.addmm(residual, x, stack.stack.T)
        return low_rank_residual(stack.products(x), stack.up, stack.scaling, residual)


class LlamaLayer(DecodeLayer):
    """RMSNorm, attention with rotated heads, RMSNorm, SwiGLU or experts."""

    def takes(self, hidden: Tensor, options: Mapping[str, Any]) -> bool:
        """Whether angles have the type and size of heads."""
        cos, sin = options.get("position_embeddings") or (None, None)
        size = self.attention.head_dim
        return all(
            isinstance(x, Tensor) and x.dtype == hidden.dtype and x.shape[1:] == (1, size)
            for x in (cos, sin)
        )

    def step(self, x: Tensor, attend: Callable[..., Tensor], options: dict[str, Any]) -> Tensor:
        """(B, H) hidden states after the layer."""
        layer, attention = self.layer, self.attention
        cos, sin = (a[:, 0].expand(len(x), -1) for a in options.pop("position_embeddings"))
        normed = _rms_norm(layer.input_layernorm, x)
        heads = attend(normed, (cos, sin), options)
        x = self.add(x, attention.o_proj, heads)
        normed = _rms_norm(layer.post_attention_layernorm, x)
        if {*layer.mlp._modules} != _MLP:
            return x + layer.mlp(normed[:, None])[:, 0]
        return self.add(x, layer.mlp.down_proj, self._swiglu(normed))

    def _swiglu(self, x: Tensor) -> Tensor:
        gate, up = self.layer.mlp.gate_proj, self.layer.mlp.up_proj
        stack = self._stacks.get((gate, up))
        if stack is None:
            return swiglu(gate(x), up(x))
        size, _ = stack.sizes
        return low_rank_swiglu(stack.products(x), stack.up, stack.scaling, size)


class OPTLayer(DecodeLayer):
    """LayerNorm, attention, LayerNorm and ReLU, whose queries are scaled by attention."""

    def step(self, x: Tensor, attend: Callable[..., Tensor], options: dict[str, Any]) -> Tensor:
        """(B, H) hidden states after the layer."""
        layer = self.layer
        options.pop("use_cache", None)
        heads = attend(layer.self_attn_layer_norm(x), (None, None), options)
        x = self.add(x, self.attention.out_proj, heads)
        normed = layer.final_layer_norm(x)
        stack = self._stacks.get((layer.fc1,))
        if stack is None:
            inner = F.relu(layer.fc1(normed))
        else:
            (inner,) = stack.add_updates(stack.products(normed), relu=True)
        return self.add(x, layer.fc2, inner)


def _rms_norm(norm: "Norm", x: Tensor) -> Tensor:
    return rms_norm_rows(x, norm.weight, _eps(norm))


def _eps(norm: "Norm | None") -> float:
    return 0.0 if norm is None else float(getattr(norm, "variance_epsilon", None) or norm.eps)


@torch.no_grad()
def _agrees(layer: nn.Module, make: Callable[..., Any]) -> bool:
    """Whether two steps of a small layer of the class are the same by what ``make`` makes."""
    attention: Attention = layer.self_attn
    generator = torch.Generator().manual_seed(0)
    try:
        config = copy.deepcopy(attention.config)
        for name, value in _SMALL.items():
            if getattr(config, name, None) is not None:
                setattr(config, name, value)
        config._attn_implementation = _PROBE
        with torch.random.fork_rng(devices=[]):
            small: Layer = type(layer)(config, attention.layer_idx).eval()
        for parameter in small.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator)
        expected, made = _two_steps(small, small), _two_steps(small, make(small, {}))
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError):
        return False  # made or called in another way
    pairs = zip(expected[0], made[0], strict=True)
    near = all(bool((y - x).norm() <= _AGREES * x.norm()) for x, y in pairs)
    return near and expected[1] == made[1]


def _two_steps(layer: "Layer", forward: Callable[..., Any]) -> tuple[list[Tensor], list[object]]:
    """Hidden states after two steps of three rows, and what attention was told but its scale."""
    generator, told = torch.Generator().manual_seed(1), list[object]()
    hidden = torch.randn(2, 3, 1, layer.self_attn.config.hidden_size, generator=generator)
    angles = torch.randn(2, 3, 1, layer.self_attn.head_dim, generator=generator)
    column, outputs = torch.zeros(1, dtype=torch.int64), []
    cache = KVCache((3, 2), column)

    def attend(
        module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, **options: Any
    ) -> tuple[Tensor, None]:
        told.append({k: isinstance(v, Tensor) or v for k, v in options.items() if k != "scaling"})
        return attend_by_products(module, q, k, v, mask, scaling=options["scaling"])

    AttentionInterface.register(_PROBE, attend)
    for step in range(2):
        mask = torch.zeros(3, 1, 1, 2)
        mask[..., step + 1 :] = torch.finfo(mask.dtype).min
        options = {"attention_mask": mask, "position_ids": column.expand(3, 1), "use_cache": True}
        options[str(cache_argument(layer))] = cache
        if {*layer._modules} == _LLAMA:
            options["position_embeddings"] = tuple(angles)
        output = forward(hidden[step], **options)
        outputs.append(output[0] if isinstance(output, tuple) else output)
        column += 1
    return outputs, told
