"""Options of rows with pictures."""

from dataclasses import dataclass
from typing import Any

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


@dataclass(frozen=True)
class PromptImageOptions(ImageOptions):
    image: tuple[str, ...] = option(
        (), help="files of pictures in front of each of --prompts, or where it has <image>"
    )

    def beside_prompt(self, values: dict[str, Any]) -> dict[str, Any]:
        """A row of a prompt with its pictures."""
        prompt = values["prompt"]
        if not self.image:
            return values
        if isinstance(prompt, str) and "<image>" not in prompt:
            prompt = "<image>" * len(self.image) + prompt
        return {**values, "prompt": prompt, "images": list(self.image)}
