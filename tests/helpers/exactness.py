"""Prints how far runs that should be one run differ.

PYTHONPATH=.:tests python -m helpers.exactness
"""

import sys
import tempfile
from pathlib import Path

import peft
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from dschat_lora.config.groups import LoraConfig
from helpers import plain
from helpers.launcher import Launcher
from helpers.ranks import Ranks
from helpers.runs import LORA, load_model
from helpers.tiny import ragged_samples, save_tiny_model

STAGES = (0, 1, 2, 3)
SHAPES = {1: [(8, 1), (4, 2), (1, 8)], 2: [(4, 1), (2, 2), (1, 4)]}


def say(*cells):
    sys.stdout.write("| " + " | ".join(map(str, cells)) + " |\n")
    sys.stdout.flush()


def spread(rows):
    """Largest difference within a column of (runs, steps) numbers."""
    values = torch.tensor(rows, dtype=torch.float64)
    return f"{float((values.max(0).values - values.min(0).values).max()):.1e}"


def relative(value, expected):
    difference = sum((value[n].double() - expected[n].double()).square().sum() for n in expected)
    whole = sum(expected[n].double().square().sum() for n in expected)
    return float((difference / whole).sqrt())


def largest(pairs):
    return f"{max(float((a.double() - b.double()).abs().max()) for a, b in pairs):.1e}"


