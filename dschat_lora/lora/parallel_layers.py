"""Low-rank updates of linear layers and embeddings that a tensor group divides.

See :mod:`dschat_lora.lora.parallel` for which factor is divided and which is on every rank.
"""

import torch.nn.functional as F
from torch import Tensor, nn

from dschat_lora.lora.layers import LoraEmbedding, LoraLinear, conv1d, zeros
from dschat_lora.lora.matmul import adapter_dropout, lora_linear
from dschat_lora.lora.parallel import (
    ParallelEmbedding,
    ParallelLinear,
    Shard,
    mark_shard,
    own_rows,
    sum_of_parts,
)


class ParallelLoraLinear(LoraLinear):
    """A :class:`LoraLinear` of which each rank holds a part of the weight and of one factor."""

    def __init__(
        self, base: ParallelLinear, *, r: int, scaling: float, dropout: float = 0.0
    ) -> None:
        super().__init__(base, r=r, scaling=scaling, dropout=dropout)
        self.split = base.split
        a, b = self.split.factors
        self.lora_A, self.lora_B = _part(self.lora_A, a), _part(self.lora_B, b)

    def forward(self, x: Tensor) -> Tensor:
        """What the whole layer gives this rank, see :meth:`Split.around`."""
        bias: Tensor | None = self.bias
        if self.enabled and self.trained_bias is not None:
            bias = self.split.shared_bias(self.trained_bias).to(self.weight.dtype)
        return self.split.around(x, self._product, bias)

    def _product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """The layer with the weights of this rank."""
        if not self.enabled:
            base = conv1d if self.transposed else F.linear
            return base(x, self.weight, bias)
        lora_a, lora_b = self.split.shared(self.lora_A, self.lora_B)
        dropout = self.dropout if self.training else 0.0
        # Drawn for the whole layer on every rank, whose streams stay in step.
        scaling, keep = adapter_dropout(x, self.scaling, dropout, self.in_features)
        if keep is not None:
            keep = self.split.own_input(keep)
        return lora_linear(
            x,
            self.weight,
            bias,
            lora_a,
            lora_b,
            scaling,
            keep,
            transposed=self.transposed,
            casts=self.casts,
        )


class ParallelLoraEmbedding(LoraEmbedding):
    """A :class:`LoraEmbedding` of which each rank holds some of the vocabulary, and all of B."""

    def __init__(self, base: ParallelEmbedding, *, r: int, scaling: float) -> None:
        super().__init__(base, r=r, scaling=scaling)
        self.shard = base.shard
        columns = Shard(self.shard.group, 1, self.shard.blocks)
        self.lora_embedding_A = _part(self.lora_embedding_A, columns)

    def forward(self, ids: Tensor) -> Tensor:
        """(...) int64 -> (..., dim) on every rank, in the dtype of ``weight``."""
        own, inside = own_rows(ids, self.shard)
        group = self.shard.group
        # In no row that is kept does the gradient of the padding's own row count.
        ((start, stop),) = self.shard.ranges()
        padding = self.padding_idx
        padding = None if padding is None or not start <= padding < stop else padding - start
        rows = self.rows(own, padding, group.copy(self.lora_embedding_B))
        return sum_of_parts(rows.masked_fill(~inside[..., None], 0.0), group)


def _part(whole: nn.Parameter, shard: Shard | None) -> nn.Parameter:
    """Zeros in the shape of this rank's part."""
    if shard is None:
        return whole
    part = zeros(*shard.local_shape(whole.shape), device=whole.device)
    mark_shard(part, shard)
    return part
