"""Stages of tiny models with random weights, of the families of :mod:`fakecuda.matrix`."""

import shutil
import warnings
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.integrations.moe import _grouped_mm

from dschat_lora import assets
from fakecuda import programs
from fakecuda.device import fake_cuda
from fakecuda.matrix import FAMILIES
from helpers.kinds import SIZE

MODEL = Path(assets.__file__).parent / "model"  # whose tokenizer they take


def write_model(family, layers, directory):
    """Write weights, configuration and tokenizer of a family's model."""
    kind, others = FAMILIES[family]
    config = AutoConfig.for_model(kind, **SIZE | others)
    config.num_hidden_layers = layers
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(directory)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(MODEL / name, directory)


def stage_of(family, layers, directory, **stage):
    """:func:`fakecuda.programs.stage` of a family's model; ``said`` is what it says of graphs."""
    write_model(family, layers, directory)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        noted = programs.stage(**stage)
    words = [str(each.message) for each in said]
    return noted | {"said": [text for text in words if "CUDA graphs" in text]}


def waits_of_experts(card, dtype):
    """Times that the host waits for a product of two groups of rows with a matrix each."""
    with fake_cuda(card) as watch:
        kind = {"dtype": getattr(torch, dtype), "device": programs.CUDA}
        rows, weights = torch.empty(8, 16, **kind), torch.empty(2, 16, 16, **kind)
        ends = torch.empty(2, dtype=torch.int32, device=programs.CUDA)
        _grouped_mm(rows, weights, ends)
        return sum(watch.waits.values())