def trajectories(pools, path):
    for dtype in ("fp32", "bf16", "fp16"):
        reports = {}
        for size, pool in pools.items():
            run = {"path": path, "dtype": dtype, "micro": 4 // size, "accumulation": 2}
            run["overflow_at"] = 12 if dtype == "fp16" else None
            runs = [run | {"stage": stage} for stage in STAGES]
            results = pool.run("helpers.runs:train_many", timeout=600, runs=runs)[0]
            reports |= {(size, stage): r for stage, r in zip(STAGES, results, strict=True)}
        first = reports[1, 0]
        for (size, stage), report in reports.items():
            finite = [s for s in range(30) if not report["skipped"][s]]
            norms = [[r["norms"][s] for s in finite] for r in (first, report)]
            pairs = zip(report["trained"].values(), first["trained"].values(), strict=True)
            say(
                f"ZeRO {stage}, {size} processes, {dtype}, 30 steps, against ZeRO 0 alone",
                f"loss {spread([first['losses'], report['losses']])}",
                f"gradient norm {spread(norms)}",
                f"adapters {largest(pairs)}",
                f"skipped {[s for s, skipped in enumerate(report['skipped']) if skipped]}",
                f"base tensors changed {len(report['base_changed'])}",
            )
        losses = first["losses"]
        say(f"all eight, {dtype}", f"loss {spread([r['losses'] for r in reports.values()])}",
            f"the loss itself goes from {losses[0]:.4f} to {losses[-1]:.4f}")  # fmt: skip


def shapes(pools, path):
    samples, reports, gradients = ragged_samples(27), {}, {}
    from engine.test_peft_loop import sample_windows

    theirs = plain.peft_copy_of(
        load_model(path, LORA), AutoModelForCausalLM.from_pretrained(path), LoraConfig(**LORA)
    ).double()
    plain.accumulate(theirs, next(sample_windows(samples, micro=8, accumulation=1)))
    exact = {
        n.removeprefix("base_model.model.").removesuffix(".default.weight"): p.grad
        for n, p in theirs.named_parameters()
        if p.requires_grad
    }
    for size, pool in pools.items():
        for micro, accumulation in SHAPES[size]:
            run = {"path": path, "samples": 27, "micro": micro, "accumulation": accumulation}
            report = pool.run("helpers.runs:train", steps=9, want_gradient=True, **run)[0]
            reports[size, micro, accumulation] = report
            gradients[size, micro, accumulation] = report["gradient"]
    first = reports[1, 8, 1]
    for (size, micro, accumulation), report in reports.items():
        gradient = gradients[size, micro, accumulation]
        say(
            f"{size} processes x micro batch {micro} x accumulation {accumulation}",
            f"gradient, relative to fp64 PEFT {relative(gradient, exact):.1e}",
            f"relative to (8, 1) {relative(gradient, first['gradient']):.1e}",
            f"loss over 9 steps {spread([first['losses'], report['losses']])}",
        )


def loops(pools, directory):
    from engine.test_peft_loop import STRONG_LORA, plain_run

    for kind in ("opt", "gpt2", "neox", "llama", "qwen2"):
        path = str(directory / kind)
        for name, changes in {
            "no clipping": {"max_grad_norm": 0.0},
            "clipped at 1": {"max_grad_norm": 1.0},
            "clipped at 0.05": {"max_grad_norm": 0.05},
            "packed": {"max_grad_norm": 1.0, "packing": True},
        }.items():
            shape = (4, 1) if "packing" in changes else (4, 2)
            losses, norms, _ = plain_run(path, shape=shape, lora=STRONG_LORA, **changes)
            for size, pool in pools.items():
                run = {"path": path, "steps": 12, "samples": 44, "lora": STRONG_LORA}
                run |= {"micro": 4 // size, "accumulation": shape[1], **changes}
                ours = pool.run("helpers.runs:train", **run)[0]
                say(
                    f"plain PEFT loop, {kind}, {name}, {size} processes, 12 steps",
                    f"loss {spread([losses, ours['losses']])}",
                    f"gradient norm {spread([norms, ours['norms']])} of {max(norms):.2f}",
                )


def adapters(pools, directory):
    for kind in ("opt", "llama"):
        path, first = str(directory / kind), None
        for stage in STAGES:
            target = directory / f"{kind}-{stage}"
            run = {"path": path, "stage": stage, "steps": 6, "micro": 2}
            report = pools[2].run("helpers.runs:train", save_adapter_to=str(target), **run)[0]
            stored = load_file(target / "adapter_model.safetensors")
            first = first or stored
            base = AutoModelForCausalLM.from_pretrained(path)
            theirs = peft.PeftModel.from_pretrained(base, target).eval()
            ours = load_model(path, LORA).eval()
            ids = torch.arange(3, 23)[None]
            with torch.no_grad():
                for name, value in report["trained"].items():
                    ours.get_parameter(name).copy_(value)
                logits = largest([(ours(ids).logits, theirs(ids).logits)])
            say(
                f"adapter of {kind}, ZeRO {stage}, 2 processes",
                f"tensors against ZeRO 0 {largest((stored[n], first[n]) for n in first)}",
                f"logits in stock PEFT {logits}",
            )


def memory(directory, launcher):
    from engine.test_zero3_loading import save_wide_model

    save_wide_model(directory / "wide")
    pool = Ranks(2, directory, launcher)
    paths = {"path": str(directory / "wide"), "tiny_path": str(directory / "llama")}
    reports = pool.run("engine.test_zero3_loading:peak_rss", **paths)
    pool.stop()
    for rank, report in enumerate(reports):
        say(
            f"ZeRO 3 loading, rank {rank}",
            f"model {report['model'] / 2**20:.0f} MiB",
            f"peak memory grew by {report['growth'] / 2**20:.0f} MiB",
        )


def main():
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        for kind in ("opt", "gpt2", "neox", "llama", "qwen2"):
            save_tiny_model(kind, directory / kind)
        pools, launcher = {}, Launcher(directory / "launcher")
        for size in (1, 2):
            (directory / f"ranks{size}").mkdir()
            pools[size] = Ranks(size, directory / f"ranks{size}", launcher)
        try:
            trajectories(pools, str(directory / "opt"))
            shapes(pools, str(directory / "llama"))
            loops(pools, directory)
            adapters(pools, directory)
        finally:
            for pool in pools.values():
                pool.stop()
        memory(directory, launcher)
        launcher.stop()


if __name__ == "__main__":
    main()
