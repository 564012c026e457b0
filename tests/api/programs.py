"""Rows and rewards of the tests of the Python API."""

import json

import torch

SUMS = [(a, b) for a in range(6) for b in range(6)]
ROWS = [{"prompt": f"What is {a} plus {b}?", "completion": f" {a + b}."} for a, b in SUMS]
PAIRS = [
    {"prompt": f"What is {a} plus {b}?", "chosen": f" {a + b}.", "rejected": f" {a}, or so."}
    for a, b in SUMS
]
SHORT = {
    **{"max_steps": 2, "max_seq_len": 64, "lora_dim": 4, "quiet": True},
    **{"sample_generations": 1, "per_device_train_batch_size": 4},
}
ROLLOUTS = {
    **{"algorithm": "grpo", "num_generations": 4, "max_answer_seq_len": 8, "max_steps": 2},
    **{"per_device_generation_batch_size": 8, "per_device_training_batch_size": 8},
    **{"max_prompt_seq_len": 32, "eval_prompts": 4, "quiet": True},
}


def brevity(responses):
    """A reward of short responses."""
    return [-float(len(each)) for each in responses]


def rightness(responses, rows, ended):
    """Whether the answer of the data is in a response that ended."""
    pairs = zip(responses, rows, ended, strict=True)
    return [float(row["completion"] in each) if end else None for each, row, end in pairs]


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


# Of a line of metrics.jsonl, what depends on time and memory.
TIMED = ("time", "seconds", "second", "tflops", "mfu", "memory")


def numbers(run):
    """The lines of metrics.jsonl without what depends on time."""
    return [
        {k: v for k, v in line.items() if not any(word in k for word in TIMED)}
        for line in run.metrics
    ]


def compared(outcome):
    """GRPO's advantages as an algorithm of one's own, slowly."""
    found = torch.zeros(len(outcome.total), dtype=torch.float64)
    for group in outcome.groups.unique():
        own = outcome.groups == group
        rewards = outcome.total[own].double()
        found[own] = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
    return found.nan_to_num(0.0).float()
