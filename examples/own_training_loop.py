"""A training loop of one's own: LoRA under DeepSpeed-Chat's names, and deepspeed.initialize.

Run it by ``python``, ``deepspeed`` or ``torchrun``; it has a model and data to start with.
"""

import argparse
import json
import warnings
from typing import Any

import deepspeed
import torch
from torch.utils.data import DataLoader, DistributedSampler
from transformers import AutoModelForCausalLM, AutoTokenizer

from dschat_lora import (
    convert_linear_layer_to_lora,
    convert_lora_to_linear_layer,
    get_optimizer_grouped_parameters,
    make_model_gradient_checkpointing_compatible,
    only_optimize_lora_parameters,
)
from dschat_lora.assets import BUNDLED_DATA, BUNDLED_MODEL
from dschat_lora.engine.distributed import device, rank
from dschat_lora.engine.ds_config import engine_config, read_deepspeed_json
from dschat_lora.engine.process_group import init_distributed, shutdown
from dschat_lora.engine.zero import gather_to_cpu

# DeepSpeed calls collectives by names that torch has since renamed.
warnings.filterwarnings("ignore", category=FutureWarning)
parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--model_name_or_path", default=str(BUNDLED_MODEL))
parser.add_argument("--data_path", default=str(BUNDLED_DATA["train"]))
parser.add_argument("--output_dir", default="output/own_training_loop")
parser.add_argument("--zero_stage", type=int, default=2, choices=range(4))
parser.add_argument("--max_steps", type=int, default=30)
parser.add_argument("--local_rank", type=int)  # the deepspeed launcher passes it
args = parser.parse_args()

init_distributed()  # of this process alone where there is no launcher
torch.manual_seed(1234)
dtype = torch.bfloat16 if device().type == "cuda" else torch.float32
tokenizer = AutoTokenizer.from_pretrained(args.model_name_or_path)
model = AutoModelForCausalLM.from_pretrained(args.model_name_or_path, dtype=dtype)

# The factors are fp32 beside the frozen base, whatever its type.
model = convert_linear_layer_to_lora(model, "decoder.layers.", lora_dim=16, lora_scaling=32)
model = only_optimize_lora_parameters(model)
model.gradient_checkpointing_enable()
model = make_model_gradient_checkpointing_compatible(model)
groups = get_optimizer_grouped_parameters(model, weight_decay=0.0, lora_lr=2e-3)
optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95))

config = engine_config(
    read_deepspeed_json(f"configs/ds/zero{args.zero_stage}.json"),  # "auto" becomes these values:
    zero_stage=args.zero_stage,
    offload=False,
    micro_batch_size=4,
    accumulation_steps=2,
    max_grad_norm=1.0,
    native_dtype=None,  # what trains is fp32 already: DeepSpeed keeps no masters
)
engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)


def collate(rows: list[dict[str, str]]) -> dict[str, torch.Tensor]:
    """Token ids, mask and labels, without a loss on prompt and padding."""
    texts = [row["prompt"] + row["chosen"] + tokenizer.eos_token for row in rows]
    batch = tokenizer(texts, padding=True, return_tensors="pt", padding_side="right")
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    for label, row in zip(labels, rows, strict=True):
        label[: len(tokenizer(row["prompt"])["input_ids"])] = -100
    return {**batch, "labels": labels}


with open(args.data_path, encoding="utf-8") as lines:
    data: Any = [json.loads(line) for line in lines]
sampler: Any = DistributedSampler(data, shuffle=True, seed=1234)
loader = DataLoader(data, batch_size=4, sampler=sampler, collate_fn=collate)

engine.train()
losses = []
for batch in loader:
    loss = engine(**{name: tensor.to(device()) for name, tensor in batch.items()}).loss
    losses.append(loss.detach())
    engine.backward(loss)
    ends_step = engine.is_gradient_accumulation_boundary()
    engine.step()
    if ends_step:
        if rank() == 0:
            print(f"step {engine.global_steps}: loss {torch.stack(losses).mean():.6f}")
        losses = []
    if engine.global_steps == args.max_steps:
        break

# On every rank: ZeRO 3 gathers one layer, one parameter at a time.
model = convert_lora_to_linear_layer(engine.module)
weights = gather_to_cpu(dict(model.named_parameters()))
if rank() == 0:
    model.save_pretrained(args.output_dir, state_dict=weights)
    tokenizer.save_pretrained(args.output_dir)
shutdown()
