"""Put adapters into a model, find them, switch them off."""

import contextlib
import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from dschat_lora.config.groups import LoraConfig
from dschat_lora.lora.experts import LoraExperts, adapt_experts, expert_weights
from dschat_lora.lora.groups import Groups, PackedLoraLinear
from dschat_lora.lora.layers import LoraEmbedding, LoraLinear, full_shape
from dschat_lora.lora.names import is_expert_weight, is_inside
from dschat_lora.lora.parallel import (
    ParallelEmbedding,
    ParallelLinear,
    ParallelLoraEmbedding,
    ParallelLoraLinear,
    group_of,
    mark_shard,
    own_part,
)
from dschat_lora.lora.targets import (
    NAMES_OF_EXPERTS,
    choose_saved,
    choose_targets,
    expert_names,
    minimal_endings,
    minimal_saved_endings,
    packed_groups,
    parameter_endings,
)
from dschat_lora.lora.trained import TrainedBias, TrainedModule, float32_copy

LoraLayer = LoraLinear | LoraEmbedding | LoraExperts
AdapterLayer = LoraLayer | TrainedBias | TrainedModule


# What configurations of models call the number of experts that a token is sent to.
ACTIVE_EXPERTS = ("num_experts_per_tok", "top_k_experts", "moe_topk", "moe_k", "moe_top_k")


@dataclass(frozen=True)
class AdapterLayout:
    """Where an adapter sits in its model, in the words of PEFT's ``adapter_config.json``.

    PEFT has no word for ``groups``: how packed layers are cut that have factors for some parts.
    """

    target_modules: list[str] | str
    target_parameters: list[str]
    modules_to_save: list[str]
    fan_in_fan_out: bool
    groups: Groups | None = None
    buffers: Mapping[str, Tensor] = field(default_factory=dict)  # of saved modules


def apply_lora(model: nn.Module, config: LoraConfig, *, seed: int) -> list[str]:
    """Replace the chosen modules of ``model`` by adapted ones, in place.

    The base is frozen; with ``--no-only_optimize_lora`` its parts outside the adapted matrices
    (biases, norms, embeddings) train too, as in DeepSpeed-Chat. Biases (``--train_bias``) and whole
    modules (``--modules_to_save``) train as float32 copies, so no base value ever changes.
    Parameters are whole (ZeRO 3 shards them later), or on the meta device, where the adapters'
    then are too, left undrawn. ``lora_dim`` 0 leaves the model as it is. Initial values come from
    ``seed``, see :func:`init_lora_`.

    Returns:
        Names of the modules with LoRA factors, in model order.

    Raises:
        ValueError: if a choice matches nothing, the model already has adapters, or with
            ``--enable_lora`` a chosen layer does not pack q, k and v one after another.
    """
    if config.lora_dim == 0:
        return []
    if adapter_layers(model):
        raise ValueError("the model already has adapters; merge them before adding others")
    targets = choose_targets(model, config)
    saved = choose_saved(model, config.modules_to_save)
    if group_of(model) is not None:
        _check_parallel(model, config, saved)
    groups = packed_groups(model, targets, config.enable_lora)
    if config.only_optimize_lora:
        model.requires_grad_(False)
    config = with_expert_settings(model, config, targets)
    fused = expert_weights(model)
    for name in targets:
        own = config.of_module(name)
        if name in fused:
            adapt_experts(*fused[name], r=own.lora_dim, scaling=lora_scaling(own))
        else:
            replace_part(model, name, _lora_layer(model.get_submodule(name), own, groups))
    for name in saved:
        replace_part(model, name, TrainedModule(model.get_submodule(name)))
    if config.train_bias != "none":
        _train_biases(model, targets if config.train_bias == "lora_only" else None, saved)
    freeze_replaced(model)
    init_adapter_(model, seed=seed)
    return targets


