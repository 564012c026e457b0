"""Linear layers and embeddings whose weights are divided among the ranks of a tensor group.

A column layer holds some of its outputs, a row layer some of its inputs (Megatron-LM,
arXiv:1909.08053, section 3). With low-rank factors A and B beside the base:

    column: y_i = x W_i^T + b_i + s (x A^T) B_i^T          A on every rank, B divided
    row:    y   = sum_i (x_i W_i^T + s (x_i A_i^T) B^T) + b    A divided, B on every rank

so that base and update share one exchange. The factor on every rank sees a part of its gradient
on each: it is used through :meth:`TensorGroup.copy`, which sums the parts in the factor's own
type, before any other hook sees the gradient. The divided factor's gradient is complete as it is.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dschat_lora.lora.collectives import TensorGroup, exchange
from dschat_lora.lora.layers import (
    LoraEmbedding,
    LoraLinear,
    adapter_dropout,
    conv1d,
    gated,
    lora_linear,
    zeros,
)

# Of an input and a bias, as of ``F.linear`` with its weight.
Product = Callable[[Tensor, Tensor | None], Tensor]


@dataclass(frozen=True)
class Shard:
    """How a tensor is divided among the ranks of a group.

    The blocks of a dimension are cut one by one: a packed q, k, v gives each rank some of q, some
    of k and some of v. The last rank gets less of a block that the ranks do not divide.
    """

    group: TensorGroup
    dim: int
    blocks: tuple[int, ...]  # sizes, which add up to that of the dimension

    def full_shape(self, shape: Sequence[int]) -> torch.Size:
        """Of the whole tensor, given that of a rank's part."""
        whole = list(shape)
        whole[self.dim] = sum(self.blocks)
        return torch.Size(whole)

    def local_shape(self, full: Sequence[int]) -> torch.Size:
        """Of this rank's part, given that of the whole tensor."""
        part = list(full)
        part[self.dim] = sum(stop - start for start, stop in self.ranges())
        return torch.Size(part)

    def ranges(self, rank: int | None = None) -> list[tuple[int, int]]:
        """(start, stop) in the whole dimension of what a rank holds, in its order."""
        rank = self.group.rank if rank is None else rank
        ranges, begin = [], 0
        for block in self.blocks:
            each = -(-block // self.group.size)
            start, stop = min(rank * each, block), min((rank + 1) * each, block)
            ranges.append((begin + start, begin + stop))
            begin += block
        return ranges

    def own(self, full: Tensor) -> Tensor:
        """This rank's part of a tensor that every rank has."""
        dim = self.dim % full.ndim
        parts = [full.narrow(dim, start, stop - start) for start, stop in self.ranges()]
        return (parts[0] if len(parts) == 1 else torch.cat(parts, dim)).contiguous()

    def whole(self, own: Tensor) -> Tensor:
        """The tensor whose part of this rank is ``own``; call on every rank of the group."""
        dim, ranks = self.dim % own.ndim, range(self.group.size)
        sizes = [[stop - start for start, stop in self.ranges(rank)] for rank in ranks]
        missing = max(map(sum, sizes)) - own.shape[dim]
        if missing:  # exchanged shapes are alike
            padding = own.new_zeros(*own.shape[:dim], missing, *own.shape[dim + 1 :])
            own = torch.cat([own, padding], dim)
        parts = zip(self.group.gather(own), sizes, strict=True)
        by_rank = [
            part.narrow(dim, 0, sum(each)).split_with_sizes(each, dim) for part, each in parts
        ]
        blocks = zip(*by_rank, strict=True)
        return torch.cat([piece for block in blocks for piece in block], dim)


def mark_shard(parameter: Tensor, shard: Shard | None) -> None:
    """Note how ``parameter``, of this rank's shape, is cut; DeepSpeed's norms read a flag too."""
    if shard is not None:
        parameter.tensor_shard = shard  # type: ignore[attr-defined]
        parameter.tensor_model_parallel = True  # type: ignore[attr-defined]


def shard_of(parameter: Tensor) -> Shard | None:
    """How a parameter is divided among tensor-parallel ranks; None if each holds all of it."""
    return getattr(parameter, "tensor_shard", None)


def own_part(parameter: Tensor, full: Tensor) -> Tensor:
    """What this tensor-parallel rank holds, as ``parameter``, of the value ``full``."""
    shard = shard_of(parameter)
    return full if shard is None else shard.own(full)


@dataclass(frozen=True)
class ColumnParallel:
    """Each rank computes some of a layer's outputs.

    Attributes:
        blocks: of the outputs, see :class:`Shard`.
        reads: what enters: "dealt" tokens, of which each rank has some with sequence parallelism
            and all without; the "same" on every rank; or what was "entered" before, in one
            exchange for several layers.
        gathers: give every rank all outputs.
    """

    group: TensorGroup
    blocks: tuple[int, ...]
    reads: Literal["dealt", "same", "entered"] = "dealt"
    gathers: bool = False

    def weight(self, *, transposed: bool = False) -> Shard:
        """Of (out, in), or transposed (in, out)."""
        return Shard(self.group, 1 if transposed else 0, self.blocks)

    @property
    def bias(self) -> Shard | None:
        """Of (out,)."""
        return Shard(self.group, 0, self.blocks)

    @property
    def factors(self) -> tuple[Shard | None, Shard | None]:
        """Of A (r, in) and B (out, r)."""
        return None, Shard(self.group, 0, self.blocks)

    def shared(self, lora_A: Tensor, lora_B: Tensor) -> tuple[Tensor, Tensor]:  # noqa: N803
        """The factors, the one on every rank with the sum of the ranks' gradients."""
        return self.group.copy(lora_A), lora_B

    def shared_bias(self, bias: Tensor) -> Tensor:
        """The trained bias, in its own type: this rank's part, of a gradient that is complete."""
        return bias

    def own_input(self, mask: Tensor) -> Tensor:
        """What concerns this rank of (..., in) that is given for the whole input."""
        return mask

    def around(self, x: Tensor, product: Product, bias: Tensor | None) -> Tensor:
        """The layer, given its product with this rank's weights."""
        if self.reads == "dealt":
            x = self.group.enter(x)
        elif self.reads == "same":
            x = self.group.copy(x)
        y = product(x, bias)
        if not self.gathers:
            return y
        outputs = Shard(self.group, -1, self.blocks)
        return exchange(y, outputs.whole, outputs.own)


@dataclass(frozen=True)
class RowParallel:
    """Each rank multiplies its inputs, as a column layer leaves them; the products are summed.

    Methods are those of :class:`ColumnParallel`.

    Attributes:
        blocks: of the inputs, see :class:`Shard`.
    """

    group: TensorGroup
    blocks: tuple[int, ...]

    def weight(self, *, transposed: bool = False) -> Shard:
        return Shard(self.group, 0 if transposed else 1, self.blocks)

    @property
    def bias(self) -> Shard | None:
        """Of (out,): every rank holds it, and adds it to the sum."""
        return None

    @property
    def factors(self) -> tuple[Shard | None, Shard | None]:
        return Shard(self.group, 1, self.blocks), None

    def shared(self, lora_A: Tensor, lora_B: Tensor) -> tuple[Tensor, Tensor]:  # noqa: N803
        return lora_A, self.group.copy(lora_B)

    def shared_bias(self, bias: Tensor) -> Tensor:
        """The trained bias, in its own type, with one gradient on all ranks.

        With sequence parallelism each rank adds it to its own tokens.
        """
        group = self.group
        return group.copy(bias) if group.sequence_parallel else group.alike(bias)

    def own_input(self, mask: Tensor) -> Tensor:
        return Shard(self.group, -1, self.blocks).own(mask)

    def around(self, x: Tensor, product: Product, bias: Tensor | None) -> Tensor:
        y = self.group.leave(product(x, None))
        return y if bias is None else y + bias


Split = ColumnParallel | RowParallel


class ParallelLinear(nn.Module):
    """A frozen linear layer of which each rank holds a part; its features are those of the whole.

    The weight is a part of (out, in), or of (in, out) where it is ``transposed``: GPT-2's Conv1D.
    """

    bias: nn.Parameter | None

    def __init__(self, base: nn.Module, split: Split, *, transposed: bool = False) -> None:
        super().__init__()
        weight, bias = base.get_parameter("weight"), base._parameters.get("bias")
        sizes = weight.shape if transposed else weight.shape[::-1]
        self.in_features, self.out_features = int(sizes[0]), int(sizes[1])
        self.split, self.transposed = split, transposed
        self.weight = _cut(weight, split.weight(transposed=transposed))
        self.register_parameter("bias", None if bias is None else _cut(bias, split.bias))
        self.train(base.training)

    def forward(self, x: Tensor) -> Tensor:
        """What the whole layer gives this rank, see :class:`Split`."""
        return self.split.around(x, self._product, self.bias)

    def _product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(x, self.weight.t() if self.transposed else self.weight, bias)

    def extra_repr(self) -> str:
        """For ``print(model)``."""
        return f"{self.in_features}, {self.out_features}, {type(self.split).__name__.lower()}"


class ParallelEmbedding(nn.Module):
    """A frozen embedding of which each rank holds some of the vocabulary.

    All but the weight, a part of (num_embeddings, dim), is of the whole embedding.
    """

    max_norm = None

    def __init__(self, base: nn.Embedding, group: TensorGroup) -> None:
        super().__init__()
        self.num_embeddings, self.embedding_dim = base.weight.shape
        self.padding_idx = base.padding_idx
        self.shard = Shard(group, 0, (self.num_embeddings,))
        self.weight = _cut(base.weight, self.shard)
        self.train(base.training)

    def forward(self, ids: Tensor) -> Tensor:
        """(...) int64 -> (..., dim), on every rank."""
        own, inside = own_rows(ids, self.shard)
        rows = F.embedding(own, self.weight).masked_fill(~inside[..., None], 0.0)
        # Every rank needs all tokens here, whatever the layers above do with them.
        return sum_of_parts(rows, self.shard.group)

    def extra_repr(self) -> str:
        """For ``print(model)``."""
        return f"{self.num_embeddings}, {self.embedding_dim}, divided by rows"


def own_rows(ids: Tensor, shard: Shard) -> tuple[Tensor, Tensor]:
    """Row numbers of this rank's part, and whether an id is in it; elsewhere the number is 0."""
    ((start, stop),) = shard.ranges()
    inside = (ids >= start) & (ids < stop)
    return torch.where(inside, ids - start, 0), inside


def sum_of_parts(x: Tensor, group: TensorGroup) -> Tensor:
    """The ranks' sum, whose gradient each part gets whole."""
    return exchange(x, group.sum, lambda grad: grad)


@contextmanager
def whole_sequences(model: nn.Module) -> Iterator[None]:
    """Within, every rank has all tokens; nothing in it may be run backward."""
    group = group_of(model)
    with nullcontext() if group is None else group.whole_sequences():
        yield


def group_of(model: nn.Module) -> TensorGroup | None:
    """The ranks that a model is divided among; None where it is whole."""
    shards = map(shard_of, model.parameters())
    return next((shard.group for shard in shards if shard is not None), None)


def _cut(parameter: Tensor, shard: Shard | None) -> nn.Parameter:
    """This rank's part as a frozen parameter; of a meta tensor its shape."""
    if shard is None:
        own = parameter.detach()
    elif parameter.is_meta:
        own = parameter.new_empty(shard.local_shape(parameter.shape))
    else:
        own = shard.own(parameter.detach()).clone()
    cut = nn.Parameter(own, requires_grad=False)
    mark_shard(cut, shard)
    return cut


class ParallelLoraLinear(LoraLinear):
    """A :class:`LoraLinear` of which each rank holds a part of the weight and of one factor."""

    def __init__(
        self, base: ParallelLinear, *, r: int, scaling: float, dropout: float = 0.0
    ) -> None:
        super().__init__(base, r=r, scaling=scaling, dropout=dropout)
        self.split = base.split
        a, b = self.split.factors
        self.lora_A, self.lora_B = _part(self.lora_A, a), _part(self.lora_B, b)

    def forward(self, x: Tensor, gate: Tensor | None = None) -> Tensor:
        """What the whole layer gives this rank, see :meth:`Split.around`."""
        x = x if gate is None else gated(x, gate)
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
        super().__init__(base, r=r, scaling=scaling)  # type: ignore[arg-type]
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
