"""Decoding with tiny models of many types: which steps are captured, and what is said of others."""

import warnings

import torch
from transformers import AutoModelForCausalLM

from dschat_lora.generation.generate import Decoder
from dschat_lora.generation.kv_cache import takes_cache
from dschat_lora.generation.sampling import Sampling
from fakecuda.device import fake_cuda
from fakecuda.programs import CUDA
from helpers.kinds import tiny_config as tiny


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
