"""Types of models whose pictures are trained, and how they differ beside features in embeddings."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

if TYPE_CHECKING:
    from dschat_lora.addons.images.reader import ImageReader
    from dschat_lora.data.encoder import Tokenizer


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


def image_reader(config: Any, tokenizer: "Tokenizer | None", base: str) -> "ImageReader | None":
    """What reads pictures for the model at ``base``; None where it sees none.

    Without a tokenizer it reads rows alone.
    """
    kind = model_type(base)
    if kind is not None and kind not in KNOWN:
        return None
    from dschat_lora.addons.images.options import ImageOptions
    from dschat_lora.addons.images.reader import ImageReader, PictureStore, RunDecoder
    from dschat_lora.runtime.checks import cache_directory

    options = getattr(getattr(config, "addons", None), "images", None)
    options = ImageOptions() if config is None else options
    if options is None:  # of a command that reads no pictures
        return None
    data = getattr(config, "data", None)  # a verb that prepares none has pictures in memory
    data = getattr(data, "data", data)
    store = PictureStore(None if data is None else cache_directory(data) / "pictures")
    refusal = _refusal(config, KNOWN.get(kind or "", Family()))
    reader = ImageReader(base, tokenizer, options, store, refusal)
    if tokenizer is not None:
        tokenizer.decode = RunDecoder(tokenizer, reader)  # type: ignore[method-assign]
    return reader


def _refusal(config: Any, family: Family) -> str:
    """Why the options of a command are for text alone; "" if they are not."""
    parallel, data = getattr(config, "parallel", None), getattr(config, "data", None)
    divided = getattr(parallel, "context_parallel_size", 1)
    if divided > 1 and (family.by_grid or family.mutual):
        return (
            f"--context_parallel_size {divided} divides rows, and the model reads images, whose "
            "places and masks are those of whole rows: drop it"
        )
    of_text = {"--streaming": getattr(getattr(data, "data", data), "streaming", False)}
    if hasattr(config, "players"):
        engine = config.batch.rollout_engine
        of_text |= {
            f"--rollout_engine {engine}": engine != "own",
            "distillation": config.ppo.rules.distills,
            "an environment, agent or player": bool(config.players),
        }
    for what, is_used in of_text.items():
        if is_used:
            return f"{what} reads text alone, and the rows hold more, such as images"
    return ""


def model_type(base: str) -> str | None:
    """The type of a model by its ``config.json``; None where that is not on this machine."""
    path = Path(base) / "config.json"
    if not path.is_file():
        from huggingface_hub import try_to_load_from_cache

        found = None if Path(base).is_absolute() else try_to_load_from_cache(base, "config.json")
        if not isinstance(found, str):
            return None
        path = Path(found)
    try:
        return json.loads(path.read_text(encoding="utf-8")).get("model_type")
    except (OSError, ValueError, AttributeError):
        return None
