"""Options of rows with pictures."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from dschat_lora.config.groups import ALL_BESIDE, require_numbers
from dschat_lora.config.options import option

if TYPE_CHECKING:
    from dschat_lora.data.chat import Chat
    from dschat_lora.data.records import TextRecord


@dataclass(frozen=True)
class ImageOptions:
    section = "pictures"

    allow_image_urls: bool = option(
        False, help="read pictures of rows from the network where they are http(s) addresses"
    )
    max_image_pixels: int = option(
        50_000_000, help="most pixels of a picture, which is refused before it is decoded"
    )

    def __post_init__(self) -> None:
        require_numbers(self, ">= 1", "max_image_pixels")


@dataclass(frozen=True)
class TrainingImageOptions(ImageOptions):
    train_vision: bool = option(
        False, help="adapt the linear layers of the part that sees and of its projector, too"
    )
    vision_learning_rate: float | None = option(
        None,
        help="rate of adapters there, by --train_vision or --target_modules; default: as others",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        require_numbers(self, "> 0", "vision_learning_rate")

    def check(self, config: Any) -> Any:
        """The config with the layers of the part that sees, where they are to train.

        Raises:
            ValueError: if nothing is adapted.
        """
        name = "actor" if hasattr(config, "actor") else "lora"
        lora = getattr(config, name)
        if not self.train_vision or ALL_BESIDE in lora.target_modules:
            return config
        if lora.lora_dim == 0:
            raise ValueError("--train_vision is for adapters: give --lora_dim")
        lora = replace(lora, target_modules=(*lora.target_modules, ALL_BESIDE))
        return replace(config, **{name: lora})


@dataclass(frozen=True)
class PromptImageOptions(ImageOptions):
    image: tuple[str, ...] = option(
        (), help="files of pictures in front of each of --prompts, or where it has <image>"
    )

    def record_of(self, location: str, prompt: Any, chat: "Chat") -> "TextRecord | None":
        """What is read of a prompt with its pictures; None where there are none."""
        if not self.image:
            return None
        from dschat_lora.data.readers import RawRow
        from dschat_lora.data.records import to_records
        from dschat_lora.data.rows import RowOptions, parse_row

        if isinstance(prompt, str) and "<image>" not in prompt:
            prompt = "<image>" * len(self.image) + prompt
        raw = RawRow(location, {"prompt": prompt, "images": list(self.image)})
        return to_records(parse_row(raw, RowOptions(media=chat.media)), chat, "prompts")[-1]
