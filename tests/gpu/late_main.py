"""Steps whose results are read late on this GPU, and in time: losses and norms as JSON."""

import json
import os
import sys
from itertools import repeat

import torch
import torch.distributed as dist

from dschat_lora.config.groups import LoraConfig, OptimConfig, RunConfig
from dschat_lora.engine.distributed import device
from dschat_lora.lora.model import apply_lora
from dschat_lora.supervised.loop import in_turn, make_train_schedule, queue_steps, seeded_windows
from dschat_lora.supervised.objectives import SUPERVISED
from helpers.engines import make_engine
from helpers.runs import loader
from helpers.tiny import ragged_samples, tiny_model

STEPS = 12


def run(*, late):
    """(loss, norm) of each step; from the third on, a wait but for results would be an error."""
    model = tiny_model("llama").to(device())
    apply_lora(model, LoraConfig(lora_dim=4), seed=1)
    engine = make_engine(model, dtype="fp32", rows=4, accumulation_steps=2)
    source = loader(ragged_samples(96), micro=4, accumulation=2)
    plan = make_train_schedule(OptimConfig(max_steps=STEPS), RunConfig(), source.steps_per_epoch)
    windows = seeded_windows(source, plan, seed=1, ahead=late)
    losses = []
    for step, _ in in_turn(
        queue_steps(engine, windows, SUPERVISED, repeat(1.0)), lambda ahead: not late
    ):
        losses.append((step.loss, step.outcome.grad_norm))
        if late and len(losses) == 2:
            torch.cuda.set_sync_debug_mode("error")
    if late:
        torch.cuda.set_sync_debug_mode("default")
    return losses


def main():
    os.environ.setdefault("LOCAL_RANK", "0")
    on_gpu = device().type == "cuda"
    backend = "nccl" if on_gpu else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    json.dump({"in time": run(late=False), "late": run(late=on_gpu)}, sys.stdout)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
