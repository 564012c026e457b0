"""Which kinds of layers of a model learn and which do not, read from its modules."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from torch import nn

from dschat_lora.lora.layers import LoraEmbedding, full_shape
from dschat_lora.lora.parallel import ParallelEmbedding
from dschat_lora.lora.trained import TrainedBias, TrainedModule
from dschat_lora.perf.architecture import (
    ExpertWeight,
    beside_text,
    expert_weights,
    field,
    is_router,
    layer_sizes,
    lists_experts,
    text_config,
)

LEAST_SHARE = 0.5  # of the weights of linear layers, below which a warning is given
_NUMBER = re.compile(r"^(.*?\.\d+)\.")


@dataclass(frozen=True)
class LayerGroup:
    """Layers of one kind of which all learn or none does."""

    kind: str  # the last part of their names, or a word such as experts
    learns: bool
    layers: int  # in how many blocks; 0 outside of them
    weights: int  # numbers of their matrices


@dataclass(frozen=True)
class Coverage:
    """What learns, and what does not, in the order of the model."""

    parts: tuple[LayerGroup, ...]

    @property
    def share(self) -> float:
        """Of the weights of linear layers in blocks, experts too, those that learn; 0 to 1."""
        inside = [part for part in self.parts if part.layers]
        total = sum(part.weights for part in inside)
        return sum(part.weights for part in inside if part.learns) / total if total else 1.0

    @property
    def words(self) -> str:
        """In one line for the log."""
        still = sorted((p for p in self.parts if not p.learns), key=lambda p: p.weights == 0)
        frozen = dict.fromkeys(map(self._name, still))
        if not frozen:
            return "every weight"
        kinds: dict[int, list[str]] = {}  # by the number of blocks that they learn in
        for part in sorted(self.parts, key=lambda part: part.layers == 0):
            if part.learns:
                kinds.setdefault(part.layers, []).append(part.kind)
        numbers = [f" of {n}" if n else "" for n in kinds]
        if numbers and numbers[0]:
            numbers[0] += " layer" if numbers[0] == " of 1" else " layers"
        said = [", ".join(k) + n for k, n in zip(kinds.values(), numbers, strict=True)]
        return f"{', '.join(said) or 'nothing'}; frozen: {', '.join(frozen)}"

    def _name(self, part: LayerGroup) -> str:
        """The kind; with its layers where others of the kind learn."""
        other = any(p.learns and p.kind == part.kind for p in self.parts)
        return f"{part.kind} of {part.layers}" if other and part.layers else part.kind

    @property
    def warning(self) -> str | None:
        """What is left out, where that is most of the linear layers; None elsewhere."""
        if self.share >= LEAST_SHARE:
            return None
        total = sum(part.weights for part in self.parts if part.layers)
        left = [p for p in self.parts if p.layers and p.weights > total / 200 and not p.learns]
        left.sort(key=lambda part: -part.weights)
        names = ", ".join(f"{self._name(part)} ({part.weights / total:.0%})" for part in left)
        return (
            f"adapters reach {self.share:.0%} of the weights of linear layers; not adapted: {names}"
        )

    def to_dict(self) -> dict[str, Any]:
        """As JSON, for ``run.json``."""
        named = [(part, {"layers": part.layers, "weights": part.weights}) for part in self.parts]
        return {
            "words": self.words,
            "linear_share": self.share,
            "learns": {part.kind: sizes for part, sizes in named if part.learns},
            "frozen": {part.kind: sizes for part, sizes in named if not part.learns},
        }


def coverage(model: nn.Module) -> Coverage:
    """What of ``model`` learns, by the last parts of the names of its layers.

    Experts, routers, embeddings and norms are called so. Of a model with several towers those
    that do not read text are named whole, and their weights are none of the linear layers' share.
    """
    width = field(text_config(model), "hidden_size", 0)
    head = model.get_output_embeddings()  # type: ignore[operator]
    totals: dict[tuple[str, bool], tuple[set[str], int]] = {}
    for unit in _Units(width, head, beside_text(model)).of(model, ""):
        block = _NUMBER.match(unit.name)
        blocks, total = totals.setdefault((unit.kind, unit.learns), (set(), 0))
        blocks = blocks | ({block[1]} if block else set())
        totals[unit.kind, unit.learns] = (blocks, total + unit.weights)
    groups = tuple(
        LayerGroup(kind, learns, len(blocks), weights)
        for (kind, learns), (blocks, weights) in totals.items()
    )
    # The matrices of experts are one group where all learn or none does.
    for prefix in dict.fromkeys(g.kind.partition(".")[0] for g in groups if "." in g.kind):
        of = [group for group in groups if group.kind.startswith(f"{prefix}.")]
        if len({(group.learns, group.layers) for group in of}) == 1:
            whole = replace(of[0], kind=prefix, weights=sum(group.weights for group in of))
            groups = tuple(whole if g is of[0] else g for g in groups if g is of[0] or g not in of)
    return Coverage(groups)


class _Unit(NamedTuple):
    """A layer, or a parameter outside of layers."""

    name: str
    kind: str
    learns: bool
    weights: int  # numbers of its matrix


@dataclass(frozen=True)
class _Units:
    """Finds the weights of a model, each with its kind and whether it learns."""

    width: int  # of the residual stream
    head: nn.Module | None
    beside: Mapping[str, nn.Module]  # what text does not run through

    def of(
        self, module: nn.Module, name: str, around: tuple[nn.Module, ...] = (), group: str = ""
    ) -> Iterator[_Unit]:
        """Within ``module``, which lies ``around`` others and, with ``group``, in experts."""
        last = name.rpartition(".")[2]
        if name in self.beside:
            if parameters := list(module.parameters()):
                yield _Unit(name, last, any(p.requires_grad for p in parameters), 0)
            return
        if isinstance(module, TrainedModule):
            for unit in self.of(module.base, name, around, group):
                yield unit._replace(learns=module.enabled)
            return
        kind = "router" if is_router(module, name, around) else group + last
        if layer := list(self._layer(module, name, kind)):
            yield from layer
            return
        fused = {each.name: each for each in expert_weights(module, self.width)}
        yield from self._parameters(module, name, fused)
        if lists_experts(module, name):
            group = "experts."
        elif "shared" in name and not group:
            group = f"{last}."
        for child, inner in module.named_children():
            if child not in fused:
                path = f"{name}.{child}" if name else child
                yield from self.of(inner, path, (*around, module), group)

    def _layer(self, module: nn.Module, name: str, kind: str) -> Iterator[_Unit]:
        """Of a module that is a layer itself."""
        is_norm = "Norm" in type(module).__name__ or isinstance(module, TrainedBias)
        if isinstance(module, nn.Embedding | ParallelEmbedding | LoraEmbedding):
            yield _Unit(name, "embeddings", _learns(module), 0)
        elif (sizes := layer_sizes(module)) is not None:
            weights = 0 if module is self.head else sizes[0] * sizes[1]
            yield _Unit(name, kind, _learns(module), weights)
            if getattr(module, "trained_bias", None) is not None:
                yield _Unit(name, "biases", True, 0)
        elif is_norm and (own := list(module.parameters(recurse=False))):
            yield _Unit(name, "norms", any(p.requires_grad for p in own), 0)

    @staticmethod
    def _parameters(
        module: nn.Module, name: str, fused: Mapping[str, ExpertWeight]
    ) -> Iterator[_Unit]:
        """Of fused experts, and what a module that is no layer has of its own."""
        for part, each in fused.items():
            learns = each.weight.requires_grad if each.adapter is None else _learns(each.adapter)
            count = full_shape(each.weight).numel()
            yield _Unit(f"{name}.{part}", f"experts.{part}", learns, count)
        for part, parameter in module.named_parameters(recurse=False):
            if part.removesuffix("_bias") not in fused:
                kind = name.rpartition(".")[2] if part in ("weight", "bias") else part
                yield _Unit(f"{name}.{part}", kind, parameter.requires_grad, 0)


def _learns(layer: nn.Module) -> bool:
    """Whether the matrix of a layer changes, by factors or itself."""
    factor = getattr(layer, "lora_A", getattr(layer, "lora_embedding_A", None))
    adapted = factor is not None and layer.enabled and factor.requires_grad
    return bool(adapted or layer.weight.requires_grad)
