"""Tiny pretrained models of several architectures, and samples of ragged lengths."""

import functools
import inspect

import numpy as np
import torch
from transformers import AutoModelForCausalLM
from transformers.models.gemma2 import Gemma2Config
from transformers.models.gpt2 import GPT2Config
from transformers.models.gpt_neox import GPTNeoXConfig
from transformers.models.llama import LlamaConfig
from transformers.models.opt import OPTConfig
from transformers.models.qwen2 import Qwen2Config
from transformers.models.qwen3 import Qwen3Config
from transformers.models.qwen3_moe import Qwen3MoeConfig

from dschat_lora.algos.logprobs import IGNORE_INDEX
from dschat_lora.checkpoint.adapter import write_adapter
from dschat_lora.config.groups import LoraConfig
from dschat_lora.data.samples import SequenceSample
from dschat_lora.lora.model import adapter_layout, adapter_parameters, apply_lora
from dschat_lora.models.loading import share_parameters

VOCAB, LENGTH = 61, 32

IDS = {"vocab_size": VOCAB, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_LLAMA = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
SHAPE = _LLAMA | IDS


def _config(kind):
    if kind == "opt":  # tied, learned positions, biases
        return OPTConfig(
            hidden_size=32,
            word_embed_proj_dim=32,
            ffn_dim=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=64,
            **IDS,
        )
    if kind == "gpt2":  # tied, transposed linear layers
        return GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=64, **IDS)
    if kind == "neox":  # untied, rotary on a part, parallel residual
        return GPTNeoXConfig(
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=64,
            **IDS,
        )
    if kind == "llama":  # untied, rotary, grouped queries
        return LlamaConfig(tie_word_embeddings=False, **SHAPE)
    if kind == "qwen2":  # tied, rotary, grouped queries, biases
        return Qwen2Config(tie_word_embeddings=True, **SHAPE)
    if kind == "qwen3":  # heads wider than their share of the width, normed, in three groups
        heads = {"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 16}
        return Qwen3Config(**SHAPE | heads)
    if kind == "qwen3_moe":  # fused experts
        experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
        return Qwen3MoeConfig(head_dim=8, **experts, **SHAPE)
    raise KeyError(kind)


KINDS = ("opt", "gpt2", "neox", "llama", "qwen2")


def tiny_model(kind, attention="sdpa", layers=2):
    """The tiny model of a kind, without dropout."""
    config = _config(kind)
    config.num_hidden_layers = layers
    for name in list(vars(config)):
        if name.endswith(("dropout", "pdrop")) and isinstance(getattr(config, name), float):
            setattr(config, name, 0.0)
    return random_model(config, attn_implementation=attention)


def random_model(config, *, scale=0.1, seed=0, auto=AutoModelForCausalLM, **options):
    """Of a configuration, with random weights large enough that a wrong formula shows."""
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(seed)
        model = auto.from_config(config, **options).eval()
        for parameter in model.parameters():
            parameter.add_(scale * torch.randn(parameter.shape))
    return model


def softcapped_model(**options):
    """One whose logits are more than a linear layer of its hidden states."""
    config = Gemma2Config(**SHAPE, head_dim=8, final_logit_softcapping=2.0, **options)
    return random_model(config, scale=0.2, attn_implementation="eager")


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
