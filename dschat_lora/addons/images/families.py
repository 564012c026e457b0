"""Types of models whose pictures are trained, and how they differ beside features in embeddings."""

import json
from pathlib import Path
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
KNOWN = FAMILIES | WITH_TORCHVISION


def model_type(base: str) -> str | None:
    """The type of a model by its ``config.json``; None where that is not on this machine."""
    path = Path(base) / "config.json"
    if not path.is_file():
        from huggingface_hub import try_to_load_from_cache

        cached = None if Path(base).is_absolute() else try_to_load_from_cache(base, "config.json")
        if not isinstance(cached, str):
            return None
        path = Path(cached)
    try:
        return json.loads(path.read_text(encoding="utf-8")).get("model_type")
    except (OSError, ValueError, AttributeError):
        return None
