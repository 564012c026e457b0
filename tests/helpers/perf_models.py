"""Tiny models of four architectures, the plain LoRA formula, and what torch says they execute."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import (
    FlopCounterMode,
    addmm_flop,
    sdpa_backward_flop_count,
    sdpa_flop_count,
)
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    OPTConfig,
    OPTForCausalLM,
)

from dschat_lora.lora.layers import LoraLinear

VOCAB = 80
LINEARS = ("proj", "fc1", "fc2", "c_attn", "c_fc", "query_key_value", "dense", "4h", "to_h")


class PlainLora(nn.Module):
    """``x W^T + b + s (x A^T) B^T`` around nn.Linear or GPT-2's Conv1D, base product first."""

    def __init__(self, base, r):
        super().__init__()
        self.weight, self.bias = base.weight, base.bias
        self.transposed = not isinstance(base, nn.Linear)
        sizes = base.weight.shape if self.transposed else base.weight.shape[::-1]
        self.in_features, self.out_features = sizes
        self.r, self.scaling = r, 2.0
        device = base.weight.device
        self.lora_A = nn.Parameter(torch.randn(r, self.in_features, device=device))
        self.lora_B = nn.Parameter(torch.randn(self.out_features, r, device=device))

    def forward(self, x):
        weight = self.weight.T if self.transposed else self.weight
        y = F.linear(x, weight, self.bias)
        return y + self.scaling * F.linear(F.linear(x, self.lora_A), self.lora_B)


def project_lora(base, r):
    return LoraLinear(base, r=r, scaling=2.0)


_SIZES = {"vocab_size": VOCAB, "num_hidden_layers": 3, "num_attention_heads": 4}
_OPT = _SIZES | {"hidden_size": 32, "word_embed_proj_dim": 32, "ffn_dim": 128}
_OPT |= {"max_position_embeddings": 64, "dropout": 0.0}
_LLAMA = _SIZES | {"hidden_size": 64, "intermediate_size": 160, "num_key_value_heads": 2}
_GPT2 = {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64}
_GPT2 |= {"bos_token_id": 0, "eos_token_id": 0}
_GPT2 |= dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
_NEOX = _SIZES | {"hidden_size": 32, "intermediate_size": 128, "use_parallel_residual": True}


def opt(attn="eager", **changes):
    return OPTForCausalLM(OPTConfig(**(_OPT | changes), attn_implementation=attn))


def llama(attn="eager", **changes):
    return LlamaForCausalLM(LlamaConfig(**(_LLAMA | changes), attn_implementation=attn))


def gpt2(attn="eager", **changes):
    return GPT2LMHeadModel(GPT2Config(**(_GPT2 | changes), attn_implementation=attn))


def neox(attn="eager", **changes):
    return GPTNeoXForCausalLM(GPTNeoXConfig(**(_NEOX | changes), attn_implementation=attn))


FAMILIES = {"opt": opt, "llama": llama, "gpt2": gpt2, "neox": neox}
QUERY_VALUE = ("q_proj", "v_proj", "c_attn", "query_key_value")
MLP_UP = ("fc1", "up_proj", "c_fc", "h_to_4h")


def add_lora(model, r=4, *, names=LINEARS, layer=PlainLora, train_base=False):
    """Replace the block linears whose name ends in one of ``names``; freeze the rest."""
    model.requires_grad_(train_base)
    head = model.get_output_embeddings()
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            linear = isinstance(child, nn.Linear) or type(child).__name__ == "Conv1D"
            if linear and child is not head and name.endswith(names):
                setattr(parent, name, layer(child, r))
    return model


def checkpoint(model):
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def _flash(query, key, value, *args, out_shape=None, **kwargs):
    return sdpa_flop_count(query, key, value)


def _flash_backward(grad, query, key, value, *args, out_shape=None, **kwargs):
    return sdpa_backward_flop_count(grad, query, key, value)


def _addmm_in_place(this, left, right, *args, out_shape=None, **kwargs):
    return addmm_flop(this, left, right)


def flop_counter():
    """Torch's counter with formulas for the matmuls that it overlooks."""
    aten = torch.ops.aten
    blind = {
        aten._scaled_dot_product_flash_attention_for_cpu: _flash,
        aten._scaled_dot_product_flash_attention_for_cpu_backward: _flash_backward,
        aten.addmm_: _addmm_in_place,
    }
    return FlopCounterMode(display=False, custom_mapping=blind)


def executed_flops(model, *, rows, length):
    """What torch counts in one forward and backward pass with the loss on every position."""
    model.train()
    ids = torch.randint(3, VOCAB, (rows, length))
    with flop_counter() as counter:
        model(input_ids=ids, use_cache=False).logits.float().square().sum().backward()
    return counter.get_total_flops()
