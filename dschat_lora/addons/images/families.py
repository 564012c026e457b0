"""Types of models whose pictures are trained, and how they differ beside features in embeddings."""

from typing import NamedTuple


class Family(NamedTuple):
    """What the language model of a type is told of pictures."""

    by_grid: bool = False  # positions of a picture's tokens are those of its grid (mrope)
    mutual: bool = False  # tokens of a picture see each other


FAMILIES = {
    "llava_next": Family(),
    "llava_onevision": Family(),
    "gemma3": Family(mutual=True),
    "gemma4": Family(mutual=True),
    "qwen2_5_vl": Family(by_grid=True),
    "qwen3_vl": Family(by_grid=True),
    "qwen3_5": Family(by_grid=True),
    "qwen3_5_moe": Family(by_grid=True),
    "idefics3": Family(),
    "smolvlm": Family(),
    "internvl": Family(),
}
# The same, of image processors that need torchvision.
WITH_TORCHVISION = {
    "mistral3": Family(),
    "lfm2_vl": Family(),
    "gemma4_unified": Family(mutual=True),
}
