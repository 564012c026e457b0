"""Which layers of a base hold 4 bits."""

from typing import Literal

from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from dschat_lora.config.groups import ModelConfig
from dschat_lora.lora.layers import is_conv1d
from dschat_lora.lora.model import replace_part
from dschat_lora.lora.nf4 import NF4Linear
from dschat_lora.lora.targets import is_inside, is_plain_linear
from dschat_lora.models.quantization_checks import FIELD, check_installed, stored_bits
from dschat_lora.models.shard_loading import packed_layers

FourBits = Literal["as the files are", "once read"]


def take_four_bits(
    model_config: PretrainedConfig, config: ModelConfig, path: str
) -> FourBits | None:
    """How the base comes to hold 4 bits; None where it holds 16.

    ``model_config`` keeps nothing of how files are quantised: a model built of it may be saved with
    whole weights.

    Raises:
        ValueError: if the files are quantised in a way that is not known, or a package lacks.
    """
    stored = stored_bits(vars(model_config), path)
    vars(model_config).pop(FIELD, None)
    if 4 not in (stored, config.base_bits):
        return None
    check_installed()
    return "as the files are" if stored == 4 else "once read"


def hold_four_bits(model: PreTrainedModel, path: str, how: FourBits) -> None:
    """Have layers of ``model``, which is on the meta device, hold NF4.

    They are those whose weights the files at ``path`` hold so, or the linear layers of the blocks:
    output heads, embeddings and what stands beside the blocks then keep 16 bits.
    """
    blocks = [name for name, module in model.named_modules() if isinstance(module, nn.ModuleList)]
    linear = {name: module for name, module in model.named_modules() if is_plain_linear(module)}
    inside = [name for name in linear if is_inside(name, blocks, strictly=True)]
    for name in packed_layers(model, path) if how == "as the files are" else inside:
        layer = NF4Linear(linear[name], transposed=is_conv1d(linear[name]), dtype=model.dtype)
        replace_part(model, name, layer)
