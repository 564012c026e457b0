"""Which modules of a model are adapted, and how to name them for PEFT."""

import difflib
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any

import regex
from torch import nn

from dschat_lora.config.groups import LoraConfig
from dschat_lora.config.values import ALL_BESIDE
from dschat_lora.lora.experts import expert_weights, fused_experts
from dschat_lora.lora.groups import Groups, groups_of_parts
from dschat_lora.lora.layers import full_shape, is_conv1d, is_transposed
from dschat_lora.lora.names import is_ending, is_inside, last_name
from dschat_lora.lora.nf4 import NF4Linear
from dschat_lora.lora.parallel import ParallelEmbedding, ParallelLinear

PATTERN_SECONDS = 1.0
ALL_LINEAR = "all-linear"
_REGEX_CHARACTERS = frozenset("*?+()[]{}|\\^$")
# By model type, the layer whose outputs are all of q, then all of k, then all of v. Others pack
# them head by head (GPT-NeoX, BLOOM, Falcon).
_PACKED = {"gpt2": "c_attn", "mpt": "Wqkv", "openai-gpt": "c_attn", "phi3": "qkv_proj"}
# What the weights of one expert are called, by the fused weight of all, and that itself.
NAMES_OF_EXPERTS = frozenset(
    ("gate", "gate_proj", "up_proj", "gate_up_proj", "down_proj", "w1", "w2", "w3")
)
_FUSED = dict.fromkeys(("gate_proj", "up_proj", "w1", "w3"), "gate_up_proj") | {"w2": "down_proj"}
# Types with Mamba blocks, whose kernel on a GPU reads the weight of this layer, not its output.
# PEFT refuses it in five of them.
_FUSED_MAMBA = (
    *("bamba", "falcon_h1", "falcon_mamba", "granitemoehybrid", "mamba", "mamba2", "nemotron_h"),
    "zamba2",
)
_BYPASSED = "out_proj"
# Subclasses of a linear layer whose own forward is that of one.
_LINEAR_CLASSES = ("FalconLinear",)


def choose_targets(model: nn.Module, config: LoraConfig) -> list[str]:
    """Names of the modules that get LoRA factors, in model order; of experts, fused parameters.

    ``--lora_module_name`` takes every linear layer whose name contains it. Otherwise
    ``--target_modules`` is ``all-linear`` (every linear layer inside a ``ModuleList``, that is
    of the transformer blocks, but for routers of experts and ``out_proj`` of Mamba blocks; an
    output head or OPT-350m's ``project_in`` and ``project_out`` stand outside), a regular
    expression matched against whole names, or names each of which takes the linear layers and
    embeddings equal to it or ending in ``.name``. Modules of ``--modules_to_save`` are never taken:
    they train in full, nor are experts with ``--expert_lora_dim 0``.

    Raises:
        ValueError: if a rule matches nothing (the message lists the candidates), or if rules
            contradict each other.
    """
    saved = choose_saved(model, config.modules_to_save)
    experts = expert_names(model)
    every = adaptable_parts(model).items()
    candidates = {name: module for name, module in every if not is_inside(name, saved)}
    if config.expert_lora_dim == 0:
        _check_not_frozen(model, config, candidates, experts)
        candidates = {name: m for name, m in candidates.items() if name not in experts}
    chosen = _chosen(model, config, candidates)
    return [name for name in candidates if name in chosen]


def adaptable_parts(model: nn.Module) -> dict[str, nn.Module]:
    """What factors can be added to, in model order: linear layers, embeddings, fused experts."""
    fused, parts = expert_weights(model), dict[str, nn.Module]()
    for name, module in model.named_modules():
        if _is_adaptable(module):
            parts[name] = module
        parts |= {own: part for own, (part, _) in fused.items() if part is module}
    return parts


def _check_not_frozen(
    model: nn.Module, config: LoraConfig, candidates: Mapping[str, nn.Module], experts: set[str]
) -> None:
    """Refuse a name of experts alone where ``--expert_lora_dim 0`` leaves them frozen."""
    part = config.lora_module_name
    for target in _entries(config):
        named = _chosen(model, replace(config, target_modules=(target,)), candidates)
        if named and named <= experts:
            option = (
                f"--target_modules {target!r}" if part is None else f"--lora_module_name {part!r}"
            )
            raise ValueError(
                f"{option} matches experts, but --expert_lora_dim 0 leaves them frozen; drop one"
            )


