"""Devices to plan for, by name or memory: vendors' data sheets state what GPUs have."""

import re
from dataclasses import dataclass

from dschat_lora.perf.cards import USABLE

GB = 10**9
# Of each process: the device context and the libraries' workspaces.
CONTEXT_BYTES = int(0.6 * 2**30)
# Name as :func:`tabled_peak` knows it -> GB, GB/s.
_CARDS: dict[str, tuple[int, int]] = {
    "T4": (16, 320),
    "V100": (32, 900),  # by torch for CUDA 12: CUDA 13 has no kernels for it
    "L4": (24, 300),
    "A10": (24, 600),
    "RTX 3090": (24, 936),
    "RTX 4090": (24, 1008),
    "A40": (48, 696),
    "A6000": (48, 768),
    "L40S": (48, 864),
    "A100": (80, 1935),
    "H100": (80, 3350),
    "H200": (141, 4800),
    "B200": (180, 7700),
    "MI300X": (192, 5300),
}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(GB|GiB)", re.IGNORECASE)


@dataclass(frozen=True)
class Card:
    """A device to plan for."""

    name: str
    memory_bytes: int
    bandwidth: float | None = None  # bytes a second; None where only the size is known

    @property
    def usable_bytes(self) -> int:
        """What an estimate may take: without the context, and room for temporaries."""
        return int(USABLE * (self.memory_bytes - CONTEXT_BYTES))

    @property
    def has_varlen(self) -> bool:
        """Whether it attends to sequences of 16 bits in one call: compute capability 8 or more."""
        return self.name not in ("T4", "V100", "MI300X")


def cards_of_size(memory_bytes: int) -> list[str]:
    """Names of the cards with this memory, in gigabytes or, as some count it, in gibibytes."""
    sizes = (memory_bytes / GB, memory_bytes / 2**30)
    return [name for name, (gigabytes, _) in _CARDS.items() if gigabytes in sizes]


def find_card(given: str) -> Card:
    """The card of a name such as ``RTX 4090`` or ``h100``, or of a size such as ``24GB``.

    A gigabyte is taken for 10^9 bytes, as which cards have a little more.

    Raises:
        ValueError: for anything else.
    """
    if size := _SIZE.fullmatch(given.strip()):
        unit = 2**30 if size[2].lower() == "gib" else GB
        return Card(given.strip(), int(float(size[1]) * unit))

    def plain(name: str) -> str:
        return re.sub(r"[^a-z0-9]|nvidia|geforce|amd|instinct", "", name.lower())

    for name, (gigabytes, bandwidth) in _CARDS.items():
        if plain(given) in (plain(name), plain(name.removeprefix("RTX "))):
            return Card(name, gigabytes * GB, bandwidth * 1e9)
    raise ValueError(
        f"--for {given} is neither a size of memory, such as 24GB, nor a known card: "
        f"{', '.join(_CARDS)}"
    )
