"""Features of pictures in the place of their tokens, by the parts of a model that see."""

import copy
import sys
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from dschat_lora.addons.images.families import FAMILIES, WITH_TORCHVISION, Family
from dschat_lora.addons.images.reader import ImageReader
from dschat_lora.data.media import FIRST_ID
from dschat_lora.models.composite import TextModel, _Shell, whole_config

# Most that features of frozen towers take, which are kept for later passes.
KEPT_BYTES = 2**30
# Name of the state in the cache: by how much positions are ahead of the number of tokens.
_AHEAD = -1
# Features of a picture: (tokens, H), those of its embeddings first, then of early layers.
Features = tuple[Tensor, ...]


class PictureInputs:
    """Called before the language model: gives it features in place of runs of token ids.

    A forward pre-hook; equal for copies of the model, which share the tower.

    Attributes:
        tower: the composite model's own class below its head, without its language model.
    """

    def __init__(self, tower: PreTrainedModel, family: Family, reader: ImageReader) -> None:
        self.tower, self.family, self.reader = tower, family, reader
        self._tables: dict[torch.device, tuple[Tensor, Tensor, Tensor]] = {}
        self._kept: OrderedDict[int, Features] = OrderedDict()  # the last used is the last
        self._kept_bytes = 0

    def __deepcopy__(self, memo: object) -> "PictureInputs":
        return self

    def __call__(
        self, model: nn.Module, args: tuple[Any, ...], inputs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """The language model's inputs with pictures."""
        ids, cache = inputs.get("input_ids"), inputs.get("past_key_values")
        if ids is None:
            return None
        changed = dict(inputs)
        if cache is not None and ids.shape[1] == 1:
            if not self.family.by_grid:
                return None
            if (ahead := cache.get_recurrent_state(_AHEAD)) is not None:
                changed["position_ids"] = inputs["position_ids"] + ahead
                return args, changed
        seen = ids >= FIRST_ID
        if self.family.by_grid:
            changed["position_ids"] = self._positions(ids, inputs.get("position_ids"), cache)
        if not seen.any():
            return args, changed
        embedding: nn.Module = model.get_input_embeddings()  # type: ignore[operator]
        embeds = embedding(ids.masked_fill(seen, 0))
        features = [each.to(embeds.dtype) for each in self._features(ids[seen])]
        changed["inputs_embeds"] = embeds.masked_scatter(seen[..., None], features[0])
        changed["input_ids"] = None
        if features[1:]:
            changed |= {"visual_pos_masks": seen, "deepstack_visual_embeds": features[1:]}
        config: Any = model.config
        if getattr(config, "hidden_size_per_layer_input", 0):
            padded = ids.masked_fill(seen, config.pad_token_id)
            changed["per_layer_inputs"] = model.get_per_layer_inputs(padded, embeds)  # type: ignore[operator]
        if self.family.mutual == "all" or (
            self.family.mutual == "windows" and config.use_bidirectional_attention == "vision"
        ):
            in_windows = self.family.mutual == "windows"
            changed |= mutual_inputs(model, seen, changed, in_windows=in_windows)
        return args, changed

    def _table(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """First id, size and (rows, columns) of each picture known so far."""
        entries = self.reader.entries
        if device not in self._tables or len(self._tables[device][0]) < len(entries):
            numbers = ([e.first for e in entries], [e.size for e in entries])
            tensors = *map(torch.tensor, numbers), torch.tensor([e.grid for e in entries])
            first, sizes, grids = (each.to(device) for each in tensors)
            self._tables[device] = first, sizes, grids.view(-1, 2)
        return self._tables[device]

    def _features(self, ids: Tensor) -> list[Tensor]:
        """(M, H) of M ids, of the embeddings and of early layers."""
        self.tower.to(ids.device)
        first, _, _ = self._table(ids.device)
        numbers = torch.searchsorted(first, ids, right=True) - 1
        distinct, inverse = torch.unique(numbers, return_inverse=True)
        found = self._of_pictures(distinct.tolist())
        starts = torch.tensor([0, *(len(each[0]) for each in found)], device=ids.device).cumsum(0)
        places = starts[inverse] + ids - first[numbers]
        return [torch.cat(layer)[places] for layer in zip(*found, strict=True)]

    def _of_pictures(self, numbers: Sequence[int]) -> list[Features]:
        lacking = [number for number in numbers if number not in self._kept]
        made = dict(zip(lacking, self._see(lacking), strict=True)) if lacking else {}
        found = [made[number] if number in made else self._kept[number] for number in numbers]
        for number, features in zip(numbers, found, strict=True):
            self._kept[number] = features
            self._kept.move_to_end(number)
            self._kept_bytes += sum(x.nbytes for x in features) if number in made else 0
        while self._kept_bytes > KEPT_BYTES and len(self._kept) > len(numbers):
            _, dropped = self._kept.popitem(last=False)
            self._kept_bytes -= sum(x.nbytes for x in dropped)
        return found

    def _see(self, numbers: Sequence[int]) -> list[Features]:
        """Features of these entries."""
        found: dict[int, Features] = {}
        for alone in (True, False):
            own = [number for number in numbers if self.reader.entries[number].alone == alone]
            # One of several is cut as such, though the others are not here.
            for number, features in zip(own, self._of_kind(own, alone), strict=True):
                found[number] = features
        return [found[number] for number in numbers]

    def _of_kind(self, numbers: Sequence[int], alone: bool) -> list[Features]:
        """Features of entries that are, each, a sample's only picture, or are one of several."""
        if not numbers:
            return []
        twice = len(numbers) == 1 and not alone and self.reader.processor.counts_pictures
        entries = [self.reader.entries[number] for number in numbers] * (2 if twice else 1)
        pictures = [self.reader.picture(entry) for entry in entries]
        counts = [1] * len(pictures) if alone else [len(pictures)]
        device, dtype = self.tower.device, self.tower.dtype
        inputs = {
            name: value.to(device, dtype if value.is_floating_point() else None)
            for name, value in self.reader.processor.inputs(pictures, counts).items()
        }
        with torch.no_grad():
            output = self.tower.get_image_features(**inputs, return_dict=True)
        layers = [output.pooler_output, *(getattr(output, "deepstack_features", None) or ())]
        sizes = [entry.size for entry in entries]
        split = [torch.split(_flat(layer), sizes) for layer in layers]
        return list(zip(*split, strict=True))[: len(numbers)]

    def _positions(self, ids: Tensor, plain: Tensor | None, cache: Any) -> Tensor:
        """(3, B, T) positions by time, row and column of (B, T) ids.

        A picture's tokens are at one time, in their grid's places; text goes on behind its longer
        side. ``plain`` are positions from 0 within each sequence, by number of tokens.
        """
        if plain is None:
            plain = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        seen, (first, lengths, grids) = ids >= FIRST_ID, self._table(ids.device)
        numbers = (torch.searchsorted(first, ids.contiguous(), right=True) - 1).clamp(min=0)
        sizes = lengths[numbers]
        within = (ids - first[numbers]) * seen
        gain = (grids.amax(1)[numbers] - sizes) * (seen & (within == sizes - 1))
        # By how much positions are ahead of the number of tokens, within each sequence.
        total = gain.cumsum(1)
        order = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        begin = torch.where(plain == 0, order, 0).cummax(1).values
        ahead = total - (total - gain).gather(1, begin)
        text = plain + ahead - gain
        width = grids[:, 1].clamp(min=1)[numbers]
        steps = (torch.zeros_like(within), within // width, within % width)
        positions = [torch.where(seen, text - within + step, text) for step in steps]
        if cache is not None:
            cache.update_recurrent_state(ahead[:, -1:], _AHEAD)
        return torch.stack(positions)


def mutual_inputs(
    model: nn.Module, seen: Tensor, inputs: Mapping[str, Any], *, in_windows: bool
) -> dict[str, Any]:
    """Inputs by which the (B, T) tokens of a picture, ``seen``, see each other, later ones too.

    With ``in_windows`` in layers with a sliding window alone.
    """
    begins = seen & ~nn.functional.pad(seen, (1, 0))[:, :-1]
    groups = begins.cumsum(1) * seen  # pictures are never next to each other
    if (spans := inputs.get("spans")) is not None:
        return {"spans": replace(spans, mutual=-groups[0] if in_windows else groups[0])}
    mask, cache = inputs.get("attention_mask"), inputs.get("past_key_values")
    if not isinstance(mask, dict) and (mask is None or mask.ndim == 2):
        make = sys.modules[type(model).__module__].create_masks_for_vision_model
        made = make(
            config=model.config,
            inputs_embeds=inputs["inputs_embeds"],
            attention_mask=mask,
            past_key_values=cache,
            position_ids=inputs.get("position_ids"),
            block_sequence_ids=groups - 1,
        )
        return {"attention_mask": made}
    masks = mask if isinstance(mask, dict) else {"full_attention": mask}
    # Where each token's key is: in the column of its position, or its own.
    columns = torch.arange(seen.shape[1], device=seen.device).expand_as(seen)
    if hasattr(cache, "read_prompts"):
        columns = inputs["position_ids"]
    keys = groups.new_zeros(len(groups), next(iter(masks.values())).shape[-1])
    keys.scatter_reduce_(1, columns, groups, "amax")
    at = torch.arange(keys.shape[1], device=seen.device)
    shown = (groups[:, :, None] == keys[:, None]) & seen[:, :, None] & (at > columns[:, :, None])
    made = {
        kind: each
        if in_windows and kind == "full_attention"
        else each.masked_fill(shown[:, None], 0)
        for kind, each in masks.items()
    }
    return {"attention_mask": made if isinstance(mask, dict) else made["full_attention"]}


def attach(model: PreTrainedModel, reader: ImageReader) -> None:
    """Have a text model of a composite one take pictures by the composite model's own tower.

    The models of a reader share one tower, and its features.

    Raises:
        ValueError: if the tower cannot be loaded.
    """
    whole = whole_config(model.config)
    assert whole is not None, "a model that sees is composite"
    assert isinstance(model, TextModel)
    family = {**FAMILIES, **WITH_TORCHVISION}[whole.model_type]
    if reader.inputs is None:
        reader.inputs = PictureInputs(load_tower(model, reader.base), family, reader)
    model.base_model.register_forward_pre_hook(reader.inputs, with_kwargs=True)
    model.reads_whole = family.by_grid or bool(family.mutual)


def load_tower(model: TextModel, path: str) -> PreTrainedModel:
    """The composite model below its head without its language model, frozen."""
    whole = copy.deepcopy(whole_config(model.config))
    kind = model.place.shell.__mro__[2]  # transformers' class
    tower: Any = type(kind.__name__, (_Tower, kind), {"__module__": kind.__module__})
    loaded, report = tower.from_pretrained(
        path, config=whole, dtype=model.dtype, output_loading_info=True
    )
    if missing := sorted(report["missing_keys"]):
        raise ValueError(f"--model_name_or_path {path}: its files lack {missing[0]}")
    above = model.text_path.rpartition(".")[0]
    return loaded.requires_grad_(False).eval().get_submodule(above)


class _Tower(PreTrainedModel):  # type: ignore[misc]
    """Mixed into a composite class: its language model and head are not built."""

    _keys_to_ignore_on_load_unexpected = (".*",)
    _tied_weights_keys = None

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        for part in _Shell.text_parts(self):
            name = next(name for name, module in self.named_modules() if module is part)
            above, _, last = name.rpartition(".")
            delattr(self.get_submodule(above), last)
        self.all_tied_weights_keys: dict[str, str] = {}


def _flat(features: Tensor | Sequence[Tensor]) -> Tensor:
    """(tokens, H) of all pictures."""
    if isinstance(features, Tensor):
        return features.flatten(0, -2)
    return torch.cat([each.flatten(0, -2) for each in features])
