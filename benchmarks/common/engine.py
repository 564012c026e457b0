"""An engine with the stages' defaults."""

from torch import nn
from transformers import PreTrainedModel

from dschat_lora.config.groups import OptimConfig
from dschat_lora.engine.build import EngineSettings, TrainEngine
from dschat_lora.lora.rates import parameter_groups
from dschat_lora.models.causal_lm import CausalLMLoss


def make_engine(
    model: PreTrainedModel,
    *,
    dtype: str,
    rows: int,
    accumulation_steps: int,
    network: nn.Module | None = None,
    rate: float | None = None,
) -> TrainEngine:
    """An engine with the stages' defaults over a transformers model with adapters.

    ``network`` computes what is trained on; by default the loss of the next token.
    """
    optim = OptimConfig(lora_learning_rate=rate)
    settings = EngineSettings(
        dtype=dtype,
        zero_stage=0,
        offload=False,
        micro_batch_size=rows,
        accumulation_steps=accumulation_steps,
        max_grad_norm=optim.max_grad_norm,
        betas=(optim.adam_beta1, optim.adam_beta2),
        epsilon=optim.adam_epsilon,
        deepspeed_json={},
    )
    return TrainEngine(network or CausalLMLoss(model), parameter_groups(model, optim), settings)
