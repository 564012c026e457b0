"""All four stages with data in memory, alone or on every process of a launch."""

import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import dschat_lora as dl
from api.programs import PAIRS, ROWS, brevity

processes = int(os.environ.get("WORLD_SIZE", "1"))
rows = {"per_device_train_batch_size": 4 // processes, "max_steps": 2, "max_seq_len": 64}
sft = dl.sft(data=ROWS, lora_dim=4, quiet=True, **rows)
scorer = dl.reward(sft, data=PAIRS, quiet=True, **rows)
dpo = dl.dpo(sft, data=PAIRS, quiet=True, **rows)
sizes = {f"per_device_{name}_batch_size": 16 // processes for name in ("generation", "training")}
rlhf = dl.rlhf(
    sft,
    data=ROWS,
    rewards=[brevity, scorer],
    max_steps=2,
    max_answer_seq_len=8,
    quiet=True,
    **sizes,
)
assert (dl.merge(sft) / "config.json").is_file()
if os.environ.get("RANK", "0") == "0":
    runs = {"sft": sft, "reward": scorer, "dpo": dpo, "rlhf": rlhf}
    losses = {
        name: [
            line.get("loss", line.get("value_loss"))
            for line in run.metrics
            if line["kind"] == "train"
        ]
        for name, run in runs.items()
    }
    sys.stdout.write(json.dumps(losses) + "\n")
