"""Options of rows with pictures."""

from dataclasses import dataclass

from dschat_lora.config.groups import require_numbers
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

    def __post_init__(self) -> None:
        require_numbers(self, ">= 1", "max_image_pixels")
