"""Blocks compiled by torch, for training and evaluation; decoding runs them as they are."""

import os
import shutil
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers.cache_utils import Cache
from transformers.modeling_layers import GradientCheckpointingLayer

# Variants of a block's code: of each role with and without adapters and gradients, on one row
# and on several. torch stops compiling beyond 8.
_MOST_VARIANTS = 64
FLEX_ATTENTION = "--attn_implementation flex_attention"


def compiler_for(device: torch.device) -> tuple[str, str, str]:
    """Language, program and variable of what torch.compile calls: Triton's C compiler on a GPU."""
    if device.type == "cpu":
        return "C++", os.environ.get("CXX", "g++"), "CXX"
    default = next(filter(shutil.which, ("gcc", "clang")), "gcc")
    return "C", os.environ.get("CC", default), "CC"


def check_compiler(device: torch.device, option: str = "--compile") -> None:
    """Compile a trifle, to find out early whether this machine can, as ``option`` needs.

    Raises:
        ValueError: if it cannot, with the compiler's reason; of flex_attention on a CPU.
    """
    if option == FLEX_ATTENTION and device.type == "cpu":
        raise ValueError(f"{option} trains on a GPU only; use sdpa or eager on a CPU")
    trifle = torch.compile(lambda x: x.sin() + 1, options={"fx_graph_cache": False})
    try:
        trifle(torch.ones(4, device=device))
    except RuntimeError as error:
        reason = str(error).strip().splitlines()[0]
        language, program, variable = compiler_for(device)
        raise ValueError(
            f"{option} needs a {language} compiler such as {program} that works here, and Python's "
            f"headers ({reason}); install them, name the compiler by the environment variable "
            f"{variable}, or drop the option"
        ) from error


def compile_blocks(model: nn.Module, *, backend: str | Callable[..., Any] = "inductor") -> None:
    """Compile each block of ``model`` in place, for lengths that vary from call to call.

    Every :class:`~dschat_lora.models.backbone.Backbone` of the model is made before. Parameters
    keep their names; a copy of the model (``share_parameters``) is not compiled. What is recomputed
    in the backward pass stays so, and is not to be changed afterwards. Blocks that are given a
    cache of keys and values run as they are: decoding has other shapes at every token. Attention
    is left out of the graph: the lengths of samples are data.

    Raises:
        ValueError: if transformers marks no blocks in this architecture.
    """
    blocks = [each for each in model.modules() if isinstance(each, GradientCheckpointingLayer)]
    if not blocks:
        raise ValueError(
            f"--compile compiles a model's blocks, and {type(model).__name__} has none that "
            "transformers knows; drop the option"
        )
    limit = torch._dynamo.config.recompile_limit
    torch._dynamo.config.recompile_limit = max(limit, _MOST_VARIANTS)
    # Or as many tokens as the model is wide, once, would be taken for a rule.
    torch.fx.experimental._config.use_duck_shape = False
    for block in blocks:
        block.compile(dynamic=True, backend=backend)
        _dispatch(block, recompute=bool(block.gradient_checkpointing))


def _dispatch(block: GradientCheckpointingLayer, *, recompute: bool) -> None:
    """Let calls without a cache go to what is compiled."""
    compiled = block._compiled_call_impl
    # Checkpointing around what is compiled: torch gives up on what it finds within.
    block.gradient_checkpointing = False

    def call(*args: object, **kwargs: Any) -> object:
        if any(isinstance(value, Cache) for value in (*args, *kwargs.values())):
            return block._call_impl(*args, **kwargs)
        if recompute and block.training:
            return block._gradient_checkpointing_func(partial(compiled, **kwargs), *args)
        return compiled(*args, **kwargs)

    block._compiled_call_impl = call