def with_expert_settings(
    model: nn.Module, config: LoraConfig, targets: Sequence[str]
) -> LoraConfig:
    """The options with rank and alpha of each expert among ``targets``.

    The default rank is that of other layers over the number of experts that a token is sent to: in
    its experts a token then meets as many trained numbers as in a dense layer, as in "LoRA Without
    Regret" (Thinking Machines, 2025).
    """
    experts = expert_names(model)
    names = [name for name in targets if name in experts]
    if not names:
        return config
    if config.expert_lora_dim is None:
        fields = vars(getattr(model, "config", object()))
        active = next((n for k in ACTIVE_EXPERTS if isinstance(n := fields.get(k), int)), 1)
        config = replace(config, expert_lora_dim=max(1, config.lora_dim // active))
    own = config.of_experts()
    ranks, alphas = dict(config.ranks), dict(config.alphas)
    if own.lora_dim != config.lora_dim:
        ranks = dict.fromkeys(names, own.lora_dim) | ranks
    if own.lora_alpha != config.lora_alpha:
        alphas = dict.fromkeys(names, own.lora_alpha) | alphas
    return replace(config, ranks=tuple(ranks.items()), alphas=tuple(alphas.items()))


def lora_scaling(config: LoraConfig) -> float:
    """``alpha / r``, or ``alpha / sqrt(r)`` with rsLoRA (arXiv:2312.03732)."""
    r = config.lora_dim
    return config.lora_alpha / (math.sqrt(r) if config.use_rslora else r)


@torch.no_grad()
def init_lora_(tensor: Tensor, *, seed: int, name: str, fan_in: int) -> None:
    """Fill with U(-1/sqrt(fan_in), 1/sqrt(fan_in)), drawn from ``seed`` and ``name`` alone.

    The values depend neither on the global random state nor on order, process count, ZeRO stage
    or tensor-parallel size. For a (r, fan_in) tensor the bound is that of PyTorch's linear layers.
    """
    bound = 1 / math.sqrt(fan_in)
    values = torch.empty(full_shape(tensor)).uniform_(
        -bound, bound, generator=seeded_generator(seed, name)
    )
    tensor.copy_(own_part(tensor, values))


@torch.no_grad()
def init_adapter_(model: nn.Module, *, seed: int) -> None:
    """Draw A and zero B (embeddings: zero A and draw B from N(0, 1)); meta tensors stay so."""
    for name, layer in lora_layers(model).items():
        if layer.weight.is_meta:
            continue
        if isinstance(layer, LoraEmbedding):
            b = layer.lora_embedding_B
            generator = seeded_generator(seed, f"{name}.lora_embedding_B")
            layer.lora_embedding_A.zero_()
            b.copy_(torch.empty(b.shape).normal_(generator=generator))
        else:
            init_lora_(layer.lora_A, seed=seed, name=f"{name}.lora_A", fan_in=layer.in_features)
            layer.lora_B.zero_()


def lora_layers(model: nn.Module) -> dict[str, LoraLayer]:
    """The layers with low-rank factors, by name, in model order."""
    return {name: m for name, m in model.named_modules() if isinstance(m, LoraLayer)}


def adapter_layers(model: nn.Module) -> dict[str, AdapterLayer]:
    """Every layer that trains something beside a frozen base, by name, in model order."""
    return {name: m for name, m in model.named_modules() if isinstance(m, AdapterLayer)}


def adapter_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """What belongs into the adapter file: LoRA factors, trained biases and saved modules.

    Names are those of ``model.named_parameters()``: ``X.lora_A``, ``X.lora_B``,
    ``X.lora_embedding_A``, ``X.lora_embedding_B``, ``X.trained_bias``, ``X.trained.*``.
    """
    prefixes = ("lora_", "trained_bias", "trained.")
    return {
        f"{name}.{part}": parameter
        for name, layer in adapter_layers(model).items()
        for part, parameter in layer.named_parameters()
        if part.startswith(prefixes)
    }


def saved_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Buffers of modules that are saved in full, which PEFT stores beside their parameters."""
    return {
        f"{name}.trained.{part}": value
        for name, layer in adapter_layers(model).items()
        if isinstance(layer, TrainedModule)
        for part, value in layer.trained.state_dict(keep_vars=True).items()
        if not isinstance(value, nn.Parameter) and value.is_floating_point()
    }


def base_names(model: nn.Module) -> dict[str, str]:
    """Name in the pretrained state dict -> name in ``model``, tied weights under every name."""
    adapter, saved = adapter_parameters(model), _saved_names(model)
    fused = {f"{name}.weight": name for name in _fused_names(model)}
    originals = {
        n: fused.get(n, _original_name(n, saved)) for n in model.state_dict() if n not in adapter
    }
    return {original: name for name, original in originals.items() if original is not None}


def adapter_layout(model: nn.Module) -> AdapterLayout:
    """The adapted modules of ``model`` in the words that make PEFT find exactly these."""
    saved = _saved_names(model)
    # PEFT meets the pretrained model, in which our copies of saved modules do not exist.
    originals = [_original_name(name, saved) for name, _ in model.named_modules() if name]
    names = {name for name in originals if name is not None}
    layers, parameters = lora_layers(model), _target_parameters(model)
    # Of the text model of a composite one, which has more than this model.
    text = getattr(model, "text_path", None)
    within = () if text is None else (text, *getattr(model, "rest", ()))
    return AdapterLayout(
        target_modules=minimal_endings(layers.keys() - parameters.keys(), names, within=within),
        target_parameters=sorted(parameters.values())
        if within
        else parameter_endings(parameters.values(), base_names(model)),
        modules_to_save=minimal_saved_endings(saved, names),
        fan_in_fan_out=any(
            isinstance(layer, LoraLinear) and layer.transposed for layer in layers.values()
        ),
        groups=next((getattr(layer, "groups", None) for layer in layers.values()), None),
        buffers=saved_buffers(model),
    )


@contextlib.contextmanager
def adapters_disabled(model: nn.Module) -> Iterator[None]:
    """Inside the block ``model`` is its base, bit for bit: no factor, bias or saved module."""
    layers = adapter_layers(model).values()
    enabled = [layer for layer in layers if layer.enabled]
    for layer in enabled:
        layer.enabled = False
    try:
        yield
    finally:
        for layer in enabled:
            layer.enabled = True


def _check_parallel(model: nn.Module, config: LoraConfig, saved: list[str]) -> None:
    """Refuse to train, on a model divided among ranks, what ranks see a part of.

    Raises:
        ValueError: naming the option.
    """
    blocks = [name for name, m in model.named_modules() if isinstance(m, nn.ModuleList)]
    for name in saved:
        parts = model.get_submodule(name).modules()
        divided = any(isinstance(m, ParallelLinear | ParallelEmbedding) for m in parts)
        if divided or is_inside(name, blocks):
            raise ValueError(
                f"--modules_to_save {name!r} is divided among ranks or lies in a block; with "
                "--tensor_parallel_size above 1 adapt it by --target_modules instead"
            )
    if config.train_bias == "all" or not config.only_optimize_lora:
        option = "--train_bias all" if config.only_optimize_lora else "--no-only_optimize_lora"
        raise ValueError(
            f"{option} trains parts of the base outside the adapted layers, which "
            "--tensor_parallel_size above 1 does not support; use --train_bias none or lora_only"
        )
    if config.enable_lora:
        raise ValueError(
            f"--enable_lora {' '.join(config.enable_lora)} is not supported with "
            "--tensor_parallel_size above 1; without it the packed layer has one lora_A and lora_B"
        )


def _lora_layer(base: nn.Module, config: LoraConfig, groups: Groups | None) -> LoraLayer:
    r, scaling, dropout = config.lora_dim, lora_scaling(config), config.lora_dropout
    if isinstance(base, ParallelEmbedding):
        return ParallelLoraEmbedding(base, r=r, scaling=scaling)
    if isinstance(base, nn.Embedding):
        return LoraEmbedding(base, r=r, scaling=scaling)
    if isinstance(base, ParallelLinear):
        return ParallelLoraLinear(base, r=r, scaling=scaling, dropout=dropout)
    if groups is not None:
        return PackedLoraLinear(base, r=r, scaling=scaling, dropout=dropout, groups=groups)
    return LoraLinear(base, r=r, scaling=scaling, dropout=dropout)


def replace_part(model: nn.Module, name: str, part: nn.Module | nn.Parameter) -> None:
    """Put ``part`` in place of the module or parameter ``name``."""
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, part)


def _train_biases(model: nn.Module, adapted: list[str] | None, saved: list[str]) -> None:
    """Give the ``adapted`` layers, or every layer outside ``saved``, a trained bias."""
    has_any = False
    for name, module in list(model.named_modules()):
        has_bias = module._parameters.get("bias") is not None
        chosen = not is_inside(name, saved) if adapted is None else name in adapted
        if not (has_bias and chosen):
            continue
        has_any = True
        if isinstance(module, LoraLinear):
            module.trained_bias = float32_copy(module.get_parameter("bias"))
            if isinstance(module, ParallelLoraLinear):
                mark_shard(module.trained_bias, module.split.bias)
        else:
            replace_part(model, name, TrainedBias(module))
    if not has_any:
        option = "all" if adapted is None else "lora_only"
        raise ValueError(f"--train_bias {option}: no such layer has a bias; use none")


def freeze_replaced(model: nn.Module) -> None:
    """Freeze base values that a factor or copy trains for, unless a tied module uses them."""
    replaced = set()
    for name, layer in adapter_layers(model).items():
        if isinstance(layer, TrainedModule):
            replaced |= {f"{name}.base.{part}" for part, _ in layer.base.named_parameters()}
            continue
        if isinstance(layer, LoraLayer):
            replaced.add(f"{name}.weight")
        if getattr(layer, "trained_bias", None) is not None:
            replaced.add(f"{name}.bias")
    parameters = dict(model.named_parameters(remove_duplicate=False))
    used = {id(p) for name, p in parameters.items() if name not in replaced}
    for name in replaced:
        if id(parameters[name]) not in used:
            parameters[name].requires_grad_(False)


def _fused_names(model: nn.Module) -> list[str]:
    return [name for name, m in model.named_modules() if isinstance(m, LoraExperts)]


def _target_parameters(model: nn.Module) -> dict[str, str]:
    """Adapted layers that PEFT has to find by a parameter, and the parameter.

    Those are the fused weights of experts. In a model that has such, adapted or not, PEFT takes
    names of linear layers as ``down_proj`` for experts, whatever stands before them, and drops
    factors of shared experts and dense layers.
    """
    fused = _fused_names(model)
    linear = lora_layers(model) if any(map(is_expert_weight, base_names(model))) else {}
    names = {n: f"{n}.weight" for n in linear if n.rpartition(".")[2] in NAMES_OF_EXPERTS}
    return names | {name: name for name in fused}


def _saved_names(model: nn.Module) -> list[str]:
    return [name for name, m in model.named_modules() if isinstance(m, TrainedModule)]


def _original_name(name: str, saved: list[str]) -> str | None:
    """The pretrained model's name for ``name``; None for what only our copies hold."""
    for parent in saved:
        if is_inside(name, [f"{parent}.trained"]):
            return None
        if is_inside(name, [f"{parent}.base"]):
            return parent + name.removeprefix(f"{parent}.base")
    return name


def seeded_generator(seed: int, name: str) -> torch.Generator:
    """A generator of its own for each name."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    # 63 bits: the range that every generator accepts.
    return torch.Generator("cpu").manual_seed(int.from_bytes(digest[:8], "big") >> 1)
