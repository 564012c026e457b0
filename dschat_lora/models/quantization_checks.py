"""What ``--base_bits 4`` needs and cannot do. Imports no model library."""

import importlib.util

from dschat_lora.config.groups import LoraConfig


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
