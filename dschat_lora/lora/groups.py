"""Packed projections, such as q, k and v in one layer, with factors for some of their parts."""

from dataclasses import dataclass
from itertools import compress

import torch
from torch import Tensor, nn

from dschat_lora.lora.layers import LoraLinear, zeros

PARTS = ("q", "k", "v")  # in the order of their rows in every packed layer known here


@dataclass(frozen=True)
class Groups:
    """How the outputs of a packed layer are cut, and which groups have factors of their own.

    The k enabled groups share ``lora_A`` (k * r, in), r rows each, and a compact ``lora_B`` with
    r columns and the outputs of the enabled groups alone as rows: the layout of loralib's
    MergedLinear, whose groups are equal. The update of group j's outputs is ``s B_j A_j``, that
    of the others zero.
    """

    sizes: tuple[int, ...]  # outputs of each; they may differ, as with grouped-query attention
    enabled: tuple[bool, ...]  # whether each has factors

    def __post_init__(self) -> None:
        if len(self.sizes) != len(self.enabled) or not any(self.enabled):
            raise ValueError(
                f"a packed layer of {len(self.sizes)} groups needs as many of enable_lora, one of "
                f"them True at least, got {list(self.enabled)}"
            )
        if min(self.sizes) <= 0:
            raise ValueError(f"the groups of a packed layer must be > 0, got {list(self.sizes)}")

    @property
    def count(self) -> int:
        """k, the number of enabled groups."""
        return sum(self.enabled)

    @property
    def enabled_sizes(self) -> tuple[int, ...]:
        """Outputs of each enabled group."""
        return tuple(compress(self.sizes, self.enabled))

    def expand(self, lora_B: Tensor) -> Tensor:  # noqa: N803
        """B (rows, r) as one matrix, by which ``(x A^T) B^T`` is the update of all outputs.

        Returns:
            (sum of sizes, k * r), zero outside the enabled groups' blocks, with their gradient.
        """
        blocks = iter(lora_B.split_with_sizes(self.enabled_sizes))
        return torch.block_diag(  # type: ignore[no-untyped-call]
            *(
                next(blocks) if enabled else lora_B.new_zeros(size, 0)
                for size, enabled in zip(self.sizes, self.enabled, strict=True)
            )
        )

    def compact(self, matrix: Tensor) -> Tensor:
        """What :meth:`expand` made ``matrix`` of.

        Raises:
            ValueError: if no B expands to it.
        """
        rows, columns = matrix.shape
        if rows != sum(self.sizes) or columns % self.count:
            raise ValueError(
                f"{tuple(matrix.shape)} does not fit the groups {list(self.sizes)}, "
                f"{self.count} of them enabled"
            )
        rank = columns // self.count
        bands = list(compress(matrix.split_with_sizes(self.sizes), self.enabled))
        blocks = [band[:, rank * j : rank * (j + 1)] for j, band in enumerate(bands)]
        lora_b = torch.cat(blocks)
        if not torch.equal(self.expand(lora_b), matrix):
            raise ValueError(
                "values other than zero stand outside the blocks of the groups "
                f"{list(self.sizes)}, enabled {list(self.enabled)}"
            )
        return lora_b


class PackedLoraLinear(LoraLinear):
    """A :class:`LoraLinear` of packed projections, with factors for some of its groups."""

    takes_casts = False  # its factors are made of what it holds

    def __init__(
        self, base: nn.Module, *, r: int, scaling: float, groups: Groups, dropout: float = 0.0
    ) -> None:
        super().__init__(base, r=r, scaling=scaling, dropout=dropout)
        if sum(groups.sizes) != self.out_features:
            raise ValueError(f"{self.out_features} outputs cannot be cut into {list(groups.sizes)}")
        self.groups = groups
        self.lora_A = zeros(r * groups.count, self.in_features, device=self.weight.device)
        self.lora_B = zeros(sum(groups.enabled_sizes), r, device=self.weight.device)

    def factors(self) -> tuple[Tensor, Tensor]:
        """A (k r, in) and B (out, k r) of the update, with the zeros of other groups."""
        return self.lora_A, self.groups.expand(self.lora_B)

    def delta(self, lora_A: Tensor, lora_B: Tensor) -> Tensor:  # noqa: N803
        """The update these factors make to ``weight``, in its shape, float32."""
        return super().delta(lora_A, self.groups.expand(lora_B.float()))

    def extra_repr(self) -> str:
        """Shape, adapter settings and groups, for ``print(model)``."""
        sizes, enabled = self.groups.sizes, self.groups.enabled
        return f"{super().extra_repr()}, groups={sizes}, enabled={enabled}"


def groups_of_parts(sizes: tuple[int, ...], parts: tuple[str, ...]) -> Groups:
    """The groups of q, k and v of these sizes, with factors for ``parts`` of them."""
    return Groups(sizes, tuple(part in parts for part in PARTS))


def parts_of(groups: Groups | None) -> tuple[str, ...]:
    """The parts of q, k and v that have factors of their own; none where the layer has one pair."""
    return () if groups is None else tuple(compress(PARTS, groups.enabled))
