"""Types of models whose pictures are trained, and how they differ beside features in embeddings."""

from typing import Literal, NamedTuple


class Family(NamedTuple):
    """What the language model of a type is told of pictures."""

    by_grid: bool = False  # positions of a picture's tokens are those of its grid (mrope)
    # which layers' tokens of a picture see later ones of it: those with a sliding window, or all
    mutual: Literal["", "windows", "all"] = ""


FAMILIES = {
    "llava_next": Family(),
    "llava_onevision": Family(),
    "gemma3": Family(mutual="all"),
    "gemma4": Family(mutual="windows"),
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
    "gemma4_unified": Family(mutual="windows"),
}
