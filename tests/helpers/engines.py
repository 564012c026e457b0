"""Engines with the stages' defaults at every ZeRO stage."""

from dschat_lora.config.options import with_values
from dschat_lora.config.stages import SupervisedConfig
from dschat_lora.engine.build import TrainEngine
from dschat_lora.lora.rates import parameter_groups
from dschat_lora.models.causal_lm import CausalLMLoss
from dschat_lora.runtime.setup import engine_settings


def make_engine(model, *, dtype, rows, accumulation_steps, zero_stage=0, offload=False):
    """An engine over the loss of a transformers model with adapters."""
    values = {"gradient_accumulation_steps": accumulation_steps, "offload": offload}
    config = with_values(SupervisedConfig(), values)
    settings = engine_settings(config, dtype=dtype, zero_stage=zero_stage, micro_batch_size=rows)
    return TrainEngine(CausalLMLoss(model), parameter_groups(model, config.optim), settings)
