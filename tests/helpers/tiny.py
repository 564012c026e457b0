"""The factory of tiny models of any architecture, their adapters, and samples of ragged lengths."""

import functools
import inspect

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from dschat_lora.algos.logprobs import IGNORE_INDEX
from dschat_lora.checkpoint.adapter import write_adapter
from dschat_lora.config.groups import LoraConfig
from dschat_lora.data.samples import SequenceSample
from dschat_lora.lora.model import adapter_layout, adapter_parameters, apply_lora
from dschat_lora.models.loading import share_parameters
from helpers import kinds

VOCAB, LENGTH = 61, 32
IDS = {"vocab_size": VOCAB, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
SHAPE = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    **IDS,
}
# Position embeddings that are learned, rotary on a part, or rotary; tied heads or not; biases;
# transposed layers, and a parallel residual; grouped queries.
KINDS = ("opt", "gpt2", "neox", "llama", "qwen2")
# Short names, and what differs from what its configuration knows of the shape.
_SPECIAL = {
    "neox": ("gpt_neox", {}),
    "llama": ("llama", {"tie_word_embeddings": False}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}),
    # Heads wider than their share of the width, normed, in three groups.
    "qwen3": ("qwen3", {"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 16}),
    "gemma3": ("gemma3_text", {}),
    "projected_opt": ("opt", {"word_embed_proj_dim": 16}),
    "reward": ("opt", {"word_embed_proj_dim": 16, "num_labels": 1}),
}


# Types whose attention is not plain: states between tokens, sliding, capped, latent, shared keys.
RECURRENT = (
    *("qwen3_5_text", "lfm2", "mamba2", "falcon_h1", "qwen3_next", "qwen3_5_moe_text"),
    *("olmo_hybrid", "lfm2_moe", "granitemoehybrid", "bamba", "nemotron_h", "zamba", "zamba2"),
)
# Recurrent too, but their blocks keep what they are told of sequences from their layers.
UNPACKED = ("mamba", "jamba")
# Without a cache of ours: states, or a cache of their own, lie in the layers.
UNCACHED = ("recurrent_gemma", "minimax")
UNUSUAL = (
    *(*RECURRENT, *UNPACKED, *UNCACHED, "gpt_oss", "gemma2", "deepseek_v3", "diffllama"),
    *("deepseek_v2", "gemma3_text", "gemma4_text", "gemma3n_text"),
)
# Kinds of state and attention that differ; the others are theirs in other arrangements.
FEW = ("qwen3_5_text", "lfm2", "mamba2", "falcon_h1", "gpt_oss", "gemma2", "deepseek_v3")


def tiny_config(kind, **changes):
    """Of a type of transformers, or a short name, without dropout."""
    name, special = _SPECIAL.get(kind, (kind, {}))
    config = kinds.tiny_config(name, SHAPE, **special | changes)
    for field, value in list(vars(config).items()):
        if field.endswith(("dropout", "pdrop")) and isinstance(value, float):
            setattr(config, field, 0.0)
    return config


def tiny_model(kind, attention="sdpa", layers=2, *, scale=0.1, **changes):
    """The tiny model of a kind with random weights; of scores where it has ``num_labels``."""
    config = tiny_config(kind, num_hidden_layers=layers, **changes)
    scores = kind == "reward" or "num_labels" in changes
    auto = AutoModelForSequenceClassification if scores else AutoModelForCausalLM
    return random_model(config, scale=scale, auto=auto, attn_implementation=attention)


def random_model(config, *, scale=0.1, seed=0, auto=AutoModelForCausalLM, **options):
    """Of a configuration, with random weights large enough that a wrong formula shows."""
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(seed)
        model = auto.from_config(config, **options).eval()
        for parameter in model.parameters():
            parameter.add_(scale * torch.randn(parameter.shape))
    return model


def softcapped_model(**changes):
    """One whose logits are more than a linear layer of its hidden states."""
    changes = {"final_logit_softcapping": 2.0, "sliding_window": 64} | changes
    return tiny_model("gemma2", "eager", scale=0.2, **changes)


def unusual_model(kind):
    """The model of a type of ``UNUSUAL``, of sizes that all of them can have."""
    changes = {"max_position_embeddings": 256, "hidden_size": 64, "intermediate_size": 96}
    if kind == "gemma2":
        changes |= {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}
    return random_model(tiny_config(kind, **changes))


def random_ids():
    return torch.randint(3, 40, (2, 7), generator=torch.Generator().manual_seed(1))


def randomise(parameters):
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in parameters:
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))


def trained(model, config):
    """The model with an adapter of random factors."""
    apply_lora(model, config, seed=0)
    randomise(adapter_parameters(model).values())
    return model


def write_trained(directory, model, config, **more):
    """The adapter that a model has, on disk."""
    tensors = {name: p.detach() for name, p in adapter_parameters(model).items()}
    options = {"layout": adapter_layout(model), "base_model_name_or_path": "base"} | more
    write_adapter(directory, tensors, config, **options)


def save_tiny_model(kind, directory, layers=2):
    tiny_model(kind, layers=layers).save_pretrained(directory)


def ragged_samples(count, *, longest=20, seed=0):
    """Samples of 2 to ``longest`` tokens; the prompt part takes no loss, as in training data."""
    generator = np.random.default_rng(seed)
    samples = []
    for _ in range(count):
        size = int(generator.integers(2, longest + 1))
        ids = generator.integers(3, VOCAB, size).astype(np.int32)
        labels = ids.copy()
        labels[: int(generator.integers(0, size))] = IGNORE_INDEX
        samples.append(SequenceSample.of(ids, labels))
    return samples


def changing_inputs(model, change):
    """The same model, but its body gets ``change`` of what it is given."""
    # OPT's head is over the decoder within its body.
    body = getattr(model.base_model, "decoder", model.base_model)
    forward = body.forward

    @functools.wraps(forward)
    def changed(*args, **inputs):
        named = inspect.signature(forward).bind_partial(*args).arguments
        return forward(**change({**named, **inputs}))

    body.forward = changed
    return model


def adapted(base, seed):
    """Another model on the weights of ``base``, whose adapters change what it says."""
    model = share_parameters(base)
    apply_lora(model, LoraConfig(lora_dim=4), seed=seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("lora_B"):
                parameter.normal_(std=0.3, generator=generator)
    return model.eval()
