"""GPT-2 with factors for q and v, smoothed labels and the original's AdamW: ours and loralib's."""

from dataclasses import replace
from itertools import islice

import loralib
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

from dschat_lora.addons.nlg.config import NlgConfig, NlgOptimConfig
from dschat_lora.addons.nlg.validation import schedule
from dschat_lora.config.groups import LoraConfig
from dschat_lora.engine.build import TrainEngine
from dschat_lora.engine.distributed import data_rank
from dschat_lora.engine.zero import gather_to_cpu
from dschat_lora.lora.model import adapter_parameters
from dschat_lora.lora.rates import parameter_groups
from dschat_lora.models.causal_lm import CausalLMLoss
from dschat_lora.runtime.setup import adamw_update, shard_model
from dschat_lora.supervised.objectives import SUPERVISED
from helpers.runs import engine_settings, load_model, loader
from helpers.steps import train_steps
from helpers.tiny import ragged_samples

RATE, DECAY, SMOOTHING, STEPS, ROWS = 5e-3, 0.1, 0.1, 20, 8
BETAS, EPSILON = (0.9, 0.98), 1e-6
LORA = {"lora_dim": 4, "lora_alpha": 32.0, "target_modules": ["c_attn"], "enable_lora": ["q", "v"]}


def config(accumulation=1):
    optim = NlgOptimConfig(
        learning_rate=RATE,
        default_lora_learning_rate=None,
        weight_decay=DECAY,
        adam_beta2=BETAS[1],
        adam_epsilon=EPSILON,
        num_warmup_steps=3,
        max_grad_norm=0.0,
        correct_bias=False,
        decay_after_update=True,
    )
    whole = NlgConfig(optim=optim, label_smooth=SMOOTHING)
    return replace(whole, batch=replace(whole.batch, gradient_accumulation_steps=accumulation))


def ours(path, *, stage, micro, accumulation):
    """Losses, norms and factors of a run on the engine; call on every rank."""
    options = config(accumulation)
    settings = replace(
        engine_settings(stage=stage, micro=micro, accumulation=accumulation, max_grad_norm=0.0),
        betas=BETAS,
        epsilon=EPSILON,
        update=adamw_update(options.optim),
    )
    model = load_model(path, as_options(LORA), meta=stage == 3 and data_rank() > 0)
    shard_model(model, settings)
    network = CausalLMLoss(model, label_smoothing=options.label_smoothing)
    engine = TrainEngine(network, parameter_groups(model, options.optim), settings)
    source = loader(ragged_samples(64), micro=micro, accumulation=accumulation)
    windows = (window for epoch in range(100) for window in source.epoch(epoch))
    factors = map(schedule(options)(STEPS), range(STEPS))
    results = list(train_steps(engine, windows, SUPERVISED, factors))
    return {
        "losses": [result.loss for result in results],
        "norms": [result.outcome.grad_norm for result in results],
        "factors": gather_to_cpu(adapter_parameters(model)),
        # at ZeRO 3 a part of them
        "own": {name: p.detach().clone() for name, p in adapter_parameters(model).items()},
    }


def ours_many(path, *, runs):
    return [ours(path, **run) for run in runs]


def as_options(lora):
    return LoraConfig(
        **{name: tuple(value) if isinstance(value, list) else value for name, value in lora.items()}
    ).__dict__


def loralibs(path):
    """The same by loralib's layer in transformers' model, torch's loss and a loop over numbers.

    Rows of a step are one batch; the update is microsoft/LoRA's, written out for each tensor.
    """
    drawn = adapter_parameters(load_model(path, as_options(LORA)))
    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager").train()
    for name, module in list(model.named_modules()):
        if name.endswith("c_attn"):
            layer = loralib.MergedLinear(
                *(module.nx, module.nf),
                r=LORA["lora_dim"],
                lora_alpha=LORA["lora_alpha"],
                enable_lora=[True, False, True],
                fan_in_fan_out=True,
                merge_weights=False,
            )
            layer.load_state_dict(
                {
                    "weight": module.weight,
                    "bias": module.bias,
                    "lora_A": drawn[f"{name}.lora_A"],
                    "lora_B": drawn[f"{name}.lora_B"],
                }
            )
            model.set_submodule(name, layer)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    loralib.mark_only_lora_as_trainable(model)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    moments = {name: (torch.zeros_like(p), torch.zeros_like(p)) for name, p in trained.items()}
    losses, norms = [], []
    source = loader(ragged_samples(64), micro=ROWS, accumulation=1)
    windows = (window for epoch in range(100) for window in source.epoch(epoch))
    for step, (batch,) in enumerate(islice(windows, STEPS)):
        logits = model(input_ids=batch.input_ids).logits.flatten(0, 1)[batch.logit_positions]
        loss = F.cross_entropy(logits, batch.target_ids, label_smoothing=SMOOTHING)
        gradients = dict(zip(trained, torch.autograd.grad(loss, trained.values()), strict=True))
        rate = RATE * (step / 3 if step < 3 else (STEPS - step) / (STEPS - 3))
        with torch.no_grad():
            for name, gradient in gradients.items():
                mean, square = moments[name]
                mean.mul_(BETAS[0]).add_((1 - BETAS[0]) * gradient)
                square.mul_(BETAS[1]).add_((1 - BETAS[1]) * gradient * gradient)
                trained[name] -= rate * mean / (square.sqrt() + EPSILON)
                trained[name] -= rate * DECAY * trained[name]
        losses.append(float(loss.detach()))
        norms.append(float(torch.cat([g.flatten() for g in gradients.values()]).norm()))
    return {
        "losses": losses,
        "norms": norms,
        "factors": {name: p.detach() for name, p in trained.items()},
    }
