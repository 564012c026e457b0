"""Copies of factors in the type of the computation."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from dschat_lora.lora.experts import LoraExperts
from dschat_lora.lora.layers import value_dtype
from dschat_lora.lora.shared_input import SharedInput, layers_of_one_input, takes


class FactorCasts:
    """Copies of float32 factors in the type of the weights they adapt, where that is another.

    Each product casts its factors otherwise: twice in a forward and twice in a backward pass of a
    layer. Factors that ZeRO 3 shards are left out, as they are whole only while a layer uses them.
    On a GPU, layers that read one input then compute together, see
    :class:`~dschat_lora.lora.shared_input.SharedInput`.
    """

    def __init__(self, *models: nn.Module) -> None:
        modules: Iterator[Any] = (each for model in models for each in model.modules())
        self._layers = [
            layer
            for layer in modules
            if getattr(layer, "takes_casts", False)
            and layer.lora_A.dtype != value_dtype(layer.weight)
            and not hasattr(layer.lora_A, "ds_id")
        ]
        self._casts: list[tuple[Tensor, Tensor]] = []
        self._copies: list[Tensor] = []  # the same, of experts without what their rank lacks
        self._shared: dict[Any, SharedInput] = {}
        cast = set(self._layers)
        groups = (group for model in models for group in layers_of_one_input(model))
        self._groups = [g for g in groups if cast.issuperset(g) and takes(g)]

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Within, layers compute with the values that factors have at its beginning."""
        factors = [factor for layer in self._layers for factor in (layer.lora_A, layer.lora_B)]
        if not self._copies:
            self._allocate()
        if factors:
            torch._foreach_copy_(self._copies, [factor.detach() for factor in factors])
        try:
            for number, layer in enumerate(self._layers):
                layer.casts = self._casts[number]
                layer.shared = self._shared.get(layer)
            yield
        finally:
            for layer in self._layers:
                layer.casts = layer.shared = None
            for shared in self._shared.values():
                shared.forget()

    def _allocate(self) -> None:
        """Make room for copies, those of the A of layers of one input one after another."""
        downs: dict[Any, Tensor] = {}
        for layers in self._groups:
            ranks = [len(layer.lora_A) for layer in layers]
            weight, width = layers[0].weight, layers[0].in_features
            down = layers[0].lora_A.new_empty(sum(ranks), width, dtype=value_dtype(weight))
            self._shared |= dict.fromkeys(layers, SharedInput(layers, down))
            downs |= zip(layers, torch.split(down, ranks), strict=True)
        for layer in self._layers:
            dtype = value_dtype(layer.weight)
            if isinstance(layer, LoraExperts):
                down, up = layer.empty_casts(dtype)
                self._copies += [down[:, : layer.r], up[..., : layer.r]]
            else:
                down, up = (torch.empty_like(x, dtype=dtype) for x in (layer.lora_A, layer.lora_B))
                down = downs.get(layer, down)
                self._copies += [down, up]
            self._casts.append((down, up))
        for copy in (each for pair in self._casts for each in pair):
            torch._dynamo.mark_static(copy)  # a size that varies, to compiled blocks, is of tokens