def _meant(hits: set[str], rule: str, model: nn.Module) -> set[str]:
    """Of what a rule matches in a composite model what is in its text model.

    All of it where the rule names another part, or nothing of it is there.
    """
    rest: tuple[str, ...] = getattr(model, "rest", ())
    own = {name for name in hits if not is_inside(name, rest)}
    return hits if not own or any(last_name(part) in rule for part in rest) else own


def _entries(config: LoraConfig) -> tuple[str, ...]:
    """The rules of ``--target_modules``; names may be joined by commas."""
    targets = config.target_modules
    if any(_REGEX_CHARACTERS & set(entry) for entry in targets):
        return targets
    return tuple(name for entry in targets for name in entry.split(",") if name)


def expert_names(model: nn.Module) -> set[str]:
    """Names of what a model's experts multiply by: fused weights, or linear layers of each."""
    lists = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and name.endswith(".experts")
    ]
    linear = (name for name, module in model.named_modules() if _is_adaptable(module))
    return {*expert_weights(model), *(n for n in linear if is_inside(n, lists, strictly=True))}


def router_names(model: nn.Module) -> set[str]:
    """Names of linear layers that score experts: within a router, or as wide as fused ones."""
    routers = [
        name
        for name, module in model.named_modules()
        if is_ending(name, "router") or "Router" in type(module).__name__
    ]
    linear = (name for name, module in model.named_modules() if is_plain_linear(module))
    names = {name for name in linear if is_inside(name, routers)}
    for name, module in fused_experts(model):
        parent = name.rpartition(".")[0]
        for own, each in model.get_submodule(parent).named_modules():
            if is_plain_linear(each) and _outputs(each) == module.num_experts:
                names.add(f"{parent}.{own}")
    return names


def _chosen(model: nn.Module, config: LoraConfig, candidates: Mapping[str, nn.Module]) -> set[str]:
    """Those of ``candidates`` that the options name."""
    embeddings = nn.Embedding | ParallelEmbedding
    linear = [name for name, m in candidates.items() if not isinstance(m, embeddings)]
    targets = _entries(config)
    if ALL_BESIDE in targets:
        own = tuple(target for target in targets if target != ALL_BESIDE)
        inside = [name for name in linear if is_inside(name, getattr(model, "rest", ()))]
        parents = {name: model.get_submodule(name.rpartition(".")[0]) for name in inside}
        # Which reads its layer's weight.
        chosen = {n for n in inside if not isinstance(parents[n], nn.MultiheadAttention)}
        _require_match(chosen, "--target_modules", ALL_BESIDE, linear)
        return chosen | _chosen(model, replace(config, target_modules=own), candidates)
    if config.lora_module_name is not None:
        part = config.lora_module_name
        if targets != (ALL_LINEAR,):
            raise ValueError(
                f"--lora_module_name {part!r} and --target_modules {' '.join(targets)!r} both "
                "choose the adapted layers; give one"
            )
        chosen = _meant({name for name in linear if part in name}, part, model)
        _require_match(chosen, "--lora_module_name", part, linear)
    elif targets == (ALL_LINEAR,):
        blocks = [name for name, m in model.named_modules() if isinstance(m, nn.ModuleList)]
        chosen = {name for name in linear if is_inside(name, blocks, strictly=True)}
        chosen = _meant(chosen - router_names(model), ALL_LINEAR, model)
        _require_match(chosen, "--target_modules", ALL_LINEAR, linear)
    elif len(targets) == 1 and _REGEX_CHARACTERS & set(targets[0]):
        chosen = _meant(_matching_regex(targets[0], list(candidates)), targets[0], model)
    else:
        chosen = _matching_names(model, targets, list(candidates))
    return chosen - bypassed_layers(model, chosen, config)


def bypassed_layers(model: nn.Module, chosen: Collection[str], config: LoraConfig) -> set[str]:
    """Layers that all-linear leaves out, as a kernel would pass their adapters by.

    Raises:
        ValueError: if they were asked for by name.
    """
    kind = getattr(getattr(model, "config", None), "model_type", None)
    bypassed = {name for name in chosen if name.endswith(f".{_BYPASSED}") and kind in _FUSED_MAMBA}
    by_name = config.lora_module_name is not None or config.target_modules != (ALL_LINEAR,)
    if bypassed and by_name:
        raise ValueError(
            f"the layers to adapt include {_BYPASSED!r}, whose adapter the GPU kernel of Mamba "
            f"blocks ({kind}) would bypass, and which PEFT rejects: exclude it, or use "
            f"--target_modules {ALL_LINEAR}"
        )
    return bypassed


