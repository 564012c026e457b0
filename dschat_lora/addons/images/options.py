"""Options of rows with pictures."""

from dataclasses import dataclass, replace
from typing import Any

from dschat_lora.config.groups import require_numbers
from dschat_lora.config.options import option
from dschat_lora.config.values import ALL_BESIDE


@dataclass(frozen=True)
class ImageOptions:
    section = "pictures"

    allow_image_urls: bool = option(False, help="download images whose rows give http(s) addresses")
    max_image_pixels: int = option(
        50_000_000,
        help="maximum number of pixels of an image; larger ones are rejected before decoding",
    )

    def __post_init__(self) -> None:
        require_numbers(self, ">= 1", "max_image_pixels")


@dataclass(frozen=True)
class TrainingImageOptions(ImageOptions):
    train_vision: bool = option(
        False, help="also adapt the linear layers of the vision encoder and its projector"
    )
    vision_learning_rate: float | None = option(
        None,
        help="learning rate of the vision adapters (of --train_vision or --target_modules); "
        "default: that of the others",
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
        (), help="image files placed before each of --prompts, or at its <image> placeholders"
    )

    def record_of(self, location: str, prompt: Any, chat: Any) -> Any:
        """What is read of a prompt with its pictures; None where there are none.

        Raises:
            ValueError: if the model takes text alone, or a picture cannot be read.
        """
        if self.image and chat.media is None:
            raise ValueError("--image needs a vision model, but this one takes text only")
        return chat.media.record_of(location, prompt, self.image, chat) if self.image else None
