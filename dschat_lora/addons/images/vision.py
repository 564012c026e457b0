"""Features of pictures in the place of their tokens, by the parts of a model that see."""

import copy
import sys
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from PIL.Image import Image
from PIL.Image import new as new_image
from torch import Tensor, nn
from transformers import Cache, PreTrainedModel

from dschat_lora.addons.images.beside import load_rest
from dschat_lora.addons.images.entries import Entry
from dschat_lora.addons.images.families import KNOWN, Family
from dschat_lora.addons.images.options import ImageOptions
from dschat_lora.data.media import FIRST_ID
from dschat_lora.engine.zero import gathered
from dschat_lora.models.backbone import cache_argument
from dschat_lora.models.composite import TextModel, whole_config
from dschat_lora.models.fingerprint import base_fingerprint

if TYPE_CHECKING:
    from dschat_lora.addons.images.processors import PictureProcessor

# Most that features of frozen towers take, which are kept for later passes.
KEPT_BYTES = 2**30
BLANK = (64, 64)  # width and height of a picture that counts for nothing
# Name of the state in the cache: by how much positions are ahead of the number of tokens.
_AHEAD = -1
# Features of a picture: (tokens, H), those of its embeddings first, then of early layers.
Features = tuple[Tensor, ...]


class Table(NamedTuple):
    """Pictures by their ids: the first one, and sizes and (rows, columns) of their tokens."""

    entries: Sequence[Entry]
    first: Tensor
    sizes: Tensor
    grids: Tensor


class Pictures(Protocol):
    """What reads pictures, for the tower: entries, and what the tower takes of each."""

    options: ImageOptions
    towers: dict[str, "PictureInputs"]  # by base

    @property
    def entries(self) -> Sequence[Entry]:
        """Those that are known, in the order of their ids."""

    @property
    def processor(self) -> "PictureProcessor":
        """The model's own."""

    def picture(self, entry: Entry) -> Image:
        """The picture of an entry, decoded."""