def choose_saved(model: nn.Module, endings: Collection[str]) -> list[str]:
    """Names of the modules of ``--modules_to_save``, in model order, outermost only.

    Raises:
        ValueError: if an ending matches nothing, or a list of modules.
    """
    modules = {name: m for name, m in model.named_modules() if name}
    matched: list[str] = []
    for ending in endings:
        hits = [name for name in modules if is_ending(name, ending)]
        _require_match(hits, "--modules_to_save", ending, modules)
        matched += _meant(set(hits), ending, model)
    for name in matched:
        if isinstance(modules[name], (nn.ModuleList, nn.ModuleDict)):
            raise ValueError(
                f"--modules_to_save {name!r} is a list of modules, not a module; give its members"
            )
    return [
        name for name in modules if name in matched and not is_inside(name, matched, strictly=True)
    ]


def packed_groups(
    model: nn.Module, targets: Collection[str], parts: tuple[str, ...]
) -> Groups | None:
    """How the packed layers ``targets`` of a transformers model are cut into q, k and v.

    ``parts`` are those of ``--enable_lora``, the parts with factors; none: the layer as one.

    Returns:
        The groups, the same for all layers; None without ``parts``.

    Raises:
        ValueError: if one of ``targets`` is no packed layer known here.
    """
    if not parts:
        return None
    config: Any = getattr(model, "config", None)
    kind = getattr(config, "model_type", None)
    packed = _PACKED.get(str(kind))
    for name in targets:
        if packed is None or not is_ending(name, packed):
            use = f"--target_modules {packed}" if packed else "it with one of " + ", ".join(_PACKED)
            raise ValueError(
                f"--enable_lora {' '.join(parts)}: {name} of this model ({kind}) is not a "
                f"concatenation of q, k and v; use {use}"
            )
    heads = config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    keys = width * (getattr(config, "num_key_value_heads", None) or heads)
    groups = groups_of_parts((heads * width, keys, keys), parts)
    for name in targets:
        outputs = _outputs(model.get_submodule(name))
        if outputs != sum(groups.sizes):
            raise ValueError(
                f"--enable_lora {' '.join(parts)}: {name} has {outputs} outputs, not the "
                f"{sum(groups.sizes)} of q, k and v of the model's configuration"
            )
    return groups


def _outputs(module: nn.Module) -> int:
    return full_shape(module.get_parameter("weight"))[1 if is_transposed(module) else 0]


def minimal_endings(
    names: Collection[str], all_names: Collection[str], *, within: Collection[str] = ()
) -> list[str] | str:
    """PEFT's ``target_modules`` that hit ``names`` of all module paths, and nothing else.

    Paths ``within`` modules may have others of the same endings beside it that are not listed.

    Returns:
        The shortest dotted endings, sorted; one regular expression of whole paths where no
        list can tell a path from another that ends in it.
    """
    if within and names:
        patterns = (_pattern_within(part, names, all_names) for part in within)
        outside = sorted(re.escape(name) for name in names if not is_inside(name, within))
        return "|".join(filter(None, (*outside, *patterns)))
    endings = _endings(names, all_names, is_ending)
    if endings is None:
        return "|".join(re.escape(name) for name in sorted(names))
    return endings


def _pattern_within(parent: str, names: Collection[str], all_names: Collection[str]) -> str:
    """A regular expression of those of ``names`` within ``parent``; empty for none.

    Endings are in one group at its end, as servers read it.
    """
    names = [name for name in names if is_inside(name, [parent])]
    inside, own = (
        {name.removeprefix(f"{parent}.") for name in each if name.startswith(f"{parent}.")}
        for each in (all_names, names)
    )
    endings = set(_endings(own, inside, is_ending) or own) - own
    whole = [name for name in names if not name.endswith(tuple(f".{each}" for each in endings))]
    patterns = sorted(map(re.escape, whole))
    if endings:
        patterns.append(rf"{re.escape(parent)}\..*\.({'|'.join(map(re.escape, sorted(endings)))})")
    return "|".join(patterns)


def parameter_endings(names: Collection[str], all_names: Iterable[str]) -> list[str]:
    """As :func:`minimal_endings`, for ``target_parameters``, which are never a pattern."""
    endings = _endings(names, all_names, is_ending)
    return sorted(names) if endings is None else endings


