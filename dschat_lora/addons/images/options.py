"""Options of rows with pictures."""

from dataclasses import dataclass, replace

from dschat_lora.config.groups import ALL_BESIDE, LoraConfig, require_numbers
from dschat_lora.config.options import option


@dataclass(frozen=True)
class ImageOptions:
    section = "pictures"

    allow_image_urls: bool = option(
        False, help="read pictures of rows from the network where they are http(s) addresses"
    )
    max_image_pixels: int = option(
        50_000_000, help="most pixels of a picture, which is refused before it is decoded"
    )

    train_vision: bool = option(
        False, help="adapt the linear layers of the part that sees and of its projector, too"
    )
    vision_learning_rate: float | None = option(
        None,
        help="rate of adapters there, by --train_vision or --target_modules; default: as others",
    )

    def __post_init__(self) -> None:
        require_numbers(self, ">= 1", "max_image_pixels")
        require_numbers(self, "> 0", "vision_learning_rate")

    def choose_layers(self, lora: LoraConfig) -> LoraConfig:
        """The choice of layers with those of the part that sees, where they are to train.

        Raises:
            ValueError: if nothing is adapted.
        """
        if not self.train_vision:
            return lora
        if lora.lora_dim == 0:
            raise ValueError("--train_vision is for adapters: give --lora_dim")
        return replace(lora, target_modules=(*lora.target_modules, ALL_BESIDE))
