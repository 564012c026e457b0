"""A GPT-2 with the weights of a file."""

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from dschat_lora.checkpoint.gpt2_checkpoint import Gpt2Checkpoint, load_base
from dschat_lora.config.groups import ModelConfig
from dschat_lora.models.causal_lm import load_config, load_options


def gpt2_with_weights(
    name: str, config: ModelConfig, checkpoint: Gpt2Checkpoint, *, dtype: torch.dtype
) -> PreTrainedModel:
    """A model of the architecture of ``name``, a hub name or a directory, with other weights.

    Raises:
        ValueError: if ``name`` is no GPT-2, or the weights do not fit it.
    """
    settings = load_config(name, config)
    if settings.model_type != "gpt2":
        raise ValueError(
            f"--init_checkpoint {checkpoint.path} is a file of GPT-2's weights; {name} is a "
            f"{settings.model_type} model"
        )
    options = load_options(config, dtype)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(settings, **options)
    load_base(model, checkpoint)
    return model.eval()
