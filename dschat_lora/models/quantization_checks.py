"""Quantised models and ``--base_bits``: what can be loaded. Imports no model library."""

import importlib.util
from collections.abc import Mapping
from typing import Any

from dschat_lora.config.groups import LoraConfig

FIELD = "quantization_config"  # of a model's configuration


def stored_bits(fields: Mapping[str, Any], name: str) -> int:
    """Bits in which the files of a model hold the weights of its blocks: 16 or 4.

    Args:
        fields: of the model's configuration.
        name: of the model, for the message.

    Raises:
        ValueError: if they are quantised in another way than bitsandbytes' NF4.
    """
    found = fields.get(FIELD)
    if found is None:
        return 16
    method = found.get("quant_method") if isinstance(found, dict) else found
    kind = found.get("bnb_4bit_quant_type", "fp4") if method == "bitsandbytes" else method
    if method == "bitsandbytes" and found.get("load_in_4bit") and kind == "nf4":
        return 4
    if method == "bitsandbytes":
        kind = f"bitsandbytes {kind if found.get('load_in_4bit') else 'int8'}"
    raise ValueError(
        f"--model_name_or_path {name} is quantised ({kind}), and of quantised weights only "
        "bitsandbytes' nf4 can be loaded; give the original 16-bit model, with --base_bits 4 to "
        "hold it in 4 bits"
    )


def check_installed() -> None:
    """Refuse 4 bits without bitsandbytes.

    Raises:
        ValueError: saying how to install it.
    """
    if importlib.util.find_spec("bitsandbytes") is None:
        raise ValueError(
            "--base_bits 4 needs a package: pip install 'dschat_lora[qlora]'; without it use "
            "--base_bits 16 and a model whose files are not quantised"
        )


def check_four_bits(lora: LoraConfig, *, trains: bool, tensor_parallel_size: int) -> None:
    """Refuse what a base in 4 bits cannot do.

    Args:
        lora: what is to train.
        trains: whether anything trains.
        tensor_parallel_size: processes to a model.

    Raises:
        ValueError: naming the option.
    """
    check_installed()
    if tensor_parallel_size > 1:
        raise ValueError(
            f"--base_bits 4 does not go with --tensor_parallel_size {tensor_parallel_size}: a "
            "block of 64 weights shares a scale, and cuts of a layer would run through blocks; "
            "share the weights by --zero_stage 3 instead, or use --base_bits 16"
        )
    if trains and lora.lora_dim == 0:
        raise ValueError(
            "--base_bits 4 holds a base that is frozen, and --lora_dim 0 trains every weight: give "
            "--lora_dim 16, or use --base_bits 16"
        )
    if trains and not lora.only_optimize_lora:
        raise ValueError(
            "--base_bits 4 holds a base that is frozen, and --no-only_optimize_lora trains parts "
            "of it; drop one"
        )
