"""LoRA for any torch module under the names of DeepSpeed-Chat.

For scripts written for ``dschat/utils/module/lora.py`` and ``get_optimizer_grouped_parameters`` of
microsoft/DeepSpeedExamples. The layers are those of :mod:`dschat_lora.lora.layers`.
"""

import difflib
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from dschat_lora.config.groups import LoraConfig
from dschat_lora.lora.groups import PackedLoraLinear
from dschat_lora.lora.layers import LoraEmbedding, LoraLinear, active_bias, is_quantized
from dschat_lora.lora.model import adapter_layers, freeze_replaced, init_lora_, replace_part
from dschat_lora.lora.names import last_name
from dschat_lora.lora.targets import bypassed_layers, is_plain_linear

ModuleT = TypeVar("ModuleT", bound=nn.Module)
# Parts of names of parameters without weight decay; of DeepSpeed-Chat.
NO_DECAY = ("bias", "layer_norm.weight", "layernorm.weight", "norm.weight", "ln_f.weight")


def convert_linear_layer_to_lora(
    model: ModuleT,
    part_module_name: str,
    lora_dim: int = 0,
    lora_scaling: float = 1,
    lora_dropout: float = 0,
) -> ModuleT:
    """Give linear layers a low-rank update ``lora_scaling / lora_dim * B A``, in place.

    A layer computes ``x W^T + b + lora_scaling / lora_dim * dropout(x) A^T B^T`` with W frozen; all
    else trains as before, until :func:`only_optimize_lora_parameters`. Layers are those whose
    dotted name contains ``part_module_name``: ``nn.Linear``, and GPT-2's ``Conv1D``. A layer that
    stands in the model under several names stays one layer, with one pair of factors. A weight that
    is also a layer's without factors (a head tied to an embedding) trains on as that layer's.
    Further calls adapt further layers. At ZeRO 3 call it on every rank, before
    ``deepspeed.initialize``; weights may be sharded already, as by ``deepspeed.zero.Init``.

    The factors are ``lora_A`` (lora_dim, in) and ``lora_B`` (out, lora_dim), float32 whatever the
    type of W. DeepSpeed-Chat's are their transposes in the type of W, ``lora_right_weight``
    (in, lora_dim) and ``lora_left_weight`` (lora_dim, out). B is zero at first; A is uniform within
    ``1 / sqrt(in)`` of 0, as in microsoft/LoRA and PEFT, while theirs is within
    ``1 / sqrt(lora_dim)``. It depends on torch's global random state.

    Args:
        model: any module that has linear layers.
        part_module_name: part of names such as ``decoder.layers.``; "" takes every linear layer.
        lora_dim: rank of the update; 0 leaves the model as it is.
        lora_scaling: above 0; what PEFT calls ``lora_alpha``.
        lora_dropout: probability in [0, 1) that the update misses an input, in training.

    Returns:
        ``model`` itself.

    Raises:
        ValueError: if a number is out of its range, no layer matches (the message lists the names
            that there are), or a layer's weight is read by others than the layer.
    """
    whole = isinstance(lora_dim, int) and lora_dim >= 0
    _check_number("lora_dim", lora_dim, whole, "a whole number from 0 on")
    _check_number("lora_scaling", lora_scaling, lora_scaling > 0, "above 0")
    _check_number("lora_dropout", lora_dropout, 0 <= lora_dropout < 1, "in [0, 1)")
    chosen = _chosen_layers(model, part_module_name)
    bypassed_layers(model, chosen, LoraConfig(lora_module_name=part_module_name))
    if lora_dim == 0:
        return model
    scaling, seed = lora_scaling / lora_dim, int(torch.randint(2**63 - 1, ()))
    parts = dict[nn.Module, nn.Module]()
    for name, base in chosen.items():
        layer = LoraLinear(base, r=lora_dim, scaling=scaling, dropout=lora_dropout)
        init_lora_(layer.lora_A, seed=seed, name=name, fan_in=layer.in_features)
        parts[base] = layer
    _replace_parts(model, parts)
    freeze_replaced(model)
    # Without gradients torch's encoder layers read the weights alone, unless a layer has a hook.
    encoders = [m for m in model.modules() if isinstance(m, nn.TransformerEncoderLayer)]
    for inner in {each for encoder in encoders for each in encoder.modules()}:
        if isinstance(inner, LoraLinear) and not inner._forward_pre_hooks:
            inner.register_forward_pre_hook(_no_change)
    return model


