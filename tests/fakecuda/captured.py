"""Decoding with tiny models of many types: which steps are captured, and what is said of others."""

import warnings

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from dschat_lora.generation.forward import takes_cache
from dschat_lora.generation.generate import Decoder
from dschat_lora.generation.sampling import Sampling
from fakecuda.device import fake_cuda
from fakecuda.matrix import SIZE
from fakecuda.programs import CUDA

_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_CHOSEN = ("num_experts_per_tok", "moe_k")
_SHARED = ("n_shared_experts", "moe_num_shared_experts", "n_group", "topk_group")
_WIDTHS = ("moe_intermediate_size", "shared_expert_intermediate_size")
EXPERTS = (
    dict.fromkeys(_COUNTS, 4)
    | dict.fromkeys(_CHOSEN, 2)
    | dict.fromkeys(_SHARED, 1)
    | dict.fromkeys(_WIDTHS, 32)
    | {"first_k_dense_replace": 0, "moe_layer_start_index": 0}
)
LATENT = dict.fromkeys(("q_lora_rank", "kv_lora_rank", "v_head_dim"), 16)
LATENT |= dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim"), 8)


def tiny(kind):
    """The configuration of a type, which gets what it knows of the sizes."""
    default = AutoConfig.for_model(kind)
    known = EXPERTS | (LATENT if hasattr(default, "kv_lora_rank") else {"head_dim": 16})
    sizes = SIZE | {name: value for name, value in known.items() if hasattr(default, name)}
    if layers := getattr(default, "layer_types", None):
        sizes["layer_types"] = [layers[0], layers[-1]]
    return AutoConfig.for_model(kind, **sizes)


def decode(kind, card, dtype):
    """What is noted of seven tokens in answer to each of two prompts."""
    config = tiny(kind)
    with fake_cuda(card) as watch, warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        watch.truth = False  # no sequence ends
        with CUDA:
            model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype)).eval()
        decoder = Decoder(model, eos_ids=[2], pad_id=1, device=CUDA)
        decoder([[5] * 9, [6] * 4], Sampling(7), seeds=[[0], [1]])
        said = [str(each.message) for each in told if "CUDA graphs" in str(each.message)]
        left = bool(watch.underway or watch.stream.captures)
        return {
            "begun": len(watch.graphs),
            "replays": watch.replays,
            "takes_cache": takes_cache(model),
            "said": said,
            "left": left,
        }
