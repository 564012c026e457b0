"""Runs after each other: the memory of the process, and the bytes of its tensors, after each."""

import gc
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import psutil
import torch

import dschat_lora as dl
from api.programs import ROLLOUTS, ROWS, SHORT, brevity

LEAST = {**ROLLOUTS, "max_steps": 1}
sizes, tensors = [], []
for _ in range(3):
    run = dl.rlhf(dl.sft(data=ROWS, **SHORT), data=ROWS, rewards=brevity, **LEAST)
    run.generate(["What is 2 plus 3?"], max_new_tokens=4)
    gc.collect()
    sizes.append(psutil.Process().memory_info().rss)
    alive = (each for each in gc.get_objects() if issubclass(type(each), torch.Tensor))
    tensors.append(sum(each.numel() * each.element_size() for each in alive))
sys.stdout.write(json.dumps([sizes, tensors]) + "\n")
