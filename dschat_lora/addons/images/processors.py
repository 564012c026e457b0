"""The processor of a model that sees: text and pictures to tokens and tensors, without torchvision.

Transformers' own loader takes a processor's video part too, which needs torchvision for most
types. Here the same processor classes are assembled of what pictures need.
"""

import copy
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate, takewhile
from typing import Any

import torch
from jinja2 import TemplateError
from PIL.Image import Image
from PIL.Image import new as new_image
from torch import Tensor
from transformers import AutoConfig, AutoImageProcessor, PreTrainedConfig, PreTrainedTokenizerBase
from transformers.image_processing_backends import PilBackend
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING
from transformers.processing_utils import ProcessorMixin
from transformers.utils import is_torchvision_available

from dschat_lora.addons.images.families import FAMILIES, KNOWN, WITH_TORCHVISION

# What only counts tokens, and no model takes.
_COUNTS = {"rows", "cols", "num_patches"}
# What a processor's step of pictures takes beside options of pictures: lfm2_vl's.
_OWN_OPTIONS = {"use_image_special_tokens"}
# Sizes of pictures of a sample whose tokens are kept: they depend on nothing else.
_REMEMBERED = 1000


class PictureProcessor:
    """What a model's own processor does to text with pictures and to pictures.

    Attributes:
        backend: "pil" or "torchvision", what makes tensors of pictures.
        placeholder: what the chat template writes for a picture in a message of the user, without
            white space around it; what ``<image>`` in plain text stands for.
        image_token_id: the token that features take the place of.
        chat_template: the first that writes pictures, of the tokenizer's and the processor's own.
    """

    backend: str
    placeholder: str
    image_token_id: int
    chat_template: str | dict[str, str] | None

    def __init__(self, path: str, tokenizer: PreTrainedTokenizerBase) -> None:
        """Load the processor of the model at ``path``, over ``tokenizer``, which stays as it is.

        Raises:
            ValueError: if the type is none whose pictures are trained here, or it needs torchvision
                and that is not installed, or the files of the processor are missing or wrong.
        """
        self._made_of = (path, tokenizer)
        config = AutoConfig.from_pretrained(path)
        _check_type(path, config.model_type)
        try:
            images = AutoImageProcessor.from_pretrained(path, backend="pil")
            # The class may add tokens, which are none of the run's tokenizer.
            self._processor = _assemble(
                PROCESSOR_MAPPING[type(config)],
                path,
                {"image_processor": images, "tokenizer": copy.deepcopy(tokenizer)},
            )
        except (OSError, ValueError, TypeError, AttributeError, ImportError) as error:
            reason = str(error).strip().partition("\n")[0]
            raise ValueError(f"{path}: its processor does not load: {reason}") from error
        self.backend = "pil" if isinstance(images, PilBackend) else "torchvision"
        self.image_token_id = config.image_token_id
        if self.image_token_id >= len(tokenizer):
            raise ValueError(
                f"{path}: config.json says that token {self.image_token_id} is the image token, "
                f"but the tokenizer has {len(tokenizer)} tokens"
            )
        self._image_token = tokenizer.convert_ids_to_tokens(self.image_token_id)
        templates = [tokenizer.chat_template, self._processor.chat_template]
        written = [(self._written(tokenizer, each), each) for each in templates if each]
        chosen = next((pair for pair in written if pair[0]), None)
        self.placeholder, self.chat_template = chosen or (
            self._marked(config),
            tokenizer.chat_template,
        )
        self._replacements: dict[tuple[tuple[int, int], ...], list[str]] = {}

    @property
    def token(self) -> str:
        """What stands for a picture in a text: all of the placeholder that is replaced."""
        token: str = self._processor.image_token
        return token

    @property
    def image_token(self) -> str:
        """The text of ``image_token_id``."""
        return self._image_token

    @property
    def counts_pictures(self) -> bool:
        """Whether a sample's only picture is cut otherwise than one of several."""
        return "LlavaOnevision" in type(self._processor).__name__

    def expansion(self, size: tuple[int, int], alone: bool) -> tuple[str, tuple[int, int]]:
        """The text in the place of a picture's token, and the grid of its image tokens.

        ``size`` is (width, height) in pixels. Rows and columns are 0 for types without a grid.
        """
        blank = new_image("RGB", size)
        pictures = [blank] if alone or not self.counts_pictures else [blank, blank]
        text = self.expand(self.token, pictures[:1]) if len(pictures) == 1 else ""
        if len(pictures) == 2:
            text = self.expand(f"{self.token}\0{self.token}", pictures).partition("\0")[0]
        grid = self.inputs([blank]).get("image_grid_thw")
        if grid is None:
            return text, (0, 0)
        _, height, width = (grid[0] // torch.tensor([1, *[self._merge] * 2])).tolist()
        return text, (height, width)

    @property
    def _merge(self) -> int:
        return int(self._processor.image_processor.merge_size)

    def __reduce__(self) -> tuple[type["PictureProcessor"], tuple[str, PreTrainedTokenizerBase]]:
        """It is loaded anew where it is unpickled."""
        return PictureProcessor, self._made_of

    def expand(self, text: str, pictures: Sequence[Image]) -> str:
        """``text`` with the tokens of each picture in place of its placeholder.

        Args:
            text: of one sample, with a placeholder for each picture.
            pictures: the sample's, in order.

        Raises:
            ValueError: if there are more or fewer placeholders than pictures, or the token that
                stands for features is in the text.
        """
        token = self.token
        if text.count(token) != len(pictures):
            raise ValueError(
                f"the text has {text.count(token)} times {token!r} for {len(pictures)} pictures"
            )
        if token != self._image_token and self._image_token in text:
            raise ValueError(f"the text has {self._image_token!r}, which stands for features")
        if not pictures:
            return text
        sizes = tuple(picture.size for picture in pictures)
        if len(self._replacements) > _REMEMBERED:
            self._replacements.clear()
        if sizes not in self._replacements:
            written = self._process([pictures])[1]
            if not all(self._image_token in each for each in written):
                raise ValueError(
                    f"the processor writes {token!r} for a picture, but the image token of "
                    f"config.json is {self._image_token!r}"
                )
            self._replacements[sizes] = written
        # Not by str.replace, for a replacement may hold the token again.
        parts = text.split(token)
        between = [*self._replacements[sizes], ""]
        return "".join(part + by for part, by in zip(parts, between, strict=True))

    def inputs(
        self, pictures: Sequence[Image], counts: Sequence[int] | None = None
    ) -> dict[str, Tensor]:
        """What the model is called with beside tokens, as its ``get_image_features`` takes it.

        Args:
            pictures: of the samples, one sample's after another's.
            counts: how many each sample has, which matters where a picture alone is cut into
                more tiles than one of several (llava_onevision); by default all are of one sample.

        Returns:
            ``pixel_values`` and what belongs to it for the type: ``image_sizes``,
            ``image_grid_thw``, ``image_position_ids``, ``pixel_attention_mask``,
            ``batch_num_images``. Empty without pictures.
        """
        if not pictures:
            return {}
        ends = list(accumulate(counts or [len(pictures)]))
        rows = [
            pictures[start:end] for start, end in zip([0, *ends], ends, strict=False) if end > start
        ]
        processed, _ = self._process(rows)
        unused = {*_COUNTS, *self._processor.unused_input_names}
        return {
            name: torch.as_tensor(value) for name, value in processed.items() if name not in unused
        }

    def described(self) -> dict[str, Any]:
        """Everything of the processor that its output depends on, but for versions of packages."""
        fields = json.loads(json.dumps(self._processor.to_dict(), default=str, sort_keys=True))
        return {
            **fields,
            "backend": self.backend,
            "placeholder": self.placeholder,
            "image_token_id": self.image_token_id,
        }

    def _process(self, rows: Sequence[Sequence[Image]]) -> tuple[dict[str, Any], list[str]]:
        """What the image processor makes of rows of pictures, and the text of each picture."""
        options = self._processor._merge_kwargs(
            tokenizer_init_kwargs=self._processor.tokenizer.init_kwargs, return_tensors="pt"
        )
        own = {name: options[name] for name in _OWN_OPTIONS & options.keys()}
        return self._processor._process_images(
            [list(row) for row in rows],
            **{**options["images_kwargs"], "do_convert_rgb": True},  # lfm2_vl does not by itself
            **own,
        )

    def _written(self, tokenizer: PreTrainedTokenizerBase, template: Any) -> str:
        """What ``template`` writes for a picture, without white space around; "" if nothing."""
        text = {"type": "text", "text": "x"}
        try:
            without, written = (
                tokenizer.apply_chat_template(
                    [{"role": "user", "content": parts}], chat_template=template, tokenize=False
                )
                for parts in ([text], [{"type": "image"}, text])
            )
        except (TemplateError, TypeError, ValueError):
            return ""  # a template for text alone
        # What is between the beginning and the end that both have.
        begin = _common(without, written)
        end = len(written) - _common(without[begin:][::-1], written[begin:][::-1])
        placeholder: str = written[begin:end].strip()
        return placeholder if self._processor.image_token in placeholder else ""

    def _marked(self, config: PreTrainedConfig) -> str:
        """The image token, between those that positions of some types need between pictures."""
        if not hasattr(config, "vision_start_token_id"):
            return self.token
        ids = [config.vision_start_token_id, config.vision_end_token_id]
        begin, end = self._processor.tokenizer.convert_ids_to_tokens(ids)
        return f"{begin}{self.token}{end}"


def _common(one: str, other: str) -> int:
    """How many characters both begin with."""
    pairs = zip(one, other, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def _check_type(path: str, kind: str) -> None:
    if kind not in KNOWN:
        raise ValueError(
            f"{path}: pictures of a model of type {kind} cannot be trained; those of "
            f"{', '.join(FAMILIES)} can, and with torchvision {', '.join(WITH_TORCHVISION)}"
        )
    if kind in WITH_TORCHVISION and not is_torchvision_available():
        raise ValueError(
            f"{path}: pictures of a model of type {kind} need torchvision, which is not installed"
        )


def _assemble(base: type[ProcessorMixin], path: str, parts: dict[str, Any]) -> ProcessorMixin:
    """A processor of ``base`` with ``parts`` alone: None in place of video and sound."""

    class Assembled(base):  # type: ignore[misc]
        def check_argument_for_proper_class(self, name: str, argument: object) -> None:
            if argument is not None:
                return super().check_argument_for_proper_class(name, argument)

    Assembled.__name__ = base.__name__
    fields, rest = base.get_processor_dict(path)
    with _without_num2words(base):
        return Assembled.from_args_and_dict(
            [parts.get(name) for name in base.get_attributes()], fields, **rest
        )


@contextmanager
def _without_num2words(base: type[ProcessorMixin]) -> Iterator[None]:
    """Within, smolvlm's processor can be made though num2words, for videos, is not installed."""
    module: Any = sys.modules[base.__module__]
    lacking = vars(module).get("num2words", str) is None
    if lacking:
        module.num2words = str
    try:
        yield
    finally:
        if lacking:
            module.num2words = None
