"""16-bit copies of factors, for the products of an optimizer step."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from dschat_lora.lora.experts import LoraExperts
from dschat_lora.lora.layers import LoraLinear
from dschat_lora.lora.nf4 import value_dtype
from dschat_lora.lora.parallel_layers import ParallelLoraLinear


class FactorCasts:
    """Copies of float32 factors in the type of the weights they adapt, where that is another.

    Each product casts its factors otherwise: twice in a forward and twice in a backward pass of a
    layer. Factors that ZeRO 3 shards are left out, as they are whole only while a layer uses them.
    """

    def __init__(self, *models: nn.Module) -> None:
        kinds = (
            LoraLinear,
            ParallelLoraLinear,
            LoraExperts,
        )  # others make theirs of what they hold
        found = [each for model in models for each in model.modules() if type(each) in kinds]
        self._layers = [
            each for each in found if isinstance(each, LoraLinear | LoraExperts) and _casts(each)
        ]
        self._copies: list[Tensor] = []

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Within, layers compute with the values that factors have at its beginning."""
        factors = [factor for layer in self._layers for factor in (layer.lora_A, layer.lora_B)]
        if not self._copies:
            dtypes = (value_dtype(layer.weight) for layer in self._layers for _ in range(2))
            pairs = zip(factors, dtypes, strict=True)
            self._copies = [torch.empty_like(factor, dtype=dtype) for factor, dtype in pairs]
            for copy in self._copies:  # a size that varies, to compiled blocks, is one of tokens
                torch._dynamo.mark_static(copy)
        if factors:
            torch._foreach_copy_(self._copies, [factor.detach() for factor in factors])
        try:
            for number, layer in enumerate(self._layers):
                layer.casts = (self._copies[2 * number], self._copies[2 * number + 1])
            yield
        finally:
            for layer in self._layers:
                layer.casts = None


def _casts(layer: LoraLinear | LoraExperts) -> bool:
    sharded = hasattr(layer.lora_A, "ds_id")
    return layer.lora_A.dtype != value_dtype(layer.weight) and not sharded
