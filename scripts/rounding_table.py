"""How much of a small update 16-bit weights keep, rounded to the nearest or by chance.

``python scripts/rounding_table.py`` prints the table of benchmarks/quality.md. Weights and updates
are normally distributed, updates so many times smaller. What is kept of them is the projection on
them of what has changed in the weights once the sum is rounded to bfloat16.
"""

import torch

from dschat_lora.kernels.rounding import round_at_random

SIZES = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2)
COUNT = 2**23


def kept(size: float, *, seed: int = 0) -> tuple[float, float]:
    """Parts of an update of so much of the weights that both kinds of rounding keep."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(COUNT, generator=generator).bfloat16().float()
    update = size * torch.randn(COUNT, generator=generator)
    merged = weight + update
    drawn = torch.empty(COUNT, dtype=torch.bfloat16)
    round_at_random(drawn, merged, seed)
    changes = (each.float() - weight for each in (merged.bfloat16(), drawn))
    nearest, chance = (float((each @ update) / (update @ update)) for each in changes)
    return nearest, chance


def rows() -> list[str]:
    """The table's."""
    found = ((size, *(f"{100 * part:.0f} %" for part in kept(size))) for size in SIZES)
    return [f"| {size:g} | {nearest} | {chance} |" for size, nearest, chance in found]


if __name__ == "__main__":
    print("| update, of the weights | nearest | by chance |\n|---|---|---|")
    print("\n".join(rows()))