def only_optimize_lora_parameters(
    model: ModuleT, force_optimize_params: Collection[str] = ()
) -> ModuleT:
    """Let the LoRA factors and ``force_optimize_params`` train, and freeze all else, in place.

    Args:
        model: a module with LoRA layers, this package's or others whose factors are called
            ``lora_*``.
        force_optimize_params: whole names of further parameters, such as ``v_head.weight``.

    Returns:
        ``model`` itself.

    Raises:
        ValueError: if a name is no parameter's, or nothing would train; nothing is changed then.
    """
    _check_names("force_optimize_params", force_optimize_params)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for name in force_optimize_params:
        if name not in parameters:
            close = difflib.get_close_matches(name, parameters, 1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise ValueError(f"force_optimize_params {name!r} is not the name of a parameter{hint}")
    forced = [parameters[name] for name in force_optimize_params]
    trained = {id(p) for p in (*forced, *_factors(model).values())}
    if not trained:
        raise ValueError(
            "the model has no LoRA parameters and would be frozen entirely; call "
            "convert_linear_layer_to_lora with lora_dim above 0 first"
        )
    for parameter in parameters.values():
        parameter.requires_grad_(id(parameter) in trained)
    return model


@torch.no_grad()
def convert_lora_to_linear_layer(model: ModuleT) -> ModuleT:
    """Add every update to its weight and put a plain layer in place of the LoRA layer.

    ``W + lora_scaling / lora_dim * B A`` is computed in float32 and rounded once to the type of W:
    in 16 bits an update below half a step of W is lost. Layers become ``nn.Linear`` or the
    ``Conv1D`` that they were, and the state dict is the base's. W keeps its storage, and stays
    frozen if it is; one that is tied to another module's becomes the layer's own, and
    ``tie_word_embeddings`` of the model's ``config`` false.

    Where ZeRO 3 holds parameters in parts, one layer at a time is whole. Call on every rank; its
    engine cannot run the model then, but :func:`dschat_lora.engine.zero.gather_to_cpu` has its
    weights to save. Where DeepSpeed keeps fp32 masters
    (``bf16`` or ``fp16`` enabled) the factors are its 16-bit copies.

    DeepSpeed-Chat left its own layers there, with factors beside the changed weights.

    Args:
        model: a module with layers of :func:`convert_linear_layer_to_lora`, or a DeepSpeed engine.

    Returns:
        ``model`` itself.

    Raises:
        ValueError: if it has other adapters too, or at ZeRO 3 a tied weight has an update;
            nothing is changed then.
    """
    layers = adapter_layers(model)
    owners = Counter(id(p) for m in model.modules() for p in m._parameters.values())
    tied = {n for n, m in layers.items() if owners[id(m._parameters.get("weight"))] > 1}
    for name, layer in layers.items():
        _check_plain(name, layer, tied=name in tied)
    parts = dict[nn.Module, nn.Module]()
    for name, layer in layers.items():
        assert isinstance(layer, LoraLinear)
        with _whole([layer.weight, layer.lora_A, layer.lora_B]):
            weight = layer.weight.float() + layer.delta(layer.lora_A, layer.lora_B)
            if name in tied:
                weight = weight.to(layer.weight.dtype)
                layer.weight = nn.Parameter(weight, requires_grad=layer.weight.requires_grad)
            else:
                layer.weight.copy_(weight)
        parts[layer] = _plain_layer(layer)
    _replace_parts(model, parts)
    for module in model.modules() if tied else ():
        config: Any = getattr(module, "config", None)
        if getattr(config, "tie_word_embeddings", False):
            config.tie_word_embeddings = False
    return model


def make_model_gradient_checkpointing_compatible(model: ModuleT) -> ModuleT:
    """Let the outputs of the input embedding require gradients, whether it trains or not.

    Reentrant checkpointing (``torch.utils.checkpoint`` with ``use_reentrant=True``) gives a block
    no gradients if none of its inputs requires one, as the first one's where only factors train.
    Models of transformers do so by ``enable_input_require_grads``, which version 5 calls itself
    where checkpointing is switched on; others get a hook on the module
    of ``get_input_embeddings``, or else on the first ``nn.Embedding``.

    Returns:
        ``model`` itself.

    Raises:
        ValueError: if there is no embedding.
    """
    of_transformers: Callable[[], None] | None = getattr(model, "enable_input_require_grads", None)
    if of_transformers is not None:
        of_transformers()
        return model
    known: Callable[[], nn.Module | None] | None = getattr(model, "get_input_embeddings", None)
    kinds = nn.Embedding | LoraEmbedding
    first = next((module for module in model.modules() if isinstance(module, kinds)), None)
    embedding = first if known is None else known()
    if embedding is None:
        raise ValueError(
            f"{type(model).__name__} has no embedding whose output could require gradients; call "
            "requires_grad_() on the input of the first checkpointed block"
        )
    embedding.register_forward_hook(_require_gradients)
    return model


def get_optimizer_grouped_parameters(
    model: nn.Module,
    weight_decay: float,
    lora_lr: float = 5e-4,
    no_decay_name_list: Collection[str] = NO_DECAY,
) -> list[dict[str, Any]]:
    """The parameters that train, in groups for torch's AdamW, FusedAdam or DeepSpeedCPUAdam.

    LoRA factors, found by the ``lora_`` in front of their names, have the rate ``lora_lr``; other
    groups get that of the optimizer. A factor decays whatever the name of its layer.

    Args:
        model: a module, before or after its conversion to LoRA.
        weight_decay: of weights and factors, at least 0.
        lora_lr: peak learning rate of the factors, at least 0.
        no_decay_name_list: parts of names, in any case, of parameters that do not decay.

    Returns:
        Up to three dicts with ``params`` and ``weight_decay``, and ``lr`` with the factors', in the
        order weights, factors, parameters without decay. No group is empty, and each parameter
        that requires gradients is in one group.

    Raises:
        ValueError: if a number is out of its range.
    """
    _check_number("weight_decay", weight_decay, weight_decay >= 0, "at least 0")
    _check_number("lora_lr", lora_lr, lora_lr >= 0, "at least 0")
    _check_names("no_decay_name_list", no_decay_name_list)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    factors = trained.keys() & _factors(model).keys()
    exempt = {
        name
        for name in trained.keys() - factors
        if any(part.lower() in name.lower() for part in no_decay_name_list)
    }
    decayed = trained.keys() - factors - exempt
    groups: list[dict[str, Any]] = [
        {"params": _of_names(trained, decayed), "weight_decay": weight_decay},
        {"params": _of_names(trained, factors), "weight_decay": weight_decay, "lr": lora_lr},
        {"params": _of_names(trained, exempt), "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def _chosen_layers(model: nn.Module, part_module_name: str) -> dict[str, nn.Module]:
    """Linear layers whose names have the part; an error where there are none, or unsafe ones."""
    layers = {name: m for name, m in model.named_modules() if name and is_plain_linear(m)}
    chosen = {name: m for name, m in layers.items() if part_module_name in name}
    if not chosen:
        if not layers:
            raise ValueError(
                f"part_module_name {part_module_name!r}: the model has no linear layer within it"
            )
        endings = ", ".join(sorted(set(map(last_name, layers))))
        raise ValueError(
            f"part_module_name {part_module_name!r} matches no linear layer; their names are like "
            f"{next(iter(layers))!r} and end in: {endings}"
        )
    for name in chosen:  # a factor would be passed by where the weight is used without a call
        if isinstance(model.get_submodule(name.rpartition(".")[0]), nn.MultiheadAttention):
            raise ValueError(
                f"part_module_name matches {name}, whose weight nn.MultiheadAttention reads "
                "without calling the layer: its update would be left out; choose a part of "
                "names that leaves it out, with one call for each such part"
            )
    return chosen


def _factors(model: nn.Module) -> dict[str, nn.Parameter]:
    """LoRA factors by name, of PEFT's and DeepSpeed-Chat's own layers too."""
    return {name: p for name, p in model.named_parameters() if ".lora_" in f".{name}"}


def _of_names(parameters: Mapping[str, nn.Parameter], names: Collection[str]) -> list[nn.Parameter]:
    """Those of ``names``, in model order, which is the same on every rank."""
    return [p for name, p in parameters.items() if name in names]


def _no_change(module: nn.Module, inputs: object) -> None:
    pass


def _require_gradients(module: nn.Module, inputs: object, output: Tensor) -> None:
    output.requires_grad_(True)


def _replace_parts(model: nn.Module, parts: Mapping[nn.Module, nn.Module]) -> None:
    """Put each value of ``parts`` in place of its key, under every name that it has."""
    for name, module in list(model.named_modules(remove_duplicate=False)):
        if module in parts:
            replace_part(model, name, parts[module])


def _check_plain(name: str, layer: nn.Module, *, tied: bool) -> None:
    """Refuse a layer whose adapter a plain layer cannot take up."""
    if type(layer) not in (LoraLinear, PackedLoraLinear) or is_quantized(layer.weight):
        raise ValueError(
            f"{name} ({type(layer).__name__}) is no linear layer with an update of its weight "
            "alone; dschat_lora.lora.merge.merged_state_dict merges all adapters"
        )
    if tied and hasattr(layer.weight, "ds_id"):
        raise ValueError(
            f"{name} has an update, and its weight is another layer's too, of which ZeRO 3 holds "
            "parts: convert a model whose weights are whole"
        )


def _plain_layer(layer: LoraLinear) -> nn.Module:
    """A layer of the base's kind with the weight and bias of ``layer``."""
    shape = layer.in_features, layer.out_features
    if layer.transposed:
        with torch.device("meta"):
            plain = layer.base_class(*shape[::-1])
    else:
        plain = nn.Linear(*shape, device="meta")
    plain.weight = layer.weight
    bias = active_bias(layer)
    if bias is not None and bias is not layer.bias:
        bias = nn.Parameter(bias, requires_grad=False)
    plain.register_parameter("bias", bias)
    return plain.train(layer.training)


@contextmanager
def _whole(parameters: list[nn.Parameter]) -> Iterator[None]:
    """Inside the block sharded parameters are whole; what is written there is kept."""
    # The methods by which deepspeed.zero.GatheredParameters does so. Every rank computes the same.
    sharded: list[Any] = [p for p in parameters if hasattr(p, "ds_id")]
    if sharded:
        sharded[0].all_gather(sharded)
    try:
        yield
    finally:
        if sharded:
            sharded[0].partition(sharded, has_been_updated=True)


def _check_number(name: str, value: float, fits: bool, allowed: str) -> None:
    if not (fits and math.isfinite(value)):
        raise ValueError(f"{name} must be {allowed}, got {value!r}")


def _check_names(name: str, value: Collection[str]) -> None:
    if isinstance(value, str):
        raise ValueError(f"{name} must be a list of names, got the text {value!r}")
