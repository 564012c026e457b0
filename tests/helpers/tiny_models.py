"""Tiny transformers models with random weights, built from configs alone."""

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    GPT2Config,
    LlamaConfig,
    OPTConfig,
    Phi3Config,
)

from dschat_lora.lora.model import adapter_parameters, apply_lora
from helpers.tiny import random_model

VOCAB = 40
_SIZES = {"vocab_size": VOCAB, "hidden_size": 16, "num_hidden_layers": 2}
_SIZES |= {"max_position_embeddings": 16}
_OPT = _SIZES | {"word_embed_proj_dim": 8, "ffn_dim": 24, "num_attention_heads": 2}
_OPT |= {"bos_token_id": 2, "eos_token_id": 2, "pad_token_id": 1}
_GPT2 = {"vocab_size": VOCAB, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 16}
_GPT2 |= {"bos_token_id": 2, "eos_token_id": 2}
_LLAMA = _SIZES | {"intermediate_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2}
_LLAMA |= {"pad_token_id": 0}
_CONFIGS = {
    "opt": lambda: OPTConfig(**_OPT),
    "llama": lambda: LlamaConfig(**_LLAMA, tie_word_embeddings=False),
    "gpt2": lambda: GPT2Config(**_GPT2),
    "phi3": lambda: Phi3Config(**_LLAMA, original_max_position_embeddings=16),
    "reward": lambda: OPTConfig(**_OPT, num_labels=1),
}


def tiny_model(kind):
    auto = AutoModelForSequenceClassification if kind == "reward" else AutoModelForCausalLM
    # The default deviation of 0.02 gives logits too alike to tell a wrong formula by.
    return random_model(_CONFIGS[kind](), scale=0.2, auto=auto)


def trained_model(kind, config):
    """The same with an adapter of random factors."""
    model = tiny_model(kind)
    apply_lora(model, config, seed=0)
    randomise(adapter_parameters(model).values())
    return model


def random_ids():
    return torch.randint(3, VOCAB, (2, 7), generator=torch.Generator().manual_seed(1))


def randomise(parameters):
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in parameters:
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
