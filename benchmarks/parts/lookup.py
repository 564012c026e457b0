"""Decoding with prompt look-up against decoding without, in turns, of answers that quote or not.

``BENCH_LOOKUP=opt-125m`` measures that shape with random weights on a CPU too, in three minutes.
"""

import os
from collections.abc import Sequence
from dataclasses import replace
from statistics import quantiles
from typing import Any

import torch

from benchmarks.common.report import PartReport, print_table
from benchmarks.common.shapes import PAD_ID, SHAPES, TINY, random_model
from benchmarks.parts.decode import SMALL, now
from dschat_lora.generation.generate import Decoder
from dschat_lora.generation.sampling import Sampling

PROMPT, ANSWER, ROUNDS = 192, 64, 5  # tokens of a prompt and of an answer; turns
NUM_DRAFTS = 10
QUOTED, NEW = 20, 4  # tokens that are quoted at a time, and that stand between quotations
LEAST_SPEED, MOST_COST = 1.8, 1.05


def run(report: PartReport, *, tiny: bool) -> None:
    """Measure, store, print and check."""
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda" if on_gpu else "cpu")
    wide = os.environ.get("BENCH_LOOKUP") == "opt-125m"
    shape = SHAPES["opt-1.3b"] if on_gpu and not tiny else SMALL
    if not on_gpu and not wide:
        shape = replace(TINY["opt-1.3b"], positions=2048, vocab_size=2048)
    model = random_model(shape, dtype=torch.bfloat16 if on_gpu else torch.float32, device=device)
    cases = []
    for rows in (1, 8):
        for name, answer in answers(shape.vocab_size).items():
            cases.append({"rows": rows, "answers": name, **compare(model, answer, rows, device)})
            report.store({"cases": cases})
            report.check(f"{rows} rows, {name}: the same texts", cases[-1]["equal"])
    if wide or (on_gpu and not tiny):
        one = {case["answers"]: case["speed"][1] for case in cases if case["rows"] == 1}
        report.check(f"quotations come {LEAST_SPEED} times as fast", one["quote"] >= LEAST_SPEED)
        report.check("others cost little", min(one.values()) >= 1 / MOST_COST)
    names = ["rows", "answers", "without", "with", "quartiles of the ratio", "drafted", "accepted"]
    table = [[*list(case.values())[:4], case["speed"], *list(case.values())[5:7]] for case in cases]
    print_table(names, table)


def answers(vocabulary: int) -> dict[str, list[list[int]]]:
    """Prompts, and answers behind them, by what they do."""
    ids = torch.randperm(vocabulary - 4, generator=torch.Generator().manual_seed(0)) + 4
    prompt, others = ids[:PROMPT].tolist(), iter(ids[PROMPT:].tolist())
    texts: dict[str, list[int]] = {"quote": [], "do not": [], "mislead": []}
    place = 0
    while len(texts["quote"]) < ANSWER:
        texts["quote"] += prompt[place : place + QUOTED] + [next(others) for _ in range(NEW)]
        place = (place + 3 * QUOTED) % (PROMPT - QUOTED)
    texts["do not"] = [next(others) for _ in range(ANSWER)]
    for at in range(0, ANSWER, 4):  # two tokens of the prompt, which something else follows
        texts["mislead"] += [*prompt[at : at + 2], next(others), next(others)]
    return {name: [prompt, text[:ANSWER]] for name, text in texts.items()}


@torch.no_grad()
def compare(
    model: Any, answer: Sequence[Sequence[int]], rows: int, device: torch.device
) -> dict[str, Any]:
    """Both ways in turns, of a model whose positions say what the answer's tokens are."""
    prompt, text = answer
    positions = model.get_decoder().embed_positions.weight
    head = model.get_output_embeddings().weight
    first = len(prompt) - 1 + positions.shape[0] - model.config.max_position_embeddings
    directions = torch.nn.functional.normalize(head[torch.tensor(text, device=device)].float(), -1)
    positions[first : first + len(text)] = (100 * directions).to(positions.dtype)
    decoders = [
        Decoder(model, eos_ids=(), pad_id=PAD_ID, device=device, num_drafts=count)
        for count in (0, NUM_DRAFTS)
    ]
    seconds: list[list[float]] = []
    equal = True
    for turn in range(ROUNDS + 1):
        took, said = [], []
        for decoder in decoders:
            start = now(device)
            seeds = [[turn * rows + row for row in range(rows)]]
            found = decoder([prompt], Sampling(len(text), temperature=0.5), seeds=seeds).tokens()
            took.append(now(device) - start)
            said.append(found)
        equal = equal and said[0] == said[1]
        seconds.append(took)
    rates = [[rows * len(text) / each for each in took] for took in seconds[1:]]
    without, with_ = (sorted(each)[len(each) // 2] for each in zip(*rates, strict=True))
    return {
        "without": without,
        "with": with_,
        "speed": quantiles([b / a for a, b in rates], n=4),
        "drafted": decoders[1].drafted / (ROUNDS + 1) / rows,
        "accepted": decoders[1].accepted / (ROUNDS + 1) / rows,
        "said_as_meant": sum(a == b for a, b in zip(said[0][0], text, strict=True)) / len(text),
        "equal": equal,
    }
