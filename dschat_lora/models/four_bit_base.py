"""Which layers of a base hold 4 bits."""

from typing import Literal

from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from dschat_lora.checkpoint.quantization import FIELD, stored_kind
from dschat_lora.config.groups import ModelConfig
from dschat_lora.lora.experts import expert_weights, quantize_experts
from dschat_lora.lora.layers import full_shape, is_conv1d, is_quantized
from dschat_lora.lora.model import adapter_parameters, replace_part
from dschat_lora.lora.names import is_inside
from dschat_lora.lora.nf4 import NF4Linear
from dschat_lora.lora.targets import is_plain_linear, router_names
from dschat_lora.models.composite import whole_config
from dschat_lora.models.option_checks import check_installed
from dschat_lora.models.stored_weights import StoredWeights

MOST_IN_16_BITS = 0.2  # of the weights of the blocks, that nothing is said of
# Linear layers that are not called: Mamba's blocks and LongCat's router read their weights.
_READ = frozenset(("dt_proj", "classifier"))
FourBits = Literal["as the files are", "once read"]


def kind_of(model_config: PretrainedConfig, path: str) -> str | None:
    """How the files at ``path`` are quantised, None where they are not.

    Raises:
        ValueError: if they are in a way that cannot be trained on.
    """
    return stored_kind(vars(whole_config(model_config) or model_config), path)


def take_kind(model_config: PretrainedConfig, path: str) -> str | None:
    """As :func:`kind_of`; ``model_config`` keeps nothing of it.

    A model built of it may be saved with whole weights.
    """
    kind = kind_of(model_config, path)
    for each in filter(None, (model_config, whole_config(model_config))):
        for part in (each, each.get_text_config()):
            vars(part).pop(FIELD, None)
    return kind


def four_bits_of(kind: str | None, config: ModelConfig) -> FourBits | None:
    """How a base whose files are of ``kind`` comes to hold 4 bits; None where it holds 16.

    Raises:
        ValueError: if a package lacks.
    """
    if kind != "nf4" and config.base_bits != 4:
        return None
    check_installed()
    return packed_how(kind)


def packed_how(kind: str | None) -> FourBits:
    """How 4 bits are made of files of this kind."""
    return "as the files are" if kind == "nf4" else "once read"


def hold_four_bits(model: PreTrainedModel, path: str, how: FourBits) -> None:
    """Have layers of ``model``, which is on the meta device, hold NF4.

    They are those whose weights the files at ``path`` hold so, or the linear layers of the blocks
    and their fused experts: output heads, embeddings, routers and what stands beside the blocks
    then keep 16 bits.
    """
    blocks = [name for name, module in model.named_modules() if isinstance(module, nn.ModuleList)]
    linear = {name: module for name, module in model.named_modules() if is_plain_linear(module)}
    routers = router_names(model)
    names = [
        name
        for name in linear
        if is_inside(name, blocks, strictly=True)
        and name not in routers
        and name.rpartition(".")[2] not in _READ
    ]
    if how == "as the files are":
        names = StoredWeights(model, path).packed_layers()
    tied: dict[int, nn.Parameter] = {}
    for name in names:
        layer = NF4Linear(linear[name], transposed=is_conv1d(linear[name]), dtype=model.dtype)
        layer.weight = tied.setdefault(id(linear[name].weight), layer.weight)
        replace_part(model, name, layer)
    if how == "once read":
        for module, weight in expert_weights(model).values():
            quantize_experts(module, weight, dtype=model.dtype)


def whole_weights_warning(model: nn.Module) -> str | None:
    """What to say where much of the blocks of a base in 4 bits is held in 16; None where little is.

    Of experts that belong to no class of transformers' kernels that is so, and of packed files
    that hold some weights in 16 bits.
    """
    adapter = adapter_parameters(model)
    blocks = [name for name, module in model.named_modules() if isinstance(module, nn.ModuleList)]
    own = {
        name: parameter
        for name, parameter in model.named_parameters()
        if name not in adapter and is_inside(name, blocks, strictly=True)
    }
    whole = {name: full_shape(p).numel() for name, p in own.items() if not is_quantized(p)}
    share = sum(whole.values()) / max(1, sum(full_shape(p).numel() for p in own.values()))
    if len(whole) == len(own) or share < MOST_IN_16_BITS:
        return None
    largest = max(whole, key=lambda name: whole[name])
    return (
        f"{share:.0%} of the weights of the blocks are held in 16 bits, {largest} for one: "
        "4 bits are for linear layers, and for experts that transformers' kernels compute"
    )