class PictureInputs:
    """Called before the language model: gives it features in place of runs of token ids.

    A forward pre-hook; equal for copies of the model, which share the tower.

    Attributes:
        model: whose modules the tower's are, where adapters are in them; else the tower is frozen.
    """

    def __init__(
        self,
        load: Callable[[], nn.Module],
        family: Family,
        reader: Pictures,
        model: TextModel | None = None,
    ) -> None:
        self._load, self.family, self.reader, self.model = load, family, reader, model
        self.device, self.dtype = torch.device("cpu"), torch.float32
        # digest and bytes of the parameters of a frozen tower
        self.frozen: tuple[str, int] | None = None
        # By device, with the last entry, of which there is none where nothing is known.
        self._tables: dict[torch.device, tuple[Entry | None, Table]] = {}
        # By the first id; the last used is the last.
        self._kept: OrderedDict[int, Features] = OrderedDict()
        self._kept_bytes = 0

    @cached_property
    def tower(self) -> nn.Module:
        """The composite model's own class below its head, without its language model.

        It is loaded when it is first used.
        """
        with torch.inference_mode(False):
            return self._load()

    def __deepcopy__(self, memo: dict[int, Any]) -> "PictureInputs":
        if self.model is None:
            return self
        tower, model = copy.deepcopy(self.tower, memo), copy.deepcopy(self.model, memo)
        return PictureInputs(lambda: tower, self.family, self.reader, model)

    def __call__(
        self, model: nn.Module, positional: tuple[Any, ...], inputs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """The language model's inputs with pictures."""
        ids, cache = inputs.get("input_ids"), inputs.get(str(cache_argument(model)))
        if ids is None:
            return None
        changed = dict(inputs)
        if cache is not None and (ids.shape[1] == 1 or hasattr(cache, "read_tokens")):
            if not self.family.by_grid and ids.shape[1] == 1:
                return None
            if (ahead := _ahead_of(cache)) is not None:
                changed["position_ids"] = inputs["position_ids"] + ahead
                return positional, changed
        seen, table = ids >= FIRST_ID, self._table(ids.device)
        if self.family.by_grid:
            plain = inputs.get("position_ids")
            changed["position_ids"] = self._positions(ids, plain, cache, table)
        # Without a picture, too: at ZeRO 3 ranks must call the same modules in the same order.
        has_pictures = bool(seen.any())
        embeds = model.get_input_embeddings()(ids.masked_fill(seen, 0))  # type: ignore[operator]
        changed |= {"input_ids": None, "inputs_embeds": embeds}
        if has_pictures or self.model is not None:
            changed |= self._embedded(embeds, ids, seen if has_pictures else None, table)
        config: Any = model.config
        if getattr(config, "hidden_size_per_layer_input", 0):
            padded = ids.masked_fill(seen, config.pad_token_id)
            changed["per_layer_inputs"] = model.get_per_layer_inputs(padded, embeds)  # type: ignore[operator]
        in_windows = self.family.mutual == "windows"
        mutual = not in_windows or config.use_bidirectional_attention == "vision"
        if has_pictures and self.family.mutual and mutual:
            changed |= mutual_inputs(model, seen, changed, in_windows=in_windows)
        return positional, changed

    def _embedded(
        self, embeds: Tensor, ids: Tensor, seen: Tensor | None, table: Table
    ) -> dict[str, Any]:
        """Inputs with features in place of what is ``seen`` of (B, T, H) embeddings, if any is."""
        if self.model is None and embeds.device != self.device:
            self.tower.to(embeds.device)
        self.device, self.dtype = embeds.device, embeds.dtype
        if seen is None:
            # Of weight 0, so that every micro-batch has gradients of the same parameters.
            blank = [_flat(layer) for layer in self._run([new_image("RGB", BLANK)], [1])]
            return {"inputs_embeds": embeds + sum(0.0 * layer.sum() for layer in blank)}
        first, *early = [each.to(embeds.dtype) for each in self._features(ids[seen], table)]
        inputs: dict[str, Any] = {"inputs_embeds": embeds.masked_scatter(seen[..., None], first)}
        if early:
            inputs |= {"visual_pos_masks": seen, "deepstack_visual_embeds": early}
        return inputs

    def _table(self, device: torch.device) -> Table:
        """The pictures that are known."""
        entries = self.reader.entries  # in the order of their ids, which only grow
        last = entries[-1] if entries else None
        kept, table = self._tables.get(device, (None, None))
        if table is None or len(table.first) != len(entries) or kept is not last:
            numbers = ([e.first for e in entries], [e.size for e in entries])
            tensors = *map(torch.tensor, numbers), torch.tensor([e.grid for e in entries])
            first, sizes, grids = (each.to(device) for each in tensors)
            table = Table((), first, sizes, grids.view(-1, 2))
            # Without the entries, of which passing ones are to be forgotten.
            self._tables[device] = last, table
        return table._replace(entries=entries)

    def _features(self, ids: Tensor, table: Table) -> list[Tensor]:
        """(M, H) of M ids, of the embeddings and of early layers."""
        numbers = torch.searchsorted(table.first, ids, right=True) - 1
        distinct, inverse = torch.unique(numbers, return_inverse=True)
        features = self._of_pictures([table.entries[number] for number in distinct.tolist()])
        sizes = [len(each[0]) for each in features]
        starts = torch.tensor([0, *sizes], device=ids.device).cumsum(0)
        places = starts[inverse] + ids - table.first[numbers]
        return [torch.cat(layer)[places] for layer in zip(*features, strict=True)]

    def _of_pictures(self, entries: Sequence[Entry]) -> list[Features]:
        if self.model is not None:
            return self._see(entries)  # its values change
        lacking = [entry for entry in entries if entry.first not in self._kept]
        with torch.no_grad():
            made = self._see(lacking) if lacking else []
        for entry, features in zip(lacking, made, strict=True):
            # Copies, for parts of one tensor would hold it whole.
            self._kept[entry.first] = tuple(layer.clone() for layer in features)
            self._kept_bytes += sum(x.nbytes for x in features)
        for entry in entries:
            self._kept.move_to_end(entry.first)
        kept = [self._kept[entry.first] for entry in entries]
        while self._kept_bytes > KEPT_BYTES and len(self._kept) > len(entries):
            _, dropped = self._kept.popitem(last=False)
            self._kept_bytes -= sum(x.nbytes for x in dropped)
        return kept

    def _see(self, entries: Sequence[Entry]) -> list[Features]:
        """Features of these entries; the tower is run once."""
        counts = self.reader.processor.counts_pictures
        # One of several is cut as such, though the others are not here.
        alone = [entry for entry in entries if entry.alone or not counts]
        others = [entry for entry in entries if counts and not entry.alone]
        order = [*alone, *others, *(others if len(others) == 1 else ())]
        layers = self._run(
            [self.reader.picture(entry) for entry in order],
            [1] * len(alone) + ([len(order) - len(alone)] if others else []),
        )
        split = [torch.split(_flat(layer), [entry.size for entry in order]) for layer in layers]
        made = zip(order, zip(*split, strict=True), strict=True)
        by_id = {entry.first: features for entry, features in made}
        return [by_id[entry.first] for entry in entries]

    def _run(self, pictures: Sequence[Image], counts: Sequence[int]) -> list[Any]:
        """What the tower makes of pictures, ``counts`` of each sample: features of each layer."""
        tower = self.tower
        if self.model is not None:  # in which adapters were put in place of parts
            for path in self.model.rest:
                above, _, last = path.rpartition(".")
                setattr(tower, last, getattr(self.model.get_submodule(above), last))
        inputs = {
            name: value.to(self.device, self.dtype if value.is_floating_point() else None)
            for name, value in self.reader.processor.inputs(pictures, counts).items()
        }
        # At ZeRO 3, what is the tower's own and not of a module that is called.
        with gathered([p for p in tower.parameters(recurse=False) if not p.numel()]):
            output = tower.get_image_features(**inputs, return_dict=True)  # type: ignore[operator]
        return [output.pooler_output, *(getattr(output, "deepstack_features", None) or ())]

    def _positions(self, ids: Tensor, plain: Tensor | None, cache: Any, table: Table) -> Tensor:
        """(3, B, T) positions by time, row and column of (B, T) ids.

        A picture's tokens are at one time, in their grid's places; text goes on behind its longer
        side. ``plain`` are positions from 0 within each sequence, by number of tokens.
        """
        if plain is None:
            plain = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        if not table.entries:
            if cache is not None:
                _keep_ahead(cache, torch.zeros_like(ids[:, -1:]))
            return plain.expand(3, *ids.shape)
        seen, (_, first, lengths, grids) = ids >= FIRST_ID, table
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
            _keep_ahead(cache, ahead[:, -1:])
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
    named = str(cache_argument(model))
    mask, cache = inputs.get("attention_mask"), inputs.get(named)
    if not isinstance(mask, dict) and (mask is None or mask.ndim == 2):
        make = sys.modules[type(model).__module__].create_masks_for_vision_model
        made = make(
            config=model.config,
            inputs_embeds=inputs["inputs_embeds"],
            attention_mask=mask,
            position_ids=inputs.get("position_ids"),
            block_sequence_ids=groups - 1,
            **{named: cache},
        )
        return {"attention_mask": made}
    masks = mask if isinstance(mask, dict) else {"full_attention": mask}
    # Where each token's key is: in the column of its position, or its own.
    columns = torch.arange(seen.shape[1], device=seen.device).expand_as(seen)
    if hasattr(cache, "read_prompts"):
        columns = inputs["position_ids"]
    width = next(each.shape[-1] for each in masks.values() if each is not None)
    keys = groups.new_zeros(len(groups), width)
    keys.scatter_reduce_(1, columns, groups, "amax")
    at = torch.arange(keys.shape[1], device=seen.device)
    shown = (groups[:, :, None] == keys[:, None]) & seen[:, :, None] & (at > columns[:, :, None])
    made = {
        kind: each
        if each is None or (in_windows and kind == "full_attention")
        else each.masked_fill(shown[:, None], 0)
        for kind, each in masks.items()
    }
    return {"attention_mask": made if isinstance(mask, dict) else made["full_attention"]}


def attach(model: PreTrainedModel, reader: Pictures, base: str) -> None:
    """Have a text model of a composite one take pictures by the composite model's own tower.

    A frozen one is shared, with its features, by all models on ``base``. It is loaded here where
    pictures are known, else when the first one comes. A tower with adapters is among the model's
    own modules.

    Raises:
        ValueError: if the tower cannot be loaded, a reward model's type has none that sees, or a
            tower without adapters is to have a rate.
    """
    whole = whole_config(model.config)
    assert whole is not None, "a model that sees is composite"
    assert isinstance(model, TextModel)
    if model.place.head is None:
        raise ValueError(
            f"{base}: transformers has no sequence classifier of {whole.model_type}, so its "
            "reward models and critics only support rows without pictures; those of gemma3 and "
            "qwen3_5 support pictures"
        )
    family = KNOWN[whole.model_type]
    if family.mutual and model.config._attn_implementation == "flex_attention":
        raise ValueError(
            "--attn_implementation flex_attention: the tokens of a picture attend to later ones "
            f"in {whole.model_type} models, which only sdpa and eager support"
        )
    hooks = model.base_model._forward_pre_hooks.values()
    if any(isinstance(hook, PictureInputs) and hook.reader is reader for hook in hooks):
        return  # it takes them already
    rate = getattr(reader.options, "vision_learning_rate", None)  # of training alone
    model.rest_rate = rate
    above, inputs = model.text_path.rpartition(".")[0], reader.towers.get(base)
    if model.rest:
        tower = load_rest(model, base, meta=True).get_submodule(above)
        inputs = PictureInputs(lambda: tower, family, reader, model)
    elif (
        rate is not None
        and model.can_generate()
        and any(p.requires_grad for p in model.parameters())
    ):
        raise ValueError(
            f"--vision_learning_rate {rate:g} is for adapters of the vision encoder, which has "
            "none: give --train_vision or name its layers in --target_modules"
        )
    elif inputs is None:

        def load() -> nn.Module:
            return load_rest(model, base, meta=False).get_submodule(above)

        inputs = reader.towers[base] = PictureInputs(load, family, reader)
    if not model.rest and reader.entries:
        inputs.frozen = inputs.frozen or _frozen(inputs.tower)
        model.frozen_rest = inputs.frozen
    model.base_model.register_forward_pre_hook(inputs, with_kwargs=True)
    model.reads_whole = FIRST_ID if family.by_grid or family.mutual else None


def _frozen(tower: nn.Module) -> tuple[str, int]:
    size = sum(p.numel() * p.element_size() for p in tower.parameters())
    return base_fingerprint(tower), size


def _flat(features: Tensor | Sequence[Tensor]) -> Tensor:
    """(tokens, H) of all pictures."""
    if isinstance(features, Tensor):
        return features.flatten(0, -2)
    return torch.cat([each.flatten(0, -2) for each in features])


def _ahead_of(cache: Any) -> Tensor | None:
    """What :func:`_keep_ahead` has kept."""
    if isinstance(cache, Cache):
        return vars(cache).get("positions_ahead")
    ahead: Tensor | None = cache.get_recurrent_state(_AHEAD)
    return ahead


def _keep_ahead(cache: Any, ahead: Tensor) -> None:
    """Keep (B, 1) of each row in a cache of ours, whose rows move, or of transformers' own."""
    if isinstance(cache, Cache):
        vars(cache)["positions_ahead"] = ahead
    else:
        cache.update_recurrent_state(ahead, _AHEAD)
