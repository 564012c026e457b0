"""Whether a model sees, and what reads its pictures then."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dschat_lora.addons.images.families import KNOWN, Family, model_type
from dschat_lora.data.media import FIRST_ID

if TYPE_CHECKING:
    from dschat_lora.addons.images.reader import ImageReader
    from dschat_lora.data.encoder import Tokenizer


@dataclass
class RunDecoder:
    """``decode`` of a tokenizer that reads a run, or a tile of it, as one image token."""

    tokenizer: "Tokenizer"
    reader: "ImageReader"

    def __deepcopy__(self, memo: object) -> "RunDecoder":
        return self

    def __call__(self, token_ids: Any, *args: Any, **options: Any) -> Any:
        """As the tokenizer's own."""
        ids = token_ids.tolist() if hasattr(token_ids, "tolist") else token_ids
        if isinstance(ids, list | tuple):
            pairs = zip(ids, [-1, *ids][: len(ids)], strict=True)
            ids = self.reader.plain([i for i, last in pairs if not self._goes_on(i, last)])
        return type(self.tokenizer).decode(self.tokenizer, ids, *args, **options)

    def _goes_on(self, number: int, last: int) -> bool:
        """Whether an id is of the picture whose id stands before it."""
        is_next = number > FIRST_ID and number == last + 1
        return is_next and self.reader.entry_of(number).first != number


def image_reader(config: Any, tokenizer: "Tokenizer | None", base: str) -> "ImageReader | None":
    """What reads pictures for the model at ``base``; None where it sees none.

    Without a tokenizer it reads rows alone.
    """
    kind = model_type(base)
    if kind is not None and kind not in KNOWN:
        return None
    from dschat_lora.addons.images.options import ImageOptions
    from dschat_lora.addons.images.reader import ImageReader, PictureStore
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
            f"--context_parallel_size {divided} splits rows, but the positions and masks of "
            "images need whole rows: remove it"
        )
    of_text = {"--streaming": getattr(data, "tail", None) is not None}
    if hasattr(config, "players"):
        engine = config.batch.rollout_engine
        of_text |= {
            f"--rollout_engine {engine}": engine != "own",
            "distillation": not config.ppo.rules.learns_from_rewards,
            "an environment, agent or player": bool(config.players),
        }
    for what, is_used in of_text.items():
        if is_used:
            return f"{what} supports text only, but the rows contain other inputs, such as images"
    return ""
