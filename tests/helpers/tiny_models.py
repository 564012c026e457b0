"""Tiny transformers models with random weights, built from configs alone."""

import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    OPTForSequenceClassification,
    Phi3Config,
    Phi3ForCausalLM,
)

VOCAB = 40


def _opt_config(**options):
    return OPTConfig(
        vocab_size=VOCAB,
        hidden_size=16,
        word_embed_proj_dim=8,
        ffn_dim=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=16,
        bos_token_id=2,
        eos_token_id=2,
        pad_token_id=1,
        **options,
    )


def _gpt2():
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCAB,
            n_embd=16,
            n_layer=2,
            n_head=2,
            n_positions=16,
            bos_token_id=2,
            eos_token_id=2,
        )
    )


def _llama():
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=16,
            pad_token_id=0,
            tie_word_embeddings=False,
        )
    )


def _phi3():
    return Phi3ForCausalLM(
        Phi3Config(
            vocab_size=VOCAB,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=16,
            original_max_position_embeddings=16,
            pad_token_id=0,
        )
    )


MODELS = {
    "opt": lambda: OPTForCausalLM(_opt_config()),
    "llama": _llama,
    "gpt2": _gpt2,
    "phi3": _phi3,
    "reward": lambda: OPTForSequenceClassification(_opt_config(num_labels=1)),
}


def tiny_model(kind):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = MODELS[kind]().eval()
        # The default deviation of 0.02 gives logits too alike to tell a wrong formula by.
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.2 * torch.randn(parameter.shape))
    return model


def random_ids():
    return torch.randint(3, VOCAB, (2, 7), generator=torch.Generator().manual_seed(1))


def randomise(parameters):
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in parameters:
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