def minimal_saved_endings(names: Collection[str], all_names: Iterable[str]) -> list[str]:
    """As :func:`minimal_endings`, for ``modules_to_save``, which PEFT matches as plain endings.

    Raises:
        ValueError: if PEFT could not tell one of ``names`` from another module.
    """
    endings = _endings(names, all_names, str.endswith)
    if endings is None:
        raise ValueError(f"--modules_to_save {sorted(names)}: PEFT would save other modules too")
    return endings


def matching_key(keys: Iterable[str], name: str) -> str | None:
    """The first of PEFT's ``keys`` that module ``name`` has settings by, if there is one.

    A key is a regular expression of a whole name, or of its end after a dot.

    Raises:
        ValueError: if one is not a regular expression, or takes too long.
    """
    for key in keys:
        try:
            if regex.fullmatch(rf"(.*\.)?({key})", name, timeout=PATTERN_SECONDS):
                return key
        except regex.error as error:
            raise ValueError(f"{key!r} is not a regular expression: {error}") from None
        except TimeoutError:
            raise ValueError(
                f"{key!r} takes more than {PATTERN_SECONDS:g} s to match a name"
            ) from None
    return None


def is_plain_linear(module: nn.Module) -> bool:
    """Whether it is a linear layer or a Conv1D, and no subclass that computes something else."""
    own = type(module)
    return is_conv1d(module) or (
        isinstance(module, nn.Linear)
        and (own.forward is nn.Linear.forward or own.__name__ in _LINEAR_CLASSES)
    )


def _is_adaptable(module: nn.Module) -> bool:
    # A subclass with its own forward (learned positions with an offset, scaled embeddings,
    # quantised layers) computes something else than our layers would.
    if isinstance(module, nn.Embedding):
        return type(module).forward is nn.Embedding.forward
    ours = ParallelLinear | ParallelEmbedding | NF4Linear
    return is_plain_linear(module) or isinstance(module, ours)


def _matching_regex(pattern: str, names: list[str]) -> set[str]:
    try:
        compiled = regex.compile(pattern)
        # Some patterns, perhaps of a stranger's adapter, would be tried for ever.
        chosen = {name for name in names if compiled.fullmatch(name, timeout=PATTERN_SECONDS)}
    except regex.error as error:
        raise ValueError(
            f"--target_modules {pattern!r} is not a regular expression: {error}"
        ) from None
    except TimeoutError:
        raise ValueError(
            f"--target_modules {pattern!r} takes more than {PATTERN_SECONDS:g} s to match a name; "
            "write a simpler pattern, without repetitions inside repetitions"
        ) from None
    _require_match(chosen, "--target_modules", pattern, names)
    return chosen


def _matching_names(model: nn.Module, targets: tuple[str, ...], names: list[str]) -> set[str]:
    chosen, fused = set[str](), set(expert_weights(model))
    for target in targets:
        if target == ALL_LINEAR or _REGEX_CHARACTERS & set(target):
            raise ValueError(
                f"--target_modules {target!r} must be the only value, got {len(targets)} values"
            )
        hits = {name for name in names if is_ending(name, target)}
        path, dot, last = target.rpartition(".")
        whole = f"{path}{dot}{_FUSED.get(last)}"
        hits |= {name for name in fused.intersection(names) if is_ending(name, whole)}
        _require_match(hits, "--target_modules", target, names)
        chosen |= _meant(hits, target, model)
    return chosen


def _endings(
    names: Collection[str], all_names: Iterable[str], hits: Callable[[str, str], bool]
) -> list[str] | None:
    others = [name for name in all_names if name not in names]
    chosen: set[str] = set()
    for name in names:
        if any(is_ending(name, ending) for ending in chosen):
            continue
        parts = name.split(".")
        tails = (".".join(parts[start:]) for start in reversed(range(len(parts))))
        ending = next((t for t in tails if not any(hits(other, t) for other in others)), None)
        if ending is None:
            return None
        chosen.add(ending)
    return sorted(chosen)


def _require_match(
    matched: Collection[str], option: str, value: str, candidates: Iterable[str]
) -> None:
    if matched:
        return
    endings = sorted({last_name(name) for name in candidates})
    close = difflib.get_close_matches(value.rsplit(".", 1)[-1], endings, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else "."
    raise ValueError(
        f"{option} {value!r} matches no layer{hint} The model has: {', '.join(endings)}"
    )
