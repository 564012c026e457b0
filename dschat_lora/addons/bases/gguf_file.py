"""The weights of a GGUF file."""

from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.integrations.gguf import (
    GgufHeader,
    get_gguf_conversion_mapping,
    get_gguf_plan,
    is_gguf_arch_supported,
    load_gguf_state_dict,
    read_gguf_metadata,
)
from transformers.integrations.gguf.utils import add_gguf_load_ops
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from dschat_lora.lora.layers import is_quantized


def weights(model: PreTrainedModel, file: str) -> tuple[dict[str, Any], list[Any]]:
    """The tensors of a GGUF file, and the rules that make weights of them.

    Blocks of a few architectures are unpacked weight by weight. Of most transformers gives values
    alone, of all weights at once.
    """
    kind = read_gguf_metadata(file)[0]["general.architecture"]
    if is_gguf_arch_supported(kind):
        header = GgufHeader.from_file(file)
        rules = get_gguf_conversion_mapping(kind, model.config)
        blocks = get_gguf_plan(header, rules)[0]
        rules = add_gguf_load_ops(rules, blocks, header, torch.float32)
        tensors = load_gguf_state_dict(header)
    else:
        packs = any(is_quantized(p) for p in model.parameters())
        dtype = torch.float32 if packs else model.dtype
        rules = []
        tensors = load_gguf_checkpoint(
            file, return_tensors=True, model_to_load=model, torch_dtype=dtype
        )["tensors"]
    return tensors, rules
